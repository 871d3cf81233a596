"""Translates the jaxprs of the kernels to words (`words.py`), primitive by primitive.

    jaxpr { a: mul x w; b: add a 3 }    ->    add(scaled(x, w), constant(3)) for each element

An array is either known and consists of numbers, or it is a numpy array of words. JAX itself computes what depends on
no input.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from qjax.contrib.rtl import words
from qjax.contrib.rtl.arrays import ARRAYS, is_known, lifted
from qjax.contrib.rtl.sums import SUMS
from qjax.contrib.rtl.words import Word, constant
from qjax.export.emit.requantizations import line_within
from qjax.export.emit.requantize_as_shift import NEVER, Line
from qjax.graph.float_parts import plainest
from qjax.numerics.calls import CALLS, Named, called_program, named_call, names_kept
from qjax.numerics.rounding import Rounding
from qjax.numerics.rules import PowerOfTwo
from qjax.support.errors import Unsupported
from qjax.tracing.loop_params import with_counts

# ----------------------------------------------------------------------------------------------------------------------
# The requantization of an accumulator as one product with a short factor, an addition, a shift and a clamp.
#
# The rules of the runtimes multiply by 31 bits, or emulate float32. `emit.requantize_as_shift` finds a short form that
# computes the same codes for every accumulator that can occur.

_BITS = (10, 14, 18, 31)
"""Bits of a factor, tried one after another, because each bit may cost an adder."""


def short(call: Named, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of a call of `numerics.requantize.rounded_codes` in this form; None if its rule has none."""
    rule, qmin, qmax = call.static
    acc: Any = inputs[0]
    rest = inputs[1:]
    if rule.constants is PowerOfTwo or not rule.monotone or len(rest) != len(rule.fields) + 1:
        return None
    if any(array.dtype == object for array in rest) or rest[-1].size != 1:
        return None
    *values, zero_point = rest
    shape = np.broadcast_shapes(*(value.shape for value in values))
    count = int(np.prod(shape))
    flat = {role: np.broadcast_to(value, shape).reshape(-1) for role, value in zip(rule.fields, values, strict=True)}
    flat["bias"] = np.zeros(count, np.int32)
    channels = np.broadcast_to(np.arange(count).reshape(shape), acc.shape)
    low, high = np.full(count, 2**62), np.full(count, -(2**62))
    for place, channel in np.ndenumerate(channels):
        low[channel], high[channel] = min(low[channel], acc[place].low), max(high[channel], acc[place].high)
    line = None
    for bits in _BITS:
        line = line_within(rule, flat, zero_point, (low, high), (qmin, qmax), bits)
        if line is None or int(np.max(abs(line.factor), initial=0)) < 1 << bits:
            break
    if line is None:
        return None
    result = np.empty(acc.shape, object)
    for place, channel in np.ndenumerate(channels):
        result[place] = _on_line(line, int(channel), acc[place])
    return result


def _on_line(line: Line, channel: int, acc: Word) -> Word:
    x, offset = acc, constant(int(line.offset[channel]))
    if line.raised is not None:
        for number in line.raised[:, channel].tolist():
            if number != NEVER and acc.low <= number <= acc.high:
                met = words.inverted(words.nonzero(words.sub(acc, constant(number))))
                x = words.add(x, met)
    if line.kink is not None and line.below is not None:
        below = words.less(x, constant(int(line.kink[channel])))
        offset = words.chosen(below, offset, constant(int(line.below[channel])))
    total = words.add(words.scaled(x, int(line.factor[channel])), offset)
    quotient = words.shifted_right(total, constant(line.shift))
    return words.clamped(constant(line.lowest), quotient, constant(line.highest))


MOST_ELEMENTS = 1 << 16
"""Elements of one array, at most: each becomes separate logic, and takes alkaid's time."""

_SAME = ("copy", "copy_p", "optimization_barrier", "stop_gradient")


def trace(function: Callable[..., Any], arguments: Sequence[np.ndarray], dtypes: Sequence[str]) -> np.ndarray:
    """Translate `function(*arguments)`, from JAX arrays to one JAX array, applied to these arrays."""
    shapes = [jax.ShapeDtypeStruct(x.shape, np.dtype(dtype)) for x, dtype in zip(arguments, dtypes, strict=True)]
    with names_kept():
        closed = jax.make_jaxpr(lambda *arrays: function(*arrays))(*shapes)
    (result,) = read(closed, arguments)
    return result


