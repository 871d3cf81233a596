"""What JAX's primitives compute, in NumPy: each rule takes its result's type, its parameters and its operands.

A rule returns XLA's bits where integer arithmetic and IEEE 754 define them: integers wrap, a shift by at least the
width moves every bit out, divisions by zero have XLA's results, and a slice beyond the array's end moves back into it.
Anything else raises `Unsupported`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.numerics.calls import called_program
from qjax.support.errors import Unsupported

Arrays = Sequence[Any]


def unsupported(name: str, inputs: Arrays) -> Unsupported:
    """The error for a primitive without a rule."""
    types = ", ".join(str(x.dtype) for x in inputs)
    return Unsupported(
        f"the primitive {name!r} of {types} has no result that integer arithmetic and IEEE 754 define, so numpy cannot "
        "replace XLA"
    )


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a float, including bfloat16 and others that NumPy itself does not know."""
    return np.dtype(dtype).kind not in "iub" and "int" not in np.dtype(dtype).name


# ---------------------------------------------------------------------------- subnormal floats

LEAST = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float64": 2.0**-1022}
"""The smallest normal numbers. Types of 16 bits are computed in 32, where the subnormals of float16 are normal."""
_BITS_ALONE = frozenset({"abs", "copy", "copy_p", "is_finite", "neg", "nextafter", "rem", "select_n", "stop_gradient"})
_ARITHMETIC = frozenset({"convert_element_type", "integer_pow", "reduce_max", "reduce_min", "round"})


def takes_subnormals_for_zero(name: str, dtypes: Sequence[Any]) -> bool:
    """Whether XLA on a CPU treats subnormal operands as zeros (with their signs) and returns such zeros.

    dtypes: of the operands and the result.
    """
    if name == "convert_element_type" and "bfloat16" in [dtype.name for dtype in dtypes]:
        return False
    return name in _ARITHMETIC or (name in ELEMENTWISE and name not in _BITS_ALONE)


def without_subnormals(x: np.ndarray) -> np.ndarray:
    """The floats, with zeros instead of subnormal numbers."""
    small = np.abs(x) < LEAST[x.dtype.name]
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if np.any(small) else x


# ---------------------------------------------------------------------------- elementwise


