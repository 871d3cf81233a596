"""Translates jaxprs to values (`values.py`), with a few lines for each primitive of the kernels.

jaxpr { a: add x y; b: reduce_sum[axes=(1,)] a }    ->    Reduced(Computed("add", x, y), "add", extra=...)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from qjax.export.emit.c.index import Index, Indices
from qjax.export.emit.c.products import read_convolution, read_dot
from qjax.export.emit.c.scalar import ELEMENTWISE, limits
from qjax.export.emit.c.text import TYPES
from qjax.export.emit.c.values import (
    Chosen,
    Computed,
    Counter,
    Guarded,
    Joined,
    Literal,
    Loop,
    Looped,
    Reduced,
    Register,
    Table,
    Value,
    View,
    cast,
    of_array,
    reshaped,
    size,
    transposed,
)
from qjax.export.emit.gathers import takes_rows
from qjax.graph.float_parts import plainest
from qjax.jaxprs.evaluator import evaluate_elementwise, evaluate_equation
from qjax.jaxprs.rules import convert
from qjax.numerics.calls import CALLS, called_program
from qjax.support.errors import Unsupported

_FOLDED = frozenset(
    [
        *("transpose", "reshape", "pad", "slice", "concatenate", "stack", "rev", "squeeze", "expand_dims", "gather"),
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "dot_general"),
    ]
)
"""Primitives that are computed at emission if all operands are constant."""

_REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}
_WINDOWS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}
_TIES_TO_EVEN = 1
_ONE_STEP = {"add": "add", "max": "max", "min": "min"}


def trace(function: Callable[..., Any], arguments: Mapping[str, Value]) -> Value:
    """Translate what `function(**arguments)`, from JAX arrays to one JAX array, computes from these values."""
    shapes = [_abstract(value) for value in arguments.values()]
    closed = jax.make_jaxpr(lambda *args: function(**dict(zip(arguments, args, strict=True))))(*shapes)
    (result,) = read(closed.jaxpr, closed.consts, list(arguments.values()))
    return result


def _abstract(value: Value) -> Any:
    return jax.ShapeDtypeStruct(value.shape, np.dtype(value.dtype))


def read(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
    """The outputs of a jaxpr."""
    env: dict[object, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        env[variable] = value if isinstance(value, Value) else of_array(np.asarray(value), "constant")

    def get(atom: Any) -> Value:
        return of_array(np.asarray(atom.val), "literal") if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        for variable in eqn.outvars:
            if str(variable.aval.dtype) not in TYPES:
                raise Unsupported(
                    f"the primitive {eqn.primitive.name!r} returns {variable.aval.dtype}, but C files only hold "
                    "integers and float32."
                )
        outputs = _equation(eqn, [get(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [get(atom) for atom in jaxpr.outvars]


# ---------------------------------------------------------------------------- equations


def _equation(eqn: Any, inputs: list[Value]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    out = eqn.outvars[0].aval
    shape, dtype = tuple(out.shape), str(out.dtype)
    if name in _FOLDED and all(isinstance(value, Table | Literal) for value in inputs):
        return [_folded(eqn, inputs)]
    if (inner := called_program(eqn)) is not None:
        return read(inner.jaxpr, inner.consts, inputs)
    if name == "platform_index":
        return [Literal((), dtype, plainest(params))]
    if name == "cond":
        return _cond(params["branches"], inputs)
    if name == "scan":
        return _scan(eqn, inputs)
    if name in ELEMENTWISE:
        if name == "select_n" and len(inputs) != 3:
            raise Unsupported(f"'select_n' with {len(inputs) - 1} cases has no form in C: two are expected.")
        if name == "round" and int(params["rounding_method"]) != _TIES_TO_EVEN:
            raise Unsupported("'round' has a form in C for ties to even only.")
        return [Computed(shape, dtype, name, tuple(inputs))]
    if name == "integer_pow":
        return [_power(inputs[0], params["y"])]
    reader = _READERS.get(name) or (_reduction if name in _REDUCTIONS else _window if name in _WINDOWS else None)
    if reader is None:
        known = sorted({*_READERS, *_REDUCTIONS, *_WINDOWS, *CALLS, *ELEMENTWISE})
        raise Unsupported(f"the primitive {name!r} has no form in C; known are {', '.join(known)}.")
    return [reader(eqn, inputs, shape, dtype)]


def _folded(eqn: JaxprEqn, inputs: list[Value]) -> Value:
    arrays = [
        value.array if isinstance(value, Table) else np.full(value.shape, value.value, np.dtype(value.dtype))
        for value in inputs
        if isinstance(value, Table | Literal)
    ]
    roles = [value.role for value in inputs if isinstance(value, Table)]
    (result,) = evaluate_equation(eqn, arrays)
    return of_array(result, roles[0] if roles else "constant")


_LARGEST = 1 << 12
"""Elements of a table whose arithmetic is done at emission, at most."""

_INTEGERS = frozenset(
    [
        *("add", "sub", "mul", "neg", "max", "min", "clz", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "select_n"),
    ]
)
"""Arithmetic on tables that is done at emission. Any other leaves the table as it is."""


def _constant(value: Value, found: dict[int, np.ndarray | None] | None = None) -> np.ndarray | None:
    """The array to which a value evaluates at emission; None if it does not consist of constants only.

    found: results so far by the values' identity, because one value is often an operand of several.
    """
    found = {} if found is None else found
    if id(value) not in found:
        found[id(value)] = _computed(value, found)
    return found[id(value)]


def _computed(value: Value, found: dict[int, np.ndarray | None]) -> np.ndarray | None:
    if isinstance(value, Table):
        return value.array
    if isinstance(value, Literal):
        return np.full(value.shape, value.value, np.dtype(value.dtype))
    if size(value) > _LARGEST:
        return None
    if isinstance(value, View) and size(value.source) == 1:
        only = _constant(value.source, found)
        return None if only is None else np.full(value.shape, only.item(), only.dtype)
    if not isinstance(value, Computed):
        return None
    operands = [_constant(operand, found) for operand in value.operands]
    arrays = [operand for operand in operands if operand is not None]
    if len(arrays) < len(operands) or any(array.dtype.kind not in "iub" for array in arrays):
        return None
    if value.function == "convert_element_type":
        return convert(arrays[0], value.dtype)
    if value.function not in _INTEGERS:
        return None
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return evaluate_elementwise(value.function, *(np.broadcast_to(array, shape) for array in arrays))


def _cond(branches: Sequence[Any], inputs: list[Value]) -> list[Value]:
    index, *operands = inputs
    results = [read(branch.jaxpr, branch.consts, operands) for branch in branches]
    if isinstance(index, Literal):
        return results[min(max(index.value, 0), len(results) - 1)]
    if len(results) != 2:
        raise Unsupported(f"'cond' with {len(results)} branches has no form in C: two are expected.")
    condition = Computed((), "bool", "gt", (cast(index, "int32"), Literal((), "int32", 0)))
    return [Computed(a.shape, a.dtype, "select_n", (condition, a, b)) for a, b in zip(*results, strict=True)]


def _scan(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Ranks tell constants, carries and slices apart, because jax's parameters for them differ by version."""
    params, inner = eqn.params, eqn.params["jaxpr"]
    pairs = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
    if any(len(whole.aval.shape) != len(each.aval.shape) for whole, each in pairs):
        raise Unsupported("a 'scan' that stacks outputs has no form in C: it may only return its carry.")
    carries = len(eqn.outvars)
    sliced = sum(
        len(value.shape) != len(variable.aval.shape) for value, variable in zip(inputs, inner.jaxpr.invars, strict=True)
    )
    consts = len(inputs) - sliced - carries
    initial = inputs[consts : consts + carries]
    counter = Register((), "int32", "turn")
    registers = tuple(Register(value.shape, value.dtype, "carried") for value in initial)
    slices = [_turn(value, counter) for value in inputs[consts + carries :]]
    step = read(inner.jaxpr, inner.consts, [*inputs[:consts], *registers, *slices])
    loop = Loop(params["length"], tuple(initial), registers, counter, tuple(step), params["reverse"])
    return [Looped(value.shape, value.dtype, loop, i) for i, value in enumerate(initial)]


