"""Every form of an integer convolution or product gives the same integers: numpy's, in int64."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.ops import accumulate, convolution


def codes(seed: int, *shape: int, dtype: str = "int8") -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


def layout(rank: int):
    spatial = tuple(range(1, rank + 1))
    return (0, rank + 1, *spatial), (rank + 1, rank, *range(rank)), (0, rank + 1, *spatial)


def defined(x: np.ndarray, w: np.ndarray, strides, dilation) -> np.ndarray:
    """Channels last, without padding, from the definition."""
    window = w.shape[:-2]
    places = [
        (size - (n - 1) * d - 1) // s + 1
        for size, n, s, d in zip(x.shape[1:-1], window, strides, dilation, strict=True)
    ]
    acc = np.zeros((x.shape[0], *places, w.shape[-1]), np.int64)
    for position in itertools.product(*map(range, window)):
        steps = zip(position, places, strides, dilation, strict=True)
        at = tuple(slice(p * d, p * d + (n - 1) * s + 1, s) for p, n, s, d in steps)
        acc += x[(slice(None), *at)].astype(np.int64) @ w[position].astype(np.int64)
    return acc


CONVOLUTIONS = {
    # name: (x, window and channels and features, strides, dilation)
    "packed by two": ((2, 7, 9, 16), (3, 3, 16, 16), (1, 1), (1, 1)),
    "packed by four, narrow": ((2, 6, 6, 3), (3, 3, 3, 5), (1, 1), (1, 1)),
    "packed, strided": ((2, 11, 12, 3), (7, 5, 3, 20), (2, 2), (1, 1)),
    "packed, stride of three": ((1, 9, 13, 4), (2, 4, 4, 8), (1, 3), (1, 1)),
    "packed, one place": ((5, 3, 3, 12), (3, 3, 12, 7), (1, 1), (1, 1)),
    "packed, dilated rows": ((2, 9, 8, 6), (3, 2, 6, 6), (1, 1), (2, 1)),
    "one channel": ((3, 8, 8, 1), (3, 3, 1, 4), (1, 1), (1, 1)),
    "dilated columns": ((2, 8, 9, 4), (2, 3, 4, 5), (1, 1), (1, 3)),
    "few places": ((1, 7, 7, 32), (3, 3, 32, 20), (1, 1), (1, 1)),
    "many places": ((2, 10, 9, 24), (3, 3, 24, 20), (1, 2), (1, 1)),
    "line": ((2, 40, 20), (5, 20, 24), (2,), (3,)),
    "narrow line": ((2, 41, 2), (9, 2, 6), (2,), (1,)),
    "volume": ((2, 5, 4, 6, 9), (2, 3, 2, 9, 17), (1, 1, 2), (2, 1, 1)),
    "a window of one": ((2, 5, 6, 9), (1, 1, 9, 18), (2, 3), (1, 1)),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.sampled(7)
def test_convolutions(name):
    x_shape, w_shape, strides, dilation = CONVOLUTIONS[name]
    x, w = codes(1, *x_shape), codes(2, *w_shape)
    expected = defined(x, w, strides, dilation)
    axes = layout(len(strides))

    def forms(x, w):
        options = {"strides": strides, "rhs_dilation": dilation, "groups": 1, "layout": axes}
        yield convolution.conv(x, w, **options)
        yield convolution.patches(x, w, strides, dilation)
        yield convolution.xla_conv(x, w, strides, dilation)
        if dilation[-1] == 1:
            for pixels in (1, 2, 3, 4):
                yield convolution.packed(x, w, strides, dilation, pixels)

    found = jax.jit(lambda x, w: list(forms(x, w)))(x, w)
    assert len(found) == (7 if dilation[-1] == 1 else 3)
    for one in found:
        assert one.dtype == jnp.int32
        assert np.array_equal(one, expected)
    # int16 codes, which int8 products carry in two parts
    wide = codes(3, *x_shape, dtype="int16")
    operands, options = (jnp.asarray(wide), jnp.asarray(w)), {"strides": strides, "rhs_dilation": dilation}
    got = convolution.conv(*operands, **options, groups=1, layout=axes)
    assert np.array_equal(got, defined(wide, w, strides, dilation))


@pytest.mark.parametrize(
    ("channels", "features", "stride", "pixels"), [(3, 64, 2, 2), (16, 16, 1, 2), (1, 32, 1, None)]
)
def test_the_choice_of_pixels(channels, features, stride, pixels):
    assert convolution._pixels_to_pack(channels, features, stride) == pixels


DOTS = {
    # name: (x, w, contracting, batch)
    "one row of many weights": ((1, 700), (700, 400), ((1,), (0,)), ((), ())),
    "one row, contracted first": ((700, 1), (400, 700), ((0,), (1,)), ((), ())),
    "one row of three axes": ((1, 1, 20, 40), (40, 20, 400), ((2, 3), (1, 0)), ((), ())),
    "heads": ((2, 5, 3, 8), (2, 3, 8, 4), ((3,), (2,)), ((0, 2), (0, 1))),
    "a vector": ((600,), (600, 500), ((0,), (0,)), ((), ())),
}


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("name", DOTS)
def test_dots(name, dtype):
    x_shape, w_shape, contracting, batch = DOTS[name]
    x, w = codes(4, *x_shape, dtype="int16" if dtype == "int32" else dtype).astype(dtype), codes(5, *w_shape)
    numbers = (contracting, batch)
    expected = jax.jit(lambda x, w: jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.int32))(
        x.astype(np.int32), w.astype(np.int32)
    )
    got = jax.jit(lambda x, w: accumulate.dot(x, w, numbers))(x, w)
    assert got.dtype == jnp.int32
    assert np.array_equal(got, expected)
    # XLA's int32 product, against numpy
    assert int(np.sum(np.asarray(expected, np.int64))) % 2**32 == total(x, w, numbers) % 2**32


def total(x: np.ndarray, w: np.ndarray, numbers) -> int:
    """The sum of all elements of a dot, whatever their order."""
    (lc, rc), (lb, rb) = numbers
    kept = [tuple(a for a in range(v.ndim) if a not in (*c, *b)) for v, c, b in ((x, lc, lb), (w, rc, rb))]
    left, right = (v.astype(np.int64).sum(axis=axes) for v, axes in zip((x, w), kept, strict=True))
    order = [sorted((*c, *b)) for c, b in ((lc, lb), (rc, rb))]
    places = [[order[i].index(axis) for axis in (*(lc, rc)[i], *(lb, rb)[i])] for i in (0, 1)]
    return int(np.sum(left.transpose(places[0]) * right.transpose(places[1])))


@pytest.mark.parametrize(("summed", "batch"), [((0,), ()), ((2,), (0,)), ((1, 3), (2,)), ((3, 0), (1, 2)), ((), (1,))])
def test_sums(summed, batch):
    x = codes(6, 3, 4, 5, 6)
    free = [axis for axis in range(4) if axis not in summed and axis not in batch]
    ordered = x.astype(np.int64).transpose(*batch, *free, *summed)
    expected = ordered.reshape(*(x.shape[a] for a in (*batch, *free)), -1).sum(-1)
    assert np.array_equal(jax.jit(lambda x: accumulate.sums(x, summed, batch))(x), expected)


def test_other_platforms_get_no_integer_convolution():
    """What is lowered for a GPU holds patches and products; only the CPU's form is XLA's convolution."""
    x, w = jnp.zeros((1, 12, 12, 16), jnp.int8), jnp.zeros((3, 3, 16, 32), jnp.int8)

    def function(x, w):
        return convolution.conv(x, w, strides=(1, 1), rhs_dilation=(1, 1), groups=1, layout=layout(2))

    texts = {
        platform: jax.export.export(jax.jit(function), platforms=[platform])(x, w).mlir_module()
        for platform in ("cpu", "cuda")
    }
    assert "stablehlo.convolution" in texts["cpu"]
    assert "stablehlo.convolution" not in texts["cuda"]
    assert "stablehlo.dot_general" in texts["cuda"]


@pytest.mark.parametrize(("count", "words"), [(6, 16), (16, 16), (17, 32)])
def test_gpus_multiply_whole_words(count, words):
    """XLA for GPUs has wrong sums of other numbers of int8 products."""
    x, w = jnp.zeros((3, count), jnp.int8), jnp.zeros((5, count), jnp.int8)
    numbers = (((1,), (1,)), ((), ()))
    texts = {
        platform: jax.export.export(jax.jit(lambda x, w: accumulate.dot(x, w, numbers)), platforms=[platform])(x, w)
        for platform in ("cpu", "cuda", "tpu")
    }
    sizes = {name: re.findall(r"dot_general.*\(tensor<3x(\d+)xi8>", t.mlir_module()) for name, t in texts.items()}
    assert sizes == {"cpu": [str(count)], "cuda": [str(words)], "tpu": [str(count)]}
