"""Translates the jaxprs of the kernels to words (`words.py`), primitive by primitive.

An array is known, of numbers, or a numpy array of words. What depends on no input is computed by JAX itself.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from qjax.export.emit.rtl import requantizing, words
from qjax.export.emit.rtl.words import Word, constant
from qjax.graph.islands import plainest
from qjax.numerics.calls import Named, named_call, names_kept
from qjax.numerics.rounding import Rounding
from qjax.problems import Unsupported
from qjax.tracing.program import with_counts

_CALLS = ("jit", "pjit", "checkpoint", "remat", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
MOST_PRODUCTS, MOST_ELEMENTS = 1 << 18, 1 << 16
"""Of one layer: each is logic of its own, and takes alkaid's time."""

_SAME = ("copy", "copy_p", "optimization_barrier", "stop_gradient")


def is_known(array: np.ndarray) -> bool:
    """Whether an array depends on no input."""
    return array.dtype != object


def trace(function: Callable[..., Any], arguments: Sequence[np.ndarray], dtypes: Sequence[str]) -> np.ndarray:
    """What `function(*arguments)`, of JAX arrays to one JAX array, computes of these arrays."""
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
    if name in _CALLS:
        call = named_call(params.get("name", ""))
        found = None if call is None or is_known(inputs[0]) else _NAMED.get(call.function, _unnamed)(call, inputs)
        if found is not None:
            return [found]
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return read(inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ()), inputs)
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
        raise Unsupported(f"the primitive {name!r} gives {dtype}; a circuit holds integers")
    if name in _ELEMENTWISE:
        return [_elementwise(_ELEMENTWISE[name], inputs, shape, dtype)]
    if name not in _READERS:
        known = sorted({*_READERS, *_ELEMENTWISE, *_CALLS, *_SAME})
        raise Unsupported(f"the primitive {name!r} has no form in a circuit; known are {', '.join(known)}")
    return [_READERS[name](params, inputs, shape, dtype)]


def _scan(params: Mapping[str, Any], inputs: list[np.ndarray]) -> list[np.ndarray]:
    """A circuit has no loop: each turn is written."""
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


def lifted(array: np.ndarray) -> np.ndarray:
    """An array of words."""
    if not is_known(array):
        return array
    result = np.empty(array.shape, object)
    for place, number in np.ndenumerate(array):
        if number != int(number):
            raise Unsupported(f"the number {number} meets integers; a circuit holds integers")
        result[place] = constant(int(number))
    return result


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
    """A function without a shorter form: its operations are read."""


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


def _clamp(low: Word, x: Word, high: Word) -> Word:
    return words.minimum(words.maximum(x, low), high)


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
    "clamp": _clamp,
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
    "select_n": words.chosen,
    "shift_left": words.shifted_left,
    "shift_right_arithmetic": words.shifted_right,
    "shift_right_logical": _logical_right,
    "sign": _sign,
    "square": lambda x: words.product(x, x),
    "sub": words.sub,
}


# ---------------------------------------------------------------------------- arrays

_Reader = Callable[[Mapping[str, Any], list[np.ndarray], tuple[int, ...], str], np.ndarray]


