"""TFLite's optimised kernels on AArch64: the rule of each shape, against Python's integers."""

from typing import Any

import jax
import numpy as np
import pytest

from qjax.numerics import Multiplier, requantize
from qjax.numerics.rules import Product, get_rule
from tests.numerics.exact import neon, ruy, saturate32
from tests.numerics.exact_rules import records

INT32: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def grid(rows: int, channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accumulators (rows, channels) below 2^24, and a multiplier and a shift for each channel."""
    acc, multiplier, shift = (c.astype(np.int32) for c in records(64 * 62 * 8))
    keep = (shift < 5) & (shift > -20)
    return np.resize(acc[keep] >> 8, (rows, channels)), multiplier[keep][:channels], shift[keep][:channels]


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((1, 900), neon),
        ((1, 1, 1, 900), neon),
        ((900,), neon),
        ((1, 4), neon),
        ((1, 3), ruy),
        ((2, 900), ruy),
        ((1, 2, 1, 900), ruy),
        ((2, 1, 1, 900), ruy),
    ],
)
def test_a_single_row_has_another_rule(shape, rule):
    rows, channels = int(np.prod(shape[:-1])), shape[-1]
    acc, multiplier, shift = grid(rows, channels)
    want = [[rule(int(a), int(multiplier[c]), int(shift[c])) for c, a in enumerate(row)] for row in acc]
    m = Multiplier(multiplier, shift)
    got = jax.jit(lambda a: requantize(a, m, rule="tflite_arm_gemm", **INT32))(acc.reshape(shape))
    assert np.array_equal(np.asarray(got).reshape(acc.shape), want)


def test_the_two_rules_are_told_apart():
    acc, multiplier, shift = grid(1, 900)
    m = Multiplier(multiplier, shift)
    one, two = (requantize(np.repeat(acc, n, 0), m, rule="tflite_arm_gemm", **INT32)[0] for n in (1, 2))
    assert np.any(np.asarray(one) != np.asarray(two))


def shifted_after(acc: int, multiplier: int, shift: int) -> int:
    """SRSHL(SQRDMULH(acc, multiplier), shift)."""
    high = (acc * multiplier + 2**30) >> 31
    return saturate32(high << shift) if shift >= 0 else (high + (1 << (-shift - 1))) >> -shift


def test_windows_of_3_by_3_shift_after_the_product():
    acc, multiplier, shift = grid(200, 64)
    acc[:4] = [[2**30], [-(2**31)], [2**31 - 1], [9]]
    want = [[shifted_after(int(a), int(multiplier[c]), int(shift[c])) for c, a in enumerate(row)] for row in acc]
    m = Multiplier(multiplier, shift)
    got = np.asarray(requantize(acc, m, rule="tflite_arm_depthwise_3x3", **INT32))
    assert np.array_equal(got, want)
    below = shift <= 0
    other = np.asarray(requantize(acc, m, rule="neon", **INT32))
    assert np.array_equal(got[:, below], other[:, below])
    assert np.any(got[4:, ~below] != other[4:, ~below])
    # 2.8476 * 9 = 25.6, but 0.7119 * 9 = 6.4 becomes 6 * 4
    assert requantize(np.int32(9), 2.8476313838770566, rule="tflite_arm_depthwise_3x3").tolist() == 24


@pytest.mark.parametrize(("depth", "channels", "name"), [(8, 4, "tflite_arm_gemm"), (7, 64, "ruy"), (64, 3, "ruy")])
def test_small_products_have_no_kernel_for_vectors(depth, channels, name):
    variant = get_rule("tflite_arm_gemm").variant
    assert variant is not None
    assert variant(Product(depth, channels)) == name


def product(
    window=(3, 3), channels=16, groups=16, strides=(1, 1), dilation=(1, 1), padding=((0, 0), (0, 0)), sizes=(8, 8)
) -> Product:
    return Product(window[0] * window[1], channels, groups, window, strides, dilation, padding, sizes)


FAST = [
    product(),
    product(padding=((1, 1), (1, 1))),
    product(strides=(2, 2), sizes=(7, 9)),
    product(strides=(2, 2)),
    product(strides=(2, 2), padding=((1, 1), (1, 1)), sizes=(7, 7)),
    product(padding=((1, 1), (1, 1)), sizes=(1, 1)),
]
GENERAL = [
    product(window=(5, 5)),
    product(window=(3, 2)),
    product(channels=32),
    product(channels=12, groups=12),
    product(strides=(1, 2)),
    product(strides=(3, 3)),
    product(dilation=(2, 2)),
    product(padding=((1, 1), (0, 0))),
    product(padding=((2, 2), (2, 2))),
    # SAME of an even size under stride 2 pads behind only
    product(strides=(2, 2), padding=((0, 1), (0, 1))),
    product(padding=((1, 1), (1, 1)), sizes=(1, 5)),
]


def test_which_shapes_the_kernel_for_windows_of_3_by_3_takes():
    variant = get_rule("tflite_arm_depthwise").variant
    assert variant is not None
    assert {variant(p) for p in FAST} == {"tflite_arm_depthwise_3x3"}
    assert {variant(p) for p in GENERAL} == {"tflite_depthwise_neon"}


def test_without_a_shape_a_depthwise_convolution_is_neon():
    acc, multiplier, shift = grid(50, 32)
    m = Multiplier(multiplier, shift)
    got, want = (requantize(acc, m, rule=rule, **INT32) for rule in ("tflite_arm_depthwise", "neon"))
    assert np.array_equal(got, want)
