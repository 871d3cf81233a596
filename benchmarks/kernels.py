"""What `qjax.ops` runs on integers, against the other forms of the same and what XLA makes of it.

Convolutions are compared with XLA's float32 convolution; products, pools and sums with XLA's own operation on the same
integers. All forms of a case give the same integers, or nothing is timed. `python -m benchmarks kernels`.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.timing import Paired, paired
from qjax.ops import accumulate, convolution, sums

# name: (input shape, kernel shape, stride, groups); channels last
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    "3x3, 8x32x32x64 -> 64": ((8, 32, 32, 64), (3, 3, 64, 64), 1, 1),
    "7x7 stem, 1x224x224x3 -> 64, stride 2": ((1, 224, 224, 3), (7, 7, 3, 64), 2, 1),
    "3x3, 8x32x32x8 -> 32": ((8, 32, 32, 8), (3, 3, 8, 32), 1, 1),
    "3x3, 8x32x32x16 -> 16": ((8, 32, 32, 16), (3, 3, 16, 16), 1, 1),
    "3x3, 8x32x32x4 -> 32": ((8, 32, 32, 4), (3, 3, 4, 32), 1, 1),
    "3x3, 1x7x7x512 -> 512": ((1, 9, 9, 512), (3, 3, 512, 512), 1, 1),
    "depthwise 3x3, 1x56x56x128": ((1, 58, 58, 128), (3, 3, 1, 128), 1, 128),
    "1x1, 1x56x56x64 -> 256": ((1, 56, 56, 64), (1, 1, 64, 256), 1, 1),
    "one axis: 9, 8x512x64 -> 64": ((8, 512, 64), (9, 64, 64), 1, 1),
    "three axes: 3x3x3, 1x16x32x32x16 -> 32": ((1, 16, 32, 32, 16), (3, 3, 3, 16, 32), 1, 1),
}

ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
"""The dimension numbers of a matrix product."""

Form = Callable[..., Any]


def _codes(*shape: int, dtype: Any = np.int8) -> jax.Array:
    # the range of an int16 code is cut so that sums of products fit int32
    top = 127 if dtype == np.int8 else 2047
    return jnp.asarray(np.random.default_rng(0).integers(-top, top + 1, shape, dtype))


def convolutions(name: str) -> tuple[Form, dict[str, Form]]:
    """XLA's float32 convolution, and the forms in int8: jitted calls without arguments."""
    x_shape, w_shape, stride, groups = CONVOLUTIONS[name]
    x, w = _codes(*x_shape), _codes(*w_shape)
    rank = x.ndim - 2
    strides, dilation = (stride,) * rank, (1,) * rank
    spatial = "DHW"[-rank:]
    real = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding="VALID",
        feature_group_count=groups,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
    )
    data, inner = (0, rank + 1, *range(1, rank + 1)), (rank + 1, rank, *range(rank))
    shared = {"strides": strides, "rhs_dilation": dilation}
    forms: dict[str, Form] = {
        "qjax": functools.partial(convolution.conv, groups=groups, layout=(data, inner, data), **shared),
        "XLA's own": functools.partial(convolution.xla_conv, strides=strides, dilation=dilation, groups=groups),
    }
    if groups == 1:
        forms["patches"] = functools.partial(convolution.patches, strides=strides, dilation=dilation)
    if groups == 1 and rank == 2 and w.shape[0] > 1:
        for pixels in (2, 4):
            forms[f"packed by {pixels}"] = functools.partial(
                convolution.packed, strides=strides, dilation=dilation, pixels=pixels
            )
    floats = (x.astype(jnp.float32), w.astype(jnp.float32))
    return functools.partial(jax.jit(real), *floats), {
        form: functools.partial(jax.jit(function), x, w) for form, function in forms.items()
    }


def _window(reducer: Form, initial: int, x: jax.Array, size: int, stride: int) -> tuple[Form, Form]:
    """XLA's reduction of windows, and the library's."""
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    attributes = {
        "window": window,
        "strides": strides,
        "padding": [(0, 0)] * 4,
        "base_dilation": (1,) * 4,
        "window_dilation": (1,) * 4,
    }
    start = np.asarray(initial, x.dtype)[()]
    own = functools.partial(
        lax.reduce_window, init_value=start, computation=reducer, window_dimensions=window, window_strides=strides,
        padding="VALID",
    )  # fmt: skip
    ours = functools.partial(sums.reduce_window, attributes, initial=start, reducer=reducer)
    return functools.partial(jax.jit(own), x), functools.partial(jax.jit(ours), x)


def _product(x: jax.Array, w: jax.Array) -> tuple[Form, Form]:
    """XLA's product of integers, in int8 or, where x is not, in int32; and the library's."""

    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        if x.dtype != jnp.int8:
            x, w = x.astype(jnp.int32), w.astype(jnp.int32)
        return lax.dot_general(x, w, ROWS_BY_COLUMNS, preferred_element_type=jnp.int32)

    ours = functools.partial(accumulate.dot, numbers=ROWS_BY_COLUMNS)
    return functools.partial(jax.jit(own), x, w), functools.partial(jax.jit(ours), x, w)


def _sum(ours: Form, x: jax.Array, axes: tuple[int, ...]) -> tuple[Form, Form]:
    """XLA's sum over some axes, and another form of it."""
    own = functools.partial(jnp.sum, axis=axes, dtype=jnp.int32)
    return functools.partial(jax.jit(own), x), functools.partial(jax.jit(ours), x)


OTHERS: dict[str, Callable[[], tuple[Form, Form]]] = {
    "one row, 1x2048 times 2048x1000": lambda: _product(_codes(1, 2048), _codes(2048, 1000)),
    "int16 by int8, 256x512 times 512x512": lambda: _product(_codes(256, 512, dtype=np.int16), _codes(512, 512)),
    "max pool 3x3, 8x56x56x64, stride 2": lambda: _window(lax.max, -128, _codes(8, 56, 56, 64), 3, 2),
    "sums 3x3, 8x56x56x64, stride 1": lambda: _window(lax.add, 0, _codes(8, 56, 56, 64).astype(jnp.int32), 3, 1),
    "sums over 7x7, 8x7x7x1024": lambda: _sum(
        functools.partial(sums.sum_over, axes=(1, 2)), _codes(8, 7, 7, 1024).astype(jnp.int32), (1, 2)
    ),
    "sums of rows, 1024x1024": lambda: _sum(
        functools.partial(accumulate.sums, summed=(1,)), _codes(1024, 1024), (1,)
    ),
    "sums of columns, 1024x1024": lambda: _sum(
        functools.partial(accumulate.sums, summed=(0,)), _codes(1024, 1024), (0,)
    ),
}  # fmt: skip
"""Name -> XLA's own operation on integers, and the library's form of it."""

NAMES = (*CONVOLUTIONS, *OTHERS)


def kernels(seconds: float, names: Collection[str]) -> list[Paired]:
    """Each form / the reference; names: some of `NAMES`."""
    found: list[Paired] = []
    for name in names:
        if name in CONVOLUTIONS:
            reference, forms = convolutions(name)
            against = "float32"
        else:
            reference, ours = OTHERS[name]()
            forms, against = {"qjax": ours}, "XLA's own"
        wanted = np.asarray(reference()).astype(np.int64) if against != "float32" else np.asarray(forms["qjax"]())
        for form, call in forms.items():
            if not np.array_equal(np.asarray(call()), wanted):
                raise AssertionError(f"{name}: {form} computes something else")
            found.append(paired(f"{name}: {form} / {against}", call, reference, seconds=seconds))
    return found