def read(closed: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a closed jaxpr."""
    env: dict[object, np.ndarray] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    env.update(zip(closed.jaxpr.constvars, map(np.asarray, closed.consts), strict=True))

    def get(atom: Any) -> np.ndarray:
        if not isinstance(atom, core.Literal):
            return env[atom]
        return np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    for eqn in closed.jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [get(atom) for atom in eqn.invars]), strict=True))
    return [get(atom) for atom in closed.jaxpr.outvars]


def _equation(eqn: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    name, params = eqn.primitive.name, eqn.params
    if (inner := called_program(eqn)) is not None:
        call = named_call(params.get("name", ""))
        found = None if call is None or is_known(inputs[0]) else _NAMED.get(call.function, _unnamed)(call, inputs)
        return read(inner, inputs) if found is None else [found]
    if name in _SAME:
        return inputs
    if name == "platform_index":
        return [np.asarray(plainest(params), np.int32)]
    if name == "cond" and is_known(inputs[0]):
        branches = params["branches"]
        return read(branches[min(max(int(inputs[0]), 0), len(branches) - 1)], inputs[1:])
    if name == "scan":
        return _scan(params, inputs)
    if all(map(is_known, inputs)):
        with jax.enable_x64(True):
            results = eqn.primitive.bind(*map(jnp.asarray, inputs), **params)
        return [np.asarray(x) for x in (results if eqn.primitive.multiple_results else [results])]
    out = eqn.outvars[0].aval
    shape, dtype = tuple(out.shape), str(out.dtype)
    if dtype != "bool" and np.dtype(dtype).kind not in "iu":
        raise Unsupported(f"the primitive {name!r} returns {dtype}, but a circuit only has integers")
    if name == "convert_element_type" and dtype == "bool":
        return [_elementwise(words.nonzero, inputs, shape, dtype)]
    if name in _ELEMENTWISE:
        return [_elementwise(_ELEMENTWISE[name], inputs, shape, dtype)]
    reader = ARRAYS.get(name) or SUMS.get(name)
    if reader is None:
        known = sorted({*ARRAYS, *SUMS, *_ELEMENTWISE, *CALLS, *_SAME})
        raise Unsupported(f"the primitive {name!r} has no form in a circuit; known are {', '.join(known)}")
    return [reader(params, inputs, shape, dtype)]


def _scan(params: Mapping[str, Any], inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Unroll a scan, because a circuit has no loop."""
    params = with_counts(params)
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, rows = inputs[:consts], inputs[consts : consts + carried], inputs[consts + carried :]
    turns = range(params["length"])
    stacked: list[list[np.ndarray]] = []
    for turn in reversed(turns) if params["reverse"] else turns:
        results = read(params["jaxpr"], [*fixed, *carry, *(row[turn] for row in map(lifted, rows))])
        carry = results[:carried]
        stacked.append(results[carried:])
    if params["reverse"]:
        stacked.reverse()
    return [*carry, *(np.stack([lifted(x) for x in part]) for part in zip(*stacked, strict=True))]


# ---------------------------------------------------------------------------- one word after another


def _elementwise(
    function: Callable[..., Word], inputs: Sequence[np.ndarray], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    if math.prod(shape) > MOST_ELEMENTS:
        raise Unsupported(f"it has {math.prod(shape):,} elements, and at most {MOST_ELEMENTS:,} become logic")
    arrays = [np.broadcast_to(lifted(x), shape) for x in inputs]
    result = np.empty(shape, object)
    for place in np.ndindex(*shape):
        found = function(*(array[place] for array in arrays))
        result[place] = found if dtype == "bool" else words.wrapped(found, dtype)
    return result


def _unnamed(call: Named, inputs: Sequence[np.ndarray]) -> None:
    """A function without a shorter form: returns None, so that its operations are read."""


def _rounded_shift(call: Named, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    if call.static[1] is not Rounding.NEAREST_EVEN:
        return None
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    return _elementwise(words.rounded_right, inputs, shape, "int64")


_NAMED: dict[str, Callable[[Named, Sequence[np.ndarray]], np.ndarray | None]] = {
    "rounded_codes": short,
    "rounded_shift": _rounded_shift,
}
"""Functions of the kernels that have a shorter form, see `numerics.calls`."""


def _and(x: Word, y: Word) -> Word:
    known, other = (x, y) if x.value is None else (y, x)
    if other.low >= 0 and other.high <= 1 and known.low >= 0 and known.high <= 1:
        return words.both(x, y)
    return words.masked(other, known)


def _or(x: Word, y: Word) -> Word:
    if min(x.low, y.low) < 0 or max(x.high, y.high) > 1:
        raise Unsupported("'or' has a form in a circuit for truth values only")
    return words.either(x, y)


def _sign(x: Word) -> Word:
    return words.sub(words.less(constant(0), x), words.less(x, constant(0)))


def _select(which: Word, *cases: Word) -> Word:
    if len(cases) != 2:
        raise Unsupported(f"'select_n' with {len(cases)} cases has no form in a circuit: two are expected")
    return words.chosen(which, *cases)


def _equal(x: Word, y: Word) -> Word:
    return words.inverted(words.nonzero(words.sub(x, y)))


def _logical_right(x: Word, by: Word) -> Word:
    if x.low < 0:
        raise Unsupported("'shift_right_logical' of a negative number has no form in a circuit")
    return words.shifted_right(x, by)


_ELEMENTWISE: dict[str, Callable[..., Word]] = {
    "abs": words.magnitude,
    "add": words.add,
    "and": _and,
    "clamp": lambda low, x, high: words.clamped(low, x, high),
    "convert_element_type": lambda x: x,
    "eq": _equal,
    "ge": lambda x, y: words.inverted(words.less(x, y)),
    "gt": lambda x, y: words.less(y, x),
    "le": lambda x, y: words.inverted(words.less(y, x)),
    "lt": words.less,
    "max": words.maximum,
    "min": words.minimum,
    "mul": words.product,
    "ne": lambda x, y: words.nonzero(words.sub(x, y)),
    "neg": words.neg,
    "or": _or,
    "select_n": _select,
    "shift_left": words.shifted_left,
    "shift_right_arithmetic": words.shifted_right,
    "shift_right_logical": _logical_right,
    "sign": _sign,
    "square": lambda x: words.product(x, x),
    "sub": words.sub,
}