def _reshape(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return inputs[0].reshape(shape)


def _broadcast(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], inputs[0].shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(inputs[0].reshape(sizes), shape)


def _transpose(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return inputs[0].transpose(params["permutation"])


def _reverse(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.flip(inputs[0], params["dimensions"])


def _slice(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    steps = params["strides"] or (1,) * len(shape)
    return inputs[0][tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _concatenate(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.concatenate([lifted(x) for x in inputs], params["dimension"])


def _stack(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.stack([lifted(x) for x in inputs], params["axis"])


def _pad(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    source, fill = map(lifted, inputs)
    result = np.empty(shape, object)
    result[...] = fill[()]
    to, of = list[slice](), list[slice]()
    for (low, _, inner), size, whole in zip(params["padding_config"], source.shape, shape, strict=True):
        # negative padding cuts
        kept = [i for i in range(size) if 0 <= low + i * (inner + 1) < whole]
        of.append(slice(kept[0], kept[-1] + 1) if kept else slice(0, 0))
        to.append(slice(low + kept[0] * (inner + 1), low + kept[-1] * (inner + 1) + 1, inner + 1) if kept else of[-1])
    result[tuple(to)] = source[tuple(of)]
    return result


def _gather(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    table, rows = inputs
    numbers, leading = params["dimension_numbers"], rows.ndim - 1
    simple = (
        is_known(table)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == tuple(range(leading, len(shape)))
        and tuple(params["slice_sizes"]) == (1, *table.shape[1:])
        and rows.shape[-1] == 1
        and "CLIP" in str(params["mode"])
    )
    if not simple:
        raise Unsupported("'gather' has a form in a circuit for whole rows of a known table, with clipped indices")
    result = np.empty(shape, object)
    bounds = constant(0), constant(len(table) - 1)
    for place in np.ndindex(*rows.shape[:-1]):
        index = _clamp(bounds[0], rows[(*place, 0)], bounds[1])
        for column in np.ndindex(*table.shape[1:]):
            result[(*place, *column)] = words.looked_up(index, table[(slice(None), *column)].tolist())
    return result


# ---------------------------------------------------------------------------- sums


def _reduced(function: Callable[[Word, Word], Word], parts: Sequence[Word]) -> Word:
    """In pairs, so that the depth is that of a tree."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [function(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


_REDUCTIONS: dict[str, tuple[Callable[[Word, Word], Word], int | None]] = {
    "sum": (words.add, 0),
    "max": (words.maximum, None),
    "min": (words.minimum, None),
    "and": (words.both, 1),
    "or": (words.either, 0),
}
"""Of what is behind `reduce_`: the function, and the result for no elements."""


def _combined(kind: str, parts: Sequence[Word], dtype: str) -> Word:
    function, neutral = _REDUCTIONS[kind]
    if not parts and neutral is None:
        raise Unsupported(f"a {kind}imum of nothing has no form in a circuit")
    found = _reduced(function, parts) if parts else constant(neutral or 0)
    return found if dtype == "bool" else words.wrapped(found, dtype)


def _reduce(
    kind: str, params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    axes = tuple(params["axes"])
    kept = [axis for axis in range(inputs[0].ndim) if axis not in axes]
    moved = inputs[0].transpose(*kept, *axes).reshape((*shape, -1))
    result = np.empty(shape, object)
    for place in np.ndindex(*shape):
        result[place] = _combined(kind, moved[place].tolist(), dtype)
    return result


def _windows(
    kind: str, params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    if any(n != 1 for n in params["base_dilation"]):
        raise Unsupported(f"'reduce_window_{kind}' with base_dilation has no form in a circuit")
    source: Any = inputs[0]
    padding, strides = params["padding"], params["window_strides"]
    result = np.empty(shape, object)
    for place in np.ndindex(*shape):
        parts = list[Word]()
        for offset in np.ndindex(*params["window_dimensions"]):
            at = tuple(
                p * s + o * d - low
                for p, s, o, d, (low, _) in zip(place, strides, offset, params["window_dilation"], padding, strict=True)
            )
            # what lies outside changes neither a sum nor a maximum
            if all(0 <= i < size for i, size in zip(at, source.shape, strict=True)):
                parts.append(source[at])
        result[place] = _combined(kind, parts, dtype)
    return result


def _dot(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    (summed, summed2), (batch, batch2) = params["dimension_numbers"]
    x, free = _rows(inputs[0], batch, summed)
    y, free2 = _rows(inputs[1], batch2, summed2)
    if (count := x.size * y.shape[1]) > MOST_PRODUCTS:
        raise Unsupported(
            f"it has {count:,} multiplications of one example, and at most {MOST_PRODUCTS:,} become logic"
        )
    blocks = list[np.ndarray]()
    for left, right in zip(x, y, strict=True):
        if is_known(right):
            blocks.append(words.matmul(left, right.T))
        elif is_known(left):
            blocks.append(words.matmul(right, left.T).T)
        else:
            blocks.append(_products(left, right))
    result = np.empty(shape, object)
    found = np.stack(blocks).reshape((*(inputs[0].shape[axis] for axis in batch), *free, *free2))
    for place, value in np.ndenumerate(found):
        result[place] = words.wrapped(value, dtype)
    return result


def _rows(array: np.ndarray, batch: Sequence[int], summed: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(batch, free, summed), and the sizes of the free axes."""
    free = [axis for axis in range(array.ndim) if axis not in (*batch, *summed)]
    sizes = [tuple(array.shape[axis] for axis in axes) for axes in (batch, free, summed)]
    shape = [int(np.prod(part)) for part in sizes]
    return array.transpose(*batch, *free, *summed).reshape(shape), sizes[1]


def _products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(m, k), (n, k) -> (m, n), of words that all depend on inputs."""
    result = np.empty((len(left), len(right)), object)
    for i, j in np.ndindex(*result.shape):
        pairs = zip(left[i], right[j], strict=True)
        result[i, j] = _reduced(words.add, [words.product(a, b) for a, b in pairs] or [constant(0)])
    return result


_READERS: dict[str, _Reader] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _dot,
    "expand_dims": _reshape,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
    **{f"reduce_{kind}": functools.partial(_reduce, kind) for kind in _REDUCTIONS},
    **{f"reduce_window_{kind}": functools.partial(_windows, kind) for kind in ("sum", "max", "min")},
}