def _shift(function: Callable[..., Any], fill: Callable[[np.ndarray], Any]) -> Callable[..., Any]:
    """A shift that moves every bit out if it is by the number of bits or more, which NumPy does not define."""

    def shift(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = x.dtype.itemsize * 8
        count = by.astype(np.uint64) if by.dtype.kind == "u" else by.astype(np.int64)
        inside = np.logical_and(count >= 0, count < bits)
        safe = np.where(inside, count, 0).astype(x.dtype)
        return np.where(inside, function(x, safe), fill(x)).astype(x.dtype)

    return shift


def _shift_arithmetic(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """An arithmetic shift that copies the highest bit of unsigned integers too, as XLA does."""
    signed = np.dtype(f"i{x.dtype.itemsize}")
    return np.right_shift(x.view(signed), by.view(signed)).view(x.dtype)


def _sign_bits(x: np.ndarray) -> np.ndarray:
    ones = np.invert(np.zeros((), x.dtype))
    return np.where(x.view(np.dtype(f"i{x.dtype.itemsize}")) < 0, ones, x.dtype.type(0))


def _count_ones(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x.view(np.dtype(f"u{x.dtype.itemsize}")))


def _sign(x: np.ndarray) -> np.ndarray:
    """The sign of a number; a zero returns itself, with its own sign."""
    return np.copysign(np.sign(x), x).astype(x.dtype) if is_float(x.dtype) else np.sign(x)


def _shift_logical(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if is_float(x.dtype):
        return np.divide(x, y)
    if x.dtype.kind == "u":
        return np.where(y == 0, np.iinfo(x.dtype).max, np.floor_divide(x, np.where(y == 0, 1, y))).astype(x.dtype)
    least = np.iinfo(x.dtype).min
    wraps = np.logical_and(x == least, y == -1)
    safe = np.where(np.logical_or(y == 0, wraps), 1, y).astype(x.dtype)
    quotient = np.floor_divide(x, safe)
    # round towards zero
    quotient = quotient + np.logical_and(quotient < 0, quotient * safe != x)
    return np.where(y == 0, -1, np.where(wraps, least, quotient)).astype(x.dtype)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if is_float(x.dtype):
        # of the two operands, XLA treats only a subnormal divisor as zero
        return np.fmod(x, without_subnormals(y) if y.dtype.name in LEAST else y)
    zero = y == 0
    safe = np.where(zero, 1, y).astype(x.dtype)
    if x.dtype.kind == "i":
        safe = np.where(safe == -1, 1, safe).astype(x.dtype)
    return np.where(zero, x, np.fmod(x, safe)).astype(x.dtype)


def _count_leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = x.dtype.itemsize * 8
    word = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    if bits <= 32:
        return (bits - _bit_length(word)).astype(x.dtype)
    high, low = word >> np.uint64(32), word & np.uint64(2**32 - 1)
    return (bits - np.where(high > 0, 32 + _bit_length(high), _bit_length(low))).astype(x.dtype)


def _bit_length(x: np.ndarray) -> np.ndarray:
    """The bit length of integers from 0 to 2^32 - 1: the exponent of their float64, which is exact."""
    return np.frexp(x.astype(np.float64))[1]


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.clip(which, 0, len(cases) - 1), cases)


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "clamp": _clamp,
    "clz": _count_leading_zeros,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "div": _divide,
    "eq": np.equal,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": np.nextafter,
    "not": np.invert,
    "or": np.bitwise_or,
    "population_count": _count_ones,
    "rem": _remainder,
    "select_n": _select,
    "shift_left": _shift(np.left_shift, np.zeros_like),
    "shift_right_arithmetic": _shift(_shift_arithmetic, _sign_bits),
    "shift_right_logical": _shift(_shift_logical, np.zeros_like),
    "sign": _sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
INTEGERS_ONLY = frozenset({"clz", "population_count", "shift_left", "shift_right_arithmetic", "shift_right_logical"})


def convert(x: np.ndarray, dtype: Any) -> np.ndarray:
    """JAX's cast: integers wrap; floats are rounded to nearest even, or truncated and saturated to integers."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return x != 0
    if x.dtype.kind == "c" and dtype.kind != "c":
        x = np.real(x)
    if not is_float(x.dtype) or is_float(dtype):
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    wide = np.trunc(x.astype(np.float64))
    # 2^63 does not fit int64, so numbers from the greatest value on are not cast
    high = wide >= float(limits.max)
    low = wide <= float(limits.min)
    inside = np.where(np.logical_or(np.logical_or(high, low), np.isnan(wide)), 0, wide)
    result = inside.astype(np.uint64 if dtype.kind == "u" else np.int64).astype(dtype)
    return np.where(high, limits.max, np.where(low, limits.min, result)).astype(dtype)


def _convert(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
    return convert(x, out.dtype)


def _round(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
    if int(params["rounding_method"]) == 1:
        return np.rint(x)
    # round away from zero; adding 0.5 and taking floor would round up the number just below 0.5
    whole = np.trunc(x)
    half = x.dtype.type(0.5)
    return np.copysign(whole + np.where(np.abs(x - whole) >= half, np.sign(x), x.dtype.type(0)), x)


def _power(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
    y = params["y"]
    if y < 1 or (y > 2 and is_float(x.dtype)):
        raise unsupported("integer_pow", [x])
    result = x
    for _ in range(y - 1):
        result = result * x
    return result


def _bitcast(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
    new = np.dtype(params["new_dtype"])
    if new.itemsize == x.dtype.itemsize:
        return np.asarray(x, order="C").view(new)
    if new.itemsize > x.dtype.itemsize:
        return np.asarray(x, order="C").view(new)[..., 0]
    return np.asarray(x[..., None], order="C").view(new)


# ---------------------------------------------------------------------------- moves


def _broadcast(out: Any, params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(out.shape)
    for axis, place in enumerate(params["broadcast_dimensions"]):
        shape[place] = x.shape[axis]
    return np.broadcast_to(x.reshape(shape), out.shape)


def _slice(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
    starts, limits = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or (1,) * len(starts)
    return x[tuple(map(slice, starts, limits, steps))]


def _pad(out: Any, params: Any, x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    return pad(x, fill, params["padding_config"])


def pad(x: np.ndarray, fill: Any, config: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """lax.pad: (before, after, between) per axis; the first two may be negative."""
    for axis, (low, high, between) in enumerate(config):
        size = x.shape[axis]
        inner = size + max(size - 1, 0) * between
        wide = np.full((*x.shape[:axis], inner, *x.shape[axis + 1 :]), fill, x.dtype)
        wide[(slice(None),) * axis + (slice(None, None, between + 1),)] = x
        edges = [(0, 0)] * x.ndim
        edges[axis] = (max(low, 0), max(high, 0))
        wide = np.pad(wide, edges, constant_values=fill) if low > 0 or high > 0 else wide
        cut = slice(max(-low, 0), wide.shape[axis] - max(-high, 0))
        x = wide[(slice(None),) * axis + (cut,)]
    return x


def _starts(x: np.ndarray, sizes: Sequence[int], starts: Arrays) -> list[int]:
    """The starts of a slice, moved so that the slice lies inside the array, as in JAX."""
    return [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]


def _dynamic_slice(out: Any, params: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = params["slice_sizes"]
    return x[tuple(slice(s, s + n) for s, n in zip(_starts(x, sizes, starts), sizes, strict=True))]


def _dynamic_update(out: Any, params: Any, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    result = x.copy()
    places = zip(_starts(x, update.shape, starts), update.shape, strict=True)
    result[tuple(slice(s, s + n) for s, n in places)] = update
    return result


def _gather(out: Any, params: Any, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    d, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch = indices.shape[:-1]
    windowed = [a for a in range(x.ndim) if a not in d.collapsed_slice_dims and a not in d.operand_batching_dims]
    rank = len(batch) + len(windowed)
    inside = np.ones(batch, bool)
    places: list[np.ndarray] = []
    for axis in range(x.ndim):
        start = np.zeros(batch, np.int64)
        if axis in d.start_index_map:
            start = indices[..., d.start_index_map.index(axis)].astype(np.int64)
        elif axis in d.operand_batching_dims:
            along = d.start_indices_batching_dims[d.operand_batching_dims.index(axis)]
            start = np.broadcast_to(_iota_along(batch, along), batch)
        last = x.shape[axis] - sizes[axis]
        inside &= np.logical_and(start >= 0, start <= last)
        place = np.clip(start, 0, last).reshape(*batch, *(1,) * len(windowed))
        if axis in windowed:
            place = place + _iota_along(
                (1,) * len(batch) + tuple(sizes[a] for a in windowed), len(batch) + windowed.index(axis)
            )
        places.append(place)
    result = x[tuple(np.broadcast_arrays(*places))] if places else np.broadcast_to(x, batch)
    if params["mode"] is not None and params["mode"].name == "FILL_OR_DROP":
        fill = params["fill_value"] if params["fill_value"] is not None else _outside(x.dtype)
        result = np.where(inside.reshape(*batch, *(1,) * len(windowed)), result, np.asarray(fill).astype(x.dtype))
    offsets = list(d.offset_dims)
    order, rest, window = [0] * rank, iter(range(len(batch))), iter(range(len(batch), rank))
    for place in range(rank):
        order[place] = next(window) if place in offsets else next(rest)
    return result.transpose(order)


def _iota_along(shape: Sequence[int], axis: int) -> np.ndarray:
    return np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])


def _outside(dtype: np.dtype) -> Any:
    """What JAX reads beyond an array's ends."""
    if is_float(dtype):
        return np.nan
    return True if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _iota(out: Any, params: Any) -> np.ndarray:
    return np.broadcast_to(_iota_along(out.shape, params["dimension"]), out.shape).astype(out.dtype)


def _split(out: Any, params: Any, x: np.ndarray) -> list[np.ndarray]:
    return list(np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"]))


# ---------------------------------------------------------------------------- reductions


def _reduction(function: Any, floats: bool) -> Callable[..., np.ndarray]:
    def reduce(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
        if not floats and is_float(x.dtype):
            raise unsupported("reduce_sum", [x])
        if x.size == 0 and function in (np.maximum, np.minimum):
            return np.full(out.shape, _neutral(function, x.dtype), x.dtype)
        return function.reduce(x, axis=tuple(params["axes"]), dtype=x.dtype)

    return reduce


def _neutral(function: Any, dtype: Any) -> Any:
    if function in (np.maximum, np.minimum):
        sign = -1 if function is np.maximum else 1
        if is_float(dtype):
            return sign * np.inf
        return np.iinfo(dtype).min if sign < 0 else np.iinfo(dtype).max
    return {np.add: 0, np.multiply: 1, np.bitwise_or: 0, np.bitwise_xor: 0, np.bitwise_and: -1}[function]


_STEPS: Mapping[str, Any] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _steps_of(params: Any, name: str, operands: Arrays) -> list[Any]:
    """The ufuncs of a reduction that contains its step as a program: one for each operand."""
    body = params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    count = len(operands)
    made = {eqn.outvars[0]: eqn for eqn in body.eqns}
    steps: list[Any] = []
    for place, (result, x) in enumerate(zip(body.outvars, operands, strict=True)):
        eqn = made.get(result)
        function = None if eqn is None else _STEPS.get(_only_step(eqn))
        pair = [body.invars[place], body.invars[count + place]]
        if function is None or eqn is None or list(eqn.invars) != pair or _depends_on_order(function, x):
            raise unsupported(f"{name} by {' '.join(eqn.primitive.name for eqn in body.eqns)}", operands)
        steps.append(function)
    return steps


def _only_step(eqn: Any) -> str:
    """The primitive of an equation, or of the only equation of a function that it calls."""
    inner = called_program(eqn)
    if inner is None or len(inner.jaxpr.eqns) != 1 or list(inner.jaxpr.eqns[0].invars) != list(inner.jaxpr.invars):
        return eqn.primitive.name
    return _only_step(inner.jaxpr.eqns[0])


def _depends_on_order(function: Any, x: Any) -> bool:
    return function in (np.add, np.multiply) and is_float(x.dtype)


def _reduce(out: Any, params: Any, *given: np.ndarray) -> list[np.ndarray]:
    operands, initial = given[: len(given) // 2], given[len(given) // 2 :]
    steps = _steps_of(params, "reduce", operands)
    axes = tuple(params["dimensions"])
    return [
        function.reduce(x, axis=axes, dtype=x.dtype, initial=start.item())
        for function, x, start in zip(steps, operands, initial, strict=True)
    ]


def _argument(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def place(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
        (axis,) = params["axes"]
        return function(x, axis=axis).astype(out.dtype)

    return place


def _cumulative(function: Any) -> Callable[..., np.ndarray]:
    def cumulate(out: Any, params: Any, x: np.ndarray) -> np.ndarray:
        if function in (np.add, np.multiply) and is_float(x.dtype):
            raise unsupported("cumsum", [x])
        axis = params["axis"]
        if params["reverse"]:
            return np.flip(function.accumulate(np.flip(x, axis), axis=axis, dtype=x.dtype), axis)
        return function.accumulate(x, axis=axis, dtype=x.dtype)

    return cumulate


def _windows(x: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> np.ndarray:
    """Each axis split into its windows, followed by the positions within a window of all axes."""
    reach = [(size - 1) * d + 1 for size, d in zip(sizes, dilation, strict=True)]
    if any(n < r for n, r in zip(x.shape, reach, strict=True)):
        empty = [max((n - r) // s + 1, 0) for n, r, s in zip(x.shape, reach, strides, strict=True)]
        return np.zeros((*empty, *sizes), x.dtype)
    found = np.lib.stride_tricks.sliding_window_view(x, reach)
    steps = (*(slice(None, None, s) for s in strides), *(slice(None, None, d) for d in dilation))
    return found[steps]


def _window(fixed: Any) -> Callable[..., np.ndarray]:
    def reduce(out: Any, params: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        if params.get("consts"):
            raise unsupported("reduce_window", [x])
        (function,) = (fixed,) if fixed is not None else _steps_of(params, "reduce_window", [x])
        if _depends_on_order(function, x):
            raise unsupported("reduce_window_sum", [x])
        fill = _neutral(function, x.dtype) if not rest else rest[0].item()
        config = [(*edge, base - 1) for edge, base in zip(params["padding"], params["base_dilation"], strict=True)]
        wide = pad(x, x.dtype.type(_neutral(function, x.dtype)), config)
        sizes = params["window_dimensions"]
        found = _windows(wide, sizes, params["window_strides"], params["window_dilation"])
        axes = tuple(range(x.ndim, 2 * x.ndim))
        return function.reduce(found, axis=axes, dtype=x.dtype, initial=fill)

    return reduce


# ---------------------------------------------------------------------------- products

_EXACT = 2**53
"""Up to here integers are exact in float64, whose matrix products are fast; those of integers are slow in NumPy."""


def multiply(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Matrix products of integers, (..., m, k) times (..., k, n), whose sums wrap in the dtype.

    Raises:
      Unsupported: for floats, because their sum depends on its order unless there is a single term.
    """
    if is_float(a.dtype) or is_float(b.dtype):
        if a.shape[-1] != 1:
            raise unsupported("dot_general", [a, b])
        return a.astype(dtype) * b.astype(dtype)
    bound = _magnitude(a) * _magnitude(b) * max(a.shape[-1], 1)
    if bound < _EXACT:
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(dtype)
    return np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(dtype)


def _magnitude(x: np.ndarray) -> int:
    return max(abs(int(x.min())), abs(int(x.max()))) if x.size else 0


Product = Callable[[np.ndarray, np.ndarray, Any], np.ndarray]


def dot(out: Any, params: Any, lhs: np.ndarray, rhs: np.ndarray, product: Product = multiply) -> np.ndarray:
    """`lax.dot_general` as one matrix product."""
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    left_free = [a for a in range(lhs.ndim) if a not in left and a not in left_batch]
    right_free = [a for a in range(rhs.ndim) if a not in right and a not in right_batch]
    batch = [lhs.shape[a] for a in left_batch]
    summed = math.prod(lhs.shape[a] for a in left)
    a = lhs.transpose(*left_batch, *left_free, *left).reshape(*batch, -1 if lhs.size else _size(lhs, left_free), summed)
    b = rhs.transpose(*right_batch, *right, *right_free)
    b = b.reshape(*batch, summed, -1 if rhs.size else _size(rhs, right_free))
    return product(a, b, out.dtype).reshape(out.shape)


def _size(x: np.ndarray, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def convolve(out: Any, params: Any, lhs: np.ndarray, rhs: np.ndarray, product: Product = multiply) -> np.ndarray:
    """`lax.conv_general_dilated` as one matrix product for each group."""
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if params["batch_group_count"] != 1:
        raise unsupported("conv_general_dilated with batch groups", [lhs, rhs])
    x, kernel = lhs.transpose(numbers.lhs_spec), rhs.transpose(numbers.rhs_spec)
    edges = zip(params["padding"], params["lhs_dilation"], strict=True)
    x = pad(x, x.dtype.type(0), [(0, 0, 0), (0, 0, 0), *((*edge, d - 1) for edge, d in edges)])
    spatial = len(kernel.shape) - 2
    sizes = (1, 1, *kernel.shape[2:])
    found = _windows(x, sizes, (1, 1, *params["window_strides"]), (1, 1, *params["rhs_dilation"]))
    count, channels, *places = found.shape[: 2 + spatial]
    each = channels // groups
    found = found.reshape(count, groups, each, math.prod(places), math.prod(kernel.shape[2:]))
    # per group: (places of all images, channels and taps) x (channels and taps, outputs)
    a = found.transpose(1, 0, 3, 2, 4).reshape(groups, count * math.prod(places), each * math.prod(kernel.shape[2:]))
    b = kernel.reshape(groups, kernel.shape[0] // groups, -1).transpose(0, 2, 1)
    result = product(a, b, out.dtype).reshape(groups, count, math.prod(places), kernel.shape[0] // groups)
    result = result.transpose(1, 0, 3, 2).reshape(count, kernel.shape[0], *places)
    return result.transpose(np.argsort(numbers.out_spec))


# ---------------------------------------------------------------------------- orders


def _sort(out: Any, params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    axis = params["dimension"]
    keys = operands[: params["num_keys"]]
    if len(operands) > len(keys) and not params["is_stable"]:
        raise unsupported("sort", operands)
    order = np.lexsort(tuple(reversed(keys)), axis=axis)
    return [np.take_along_axis(x, order, axis=axis) for x in operands]


def _top_k(out: Any, params: Any, x: np.ndarray) -> list[np.ndarray]:
    if is_float(x.dtype):
        raise unsupported("top_k", [x])
    axis, k = params.get("axis", x.ndim - 1), params["k"]
    # ~x reverses the order of integers, and a stable sort then preserves the order of equal ones
    order = np.argsort(np.invert(x), axis=axis, kind="stable")
    order = np.take(order, range(k), axis=axis)
    return [np.take_along_axis(x, order, axis=axis), order.astype(np.int32)]


RULES: Mapping[str, Callable[..., Any]] = {
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda out, params, *parts: np.concatenate(parts, params["dimension"]),
    "conv_general_dilated": convolve,
    "convert_element_type": _convert,
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "cumprod": _cumulative(np.multiply),
    "cumsum": _cumulative(np.add),
    "dot_general": dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "expand_dims": lambda out, params, x: x.reshape(out.shape),
    "gather": _gather,
    "integer_pow": _power,
    "iota": _iota,
    "pad": _pad,
    "reduce": _reduce,
    "reduce_and": _reduction(np.bitwise_and, True),
    "reduce_max": _reduction(np.maximum, True),
    "reduce_min": _reduction(np.minimum, True),
    "reduce_or": _reduction(np.bitwise_or, True),
    "reduce_prod": _reduction(np.multiply, False),
    "reduce_sum": _reduction(np.add, False),
    "reduce_window": _window(None),
    "reduce_window_max": _window(np.maximum),
    "reduce_window_min": _window(np.minimum),
    "reduce_window_sum": _window(np.add),
    "reshape": lambda out, params, x, *_: x.transpose(params["dimensions"] or range(x.ndim)).reshape(out.shape),
    "rev": lambda out, params, x: np.flip(x, params["dimensions"]),
    "round": _round,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": lambda out, params, x: x.reshape(out.shape),
    "stack": lambda out, params, *parts: np.stack(parts, params["axis"]),
    "top_k": _top_k,
    "transpose": lambda out, params, x: x.transpose(params["permutation"]),
}
