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

from qjax.contrib.rtl import requantizing, words
from qjax.contrib.rtl.arrays import ARRAYS, is_known, lifted
from qjax.contrib.rtl.sums import SUMS
from qjax.contrib.rtl.words import Word, constant
from qjax.graph.float_parts import plainest
from qjax.numerics.calls import CALLS, Named, called_program, named_call, names_kept
from qjax.numerics.rounding import Rounding
from qjax.support.errors import Unsupported
from qjax.tracing.loop_params import with_counts

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
    "rounded_codes": requantizing.short,
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
