"""Programs over floats, stored as data: the computation of a float island as a list of steps from a fixed set.

    tanh(x) * 2    ->    [["tanh", [["value", 0]], []], ["mul", [["value", 1], ["literal", 2.0, "float32"]], []]]

A step is [primitive, operands, [[name, value] of each parameter]]. The primitive is the name of one of JAX's. An
operand is ["value", i] (an input, or the result of an earlier step), ["constant", role] or ["literal", number, dtype].
A number that is not finite, which JSON does not have, is its name: "inf", "-inf" or "nan".
Names in a file are looked up only in `STEPS`, so reading a program executes no code.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qjax.ops import products

Step = Callable[..., Any]

_UNARY = """neg sign floor ceil exp exp2 log log1p expm1 tanh logistic sin cos tan asin acos atan sinh cosh erf erfc
erf_inv sqrt rsqrt cbrt abs is_finite square""".split()  # noqa: SIM905
_BINARY = "add sub mul div max min pow rem atan2 eq ne lt le gt ge".split()  # noqa: SIM905
ELEMENTWISE = frozenset((*_UNARY, *_BINARY))
"""Steps whose results depend only on the elements at the same position."""
_REDUCTIONS = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}
_BITS = {"and": lax.bitwise_and, "or": lax.bitwise_or, "not": lax.bitwise_not, "xor": lax.bitwise_xor} | {
    name: getattr(lax, name) for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")
}
_GATHERS = tuple(mode.name for mode in lax.GatherScatterMode)
_FFT = ("FFT", "IFFT", "RFFT", "IRFFT")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _named(name: str) -> tuple[tuple[str, ...], Step]:
    function = getattr(lax, name)
    return (), lambda p, *args: function(*args)


def _reduction(function: Any) -> tuple[tuple[str, ...], Step]:
    return ("axes",), lambda p, x: function(x, axis=p["axes"])


def _conv(p: Mapping[str, Any], x: Any, w: Any) -> Any:
    numbers = lax.ConvDimensionNumbers(*p["dimension_numbers"])
    return products.convolution(
        x,
        w,
        _accumulator(p),
        window_strides=p["window_strides"],
        padding=p["padding"],
        lhs_dilation=p["lhs_dilation"],
        rhs_dilation=p["rhs_dilation"],
        dimension_numbers=numbers,
        feature_group_count=p["feature_group_count"],
        batch_group_count=p["batch_group_count"],
    )


def _window(initial: Any, reducer: Any) -> Step:
    def run(p: Mapping[str, Any], x: Any) -> Any:
        return lax.reduce_window(
            x,
            np.asarray(initial, x.dtype),
            reducer,
            p["window_dimensions"],
            p["window_strides"],
            p["padding"],
            base_dilation=p["base_dilation"],
            window_dilation=p["window_dilation"],
        )

    return run


def _dot(p: Mapping[str, Any], x: Any, w: Any) -> Any:
    return products.dot_general(x, w, p["dimension_numbers"], _accumulator(p))


def _accumulator(p: Mapping[str, Any]) -> Any:
    """The dtype in which the model asks for the sums; None: that of the operands."""
    kind = p["preferred_element_type"]
    return None if kind is None else jnp.dtype(kind)


def _float_of(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _gather(p: Mapping[str, Any], x: ArrayLike, indices: ArrayLike) -> Any:
    mode = lax.GatherScatterMode[p["mode"]]
    numbers = lax.GatherDimensionNumbers(*p["dimension_numbers"])
    return lax.gather(x, indices, numbers, p["slice_sizes"], mode=mode, fill_value=_float_of(p["fill_value"]))


def _iota(p: Mapping[str, Any]) -> Any:
    return lax.broadcasted_iota(jnp.dtype(p["dtype"]), p["shape"], p["dimension"])


def _fft(p: Mapping[str, Any], x: ArrayLike) -> Any:
    return lax.fft(x, p["fft_type"], p["fft_lengths"])


_WINDOW = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")

STEPS: Mapping[str, tuple[tuple[str, ...], Step]] = {
    **{name: _named(name) for name in (*_UNARY, *_BINARY) if hasattr(lax, name)},
    **{name: ((), lambda p, *args, f=function: f(*args)) for name, function in _BITS.items()},
    **{name: _reduction(function) for name, function in _REDUCTIONS.items()},
    "round": (("rounding_method",), lambda p, x: lax.round(x, lax.RoundingMethod(p["rounding_method"]))),
    "integer_pow": (("y",), lambda p, x: lax.integer_pow(x, p["y"])),
    "copy": ((), lambda p, x: x),
    "real": ((), lambda p, x: lax.real(x)),
    "imag": ((), lambda p, x: lax.imag(x)),
    "select_n": ((), lambda p, *args: lax.select_n(*args)),
    "clamp": ((), lambda p, *args: lax.clamp(*args)),
    "convert_element_type": (("new_dtype",), lambda p, x: lax.convert_element_type(x, jnp.dtype(p["new_dtype"]))),
    "bitcast_convert_type": (("new_dtype",), lambda p, x: lax.bitcast_convert_type(x, jnp.dtype(p["new_dtype"]))),
    "broadcast_in_dim": (
        ("shape", "broadcast_dimensions"),
        lambda p, x: lax.broadcast_in_dim(x, p["shape"], p["broadcast_dimensions"]),
    ),
    "reshape": (("new_sizes",), lambda p, x: jnp.reshape(x, p["new_sizes"])),
    "squeeze": (("dimensions",), lambda p, x: lax.squeeze(x, p["dimensions"])),
    "expand_dims": (("dimensions",), lambda p, x: lax.expand_dims(x, p["dimensions"])),
    "transpose": (("permutation",), lambda p, x: lax.transpose(x, p["permutation"])),
    "rev": (("dimensions",), lambda p, x: lax.rev(x, p["dimensions"])),
    "slice": (
        ("start_indices", "limit_indices", "strides"),
        lambda p, x: lax.slice(x, p["start_indices"], p["limit_indices"], p["strides"]),
    ),
    "split": (("sizes", "axis"), lambda p, x: lax.split(x, p["sizes"], p["axis"])),
    "unstack": (("axis",), lambda p, x: [lax.index_in_dim(x, i, p["axis"], False) for i in range(x.shape[p["axis"]])]),
    "dynamic_slice": (("slice_sizes",), lambda p, x, *starts: lax.dynamic_slice(x, starts, p["slice_sizes"])),
    "gather": (("dimension_numbers", "slice_sizes", "mode", "fill_value"), _gather),
    "pad": (("padding_config",), lambda p, x, value: lax.pad(x, value, p["padding_config"])),
    "concatenate": (("dimension",), lambda p, *args: lax.concatenate(args, p["dimension"])),
    "iota": (("dtype", "shape", "dimension"), _iota),
    "argmax": (("axes", "index_dtype"), lambda p, x: lax.argmax(x, p["axes"][0], jnp.dtype(p["index_dtype"]))),
    "argmin": (("axes", "index_dtype"), lambda p, x: lax.argmin(x, p["axes"][0], jnp.dtype(p["index_dtype"]))),
    "cumsum": (("axis", "reverse"), lambda p, x: lax.cumsum(x, p["axis"], reverse=p["reverse"])),
    "sort": (
        ("dimension", "is_stable", "num_keys"),
        lambda p, *args: lax.sort(args, dimension=p["dimension"], is_stable=p["is_stable"], num_keys=p["num_keys"]),
    ),
    "reduce_window_sum": (_WINDOW, _window(0, lax.add)),
    "reduce_window_max": (_WINDOW, _window(-np.inf, lax.max)),
    "dot_general": (("dimension_numbers", "preferred_element_type"), _dot),
    "conv_general_dilated": (
        (
            *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
            *("feature_group_count", "batch_group_count", "preferred_element_type"),
        ),
        _conv,
    ),
    "fft": (("fft_type", "fft_lengths"), _fft),
}
"""Primitive -> (the parameters that are stored, a function that runs it on them and its operands)."""


_WITHOUT_EFFECT = frozenset(
    """sharding out_sharding weak_type precision unique_indices indices_are_sorted""".split()  # noqa: SIM905
)
"""Parameters that do not change what a step computes, because the step states precision and dtype itself."""


def encode(primitive: str, params: Mapping[str, Any]) -> list[Any] | None:
    """A primitive's parameters as pairs of JSON values.

    None for a primitive outside of the set, or one with a parameter that its step would ignore.
    """
    if primitive not in STEPS:
        return None
    ignored = params.keys() - set(STEPS[primitive][0]) - _WITHOUT_EFFECT
    if any(params[name] is not None for name in ignored):
        return None
    return [[name, _plain(params[name])] for name in STEPS[primitive][0]]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return number(float(value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "name") and str(getattr(value, "name", "")) in (*_FFT, *_GATHERS):
        return str(value.name)
    if isinstance(value, (int, np.integer)) or hasattr(value, "__index__"):
        return int(value)
    return str(np.dtype(value))


def number(value: float) -> float | str:
    """A float as a program holds it."""
    return value if math.isfinite(value) else str(value)


def run(
    program: Sequence[Any], results: Sequence[Any], inputs: Sequence[Any], constants: Mapping[str, Any], batch: int
) -> list[jax.Array]:
    """The values with the numbers `results` of a program on arrays; batch: the size that ["batch", k] is k times."""
    values = list(inputs)

    def operand(item: Any) -> Any:
        kind, first, *rest = item
        if kind == "value":
            return values[first]
        if kind == "constant":
            value, dtype = constants[first], rest[0]
            return jnp.asarray(value).astype(dtype)
        return np.asarray(_float_of(first), np.dtype(jnp.dtype(rest[0])))

    for name, operands, params in program:
        if name not in STEPS:
            raise ValueError(f"A float island has the unknown step {name!r}. Known steps: {', '.join(sorted(STEPS))}.")
        given = {key: _tuples(sized(value, batch)) for key, value in params}
        outcome = STEPS[name][1](given, *(operand(item) for item in operands))
        values.extend(outcome if isinstance(outcome, (list, tuple)) else [outcome])
    return [values[index] for index in results]


def sized(value: Any, batch: int) -> Any:
    """A parameter whose sizes ["batch", k] are replaced by numbers."""
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)
        if len(items) == 2 and items[0] == "batch":
            return items[1] * batch
        return [sized(item, batch) for item in items]
    return value


def freed(a: Any, b: Any, size: int, other: int) -> Any:
    """Two traces of a program as one: numbers that depend on the batch become ["batch", k]. Raises ValueError."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [freed(x, y, size, other) for x, y in zip(a, b, strict=True)]
    if a == b and type(a) is type(b):
        return a
    if type(a) is int and type(b) is int and a % size == 0 and a // size * other == b:
        return ["batch", a // size]
    raise ValueError(f"{a} on a batch of {size} becomes {b} on one of {other}")