def _turn(source: Value, counter: Register) -> Value:
    """source[i] for iteration i; the counter's index is known when the loop is written."""

    def where(at: Indices) -> Indices:
        assert counter.place is not None
        return (counter.place[0], *at)

    return View(source.shape[1:], source.dtype, source, where)


def _power(source: Value, exponent: int) -> Value:
    if exponent < 1:
        raise Unsupported(f"'integer_pow' with exponent {exponent} has no form in C: 1 and more are expected.")
    result = source
    for _ in range(exponent - 1):
        result = Computed(source.shape, source.dtype, "mul", (result, source))
    return result


_Reader = Callable[[Any, list[Value], tuple[int, ...], str], Value]


def _broadcast(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    source, axes = inputs[0], eqn.params["broadcast_dimensions"]
    if isinstance(source, Literal):
        return Literal(shape, dtype, source.value)

    def where(at: Indices) -> Indices:
        return tuple(at[axis] if size > 1 else Index() for axis, size in zip(axes, source.shape, strict=True))

    return View(shape, dtype, source, where)


def _reshape(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    if isinstance(inputs[0], Literal):
        return Literal(shape, dtype, inputs[0].value)
    return reshaped(inputs[0], shape)


def _transpose(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    return transposed(inputs[0], eqn.params["permutation"])


def _reverse(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    axes = eqn.params["dimensions"]

    def where(at: Indices) -> Indices:
        return tuple(index * -1 + (shape[axis] - 1) if axis in axes else index for axis, index in enumerate(at))

    return View(shape, dtype, inputs[0], where)


def _slice(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    start = [int(n) for n in eqn.params["start_indices"]]
    step = [int(n) for n in eqn.params["strides"] or (1,) * len(start)]
    return View(shape, dtype, inputs[0], lambda at: tuple(i * n + s for i, n, s in zip(at, step, start, strict=True)))


def _pad(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    source, fill = inputs
    config = [tuple(int(n) for n in triple) for triple in eqn.params["padding_config"]]
    steps = tuple(inner + 1 for _, _, inner in config)
    return Guarded(
        shape, dtype, source, fill, lambda at: tuple(i + -low for i, (low, _, _) in zip(at, config, strict=True)), steps
    )


def _concatenate(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    return inputs[0] if len(inputs) == 1 else Joined(shape, dtype, tuple(inputs), eqn.params["dimension"])


def _stack(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    axis = eqn.params["axis"]
    parts = tuple(reshaped(value, (*value.shape[:axis], 1, *value.shape[axis:])) for value in inputs)
    return parts[0] if len(parts) == 1 else Joined(shape, dtype, parts, axis)


def _iota(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    return Counter(shape, dtype, eqn.params["dimension"])


def _gather(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    source, rows = inputs
    if not takes_rows(eqn.params, source.shape, rows.shape, len(shape)):
        raise Unsupported("'gather' has a form in C for whole rows with clipped indices only.")
    wide = "int64" if rows.dtype in ("int64", "uint32", "uint64") else "int32"
    bounds = [Literal((), wide, bound) for bound in (0, source.shape[0] - 1)]
    constant = _constant(source) if isinstance(source, Computed) else None
    if constant is not None:
        source = of_array(constant, "table")
    index = reshaped(cast(rows, wide), rows.shape[:-1])
    clipped = Computed(index.shape, wide, "clamp", (bounds[0], index, bounds[1]))
    return Chosen(shape, dtype, source, cast(clipped, "int32"))


def _reduction(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    (source,) = inputs
    axes = eqn.params["axes"]
    extra = tuple(source.shape[axis] for axis in axes)
    return over_axes(source, axes, shape, dtype, _REDUCTIONS[eqn.primitive.name], extra)


def over_axes(
    source: Value, axes: Sequence[int], shape: tuple[int, ...], dtype: str, function: str, extra: tuple[int, ...]
) -> Value:
    """A reduction over some axes of the source."""
    kept = [axis for axis in range(len(source.shape)) if axis not in axes]

    def where(at: Indices) -> Indices:
        places = {axis: at[i] for i, axis in enumerate(kept)}
        places |= {axis: at[len(kept) + i] for i, axis in enumerate(axes)}
        return tuple(places[axis] for axis in range(len(source.shape)))

    return Reduced(
        shape, dtype, function, _neutral(function, dtype), extra, View((*shape, *extra), dtype, source, where)
    )


def _neutral(function: str, dtype: str) -> Any:
    if dtype == "float32":
        if function not in ("max", "min"):
            raise Unsupported(f"a reduction of floats by {function!r} has no form in C: it depends on its order.")
        return -np.inf if function == "max" else np.inf
    low, high = limits(dtype)
    return {"add": 0, "or": 0, "max": low, "min": high, "and": high if dtype in ("bool",) else -1}[function]


def _window(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    source, params, name = inputs[0], eqn.params, eqn.primitive.name
    if name == "reduce_window":
        steps = [inner.primitive.name for inner in params["jaxpr"].eqns]
        if len(inputs) != 2 or len(steps) != 1 or steps[0] not in _ONE_STEP or not isinstance(inputs[1], Literal):
            raise Unsupported("'reduce_window' has a form in C for a sum, maximum or minimum from a constant on.")
        function, initial = _ONE_STEP[steps[0]], inputs[1].value
    else:
        function, initial = _WINDOWS[name], _neutral(_WINDOWS[name], dtype)
    window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    dilation, base = params["window_dilation"], params["base_dilation"]
    rank = len(shape)

    def where(at: Indices) -> Indices:
        return tuple(at[a] * strides[a] + at[rank + a] * dilation[a] + -padding[a][0] for a in range(rank))

    fill = Literal((), dtype, _neutral(function, dtype))
    body = Guarded((*shape, *window), dtype, source, fill, where, tuple(base))
    names = ("kn", "ky", "kx", "kc") if rank == 4 else ()
    return Reduced(shape, dtype, function, initial, tuple(window), body, names)


_READERS: dict[str, _Reader] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "rev": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "iota": _iota,
    "reduce_window": _window,
    "gather": _gather,
    "dot_general": read_dot,
    "conv_general_dilated": read_convolution,
}
