"""Formats of weights: codes against `ml_dtypes`, and the formulas of the OCP MX specification in Python's numbers."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qjax import WeightFormat
from qjax.numerics.weight_formats import decode, encode, mean_magnitude

F32 = np.float32
FLOATS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}
MX = [name for name in FLOATS if name.startswith("mx")]


def weights(rows: int = 32, columns: int = 128) -> np.ndarray:
    """Rows of very different size, with zeros of both signs, ties, a row of zeros and one outlier."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(rows, columns)) * np.exp(4 * rng.normal(size=(rows, 1)))).astype(F32)
    w[0] = 0
    w[1] = np.round(w[1] * 4) / 4
    w[2] = np.tile([0.0, -0.0, 6.0, -6.0, 7.0, 0.25, -0.75, 2.5], columns // 8)
    w[3, 5] = 1e6
    return w


def own(codes: np.ndarray, name: str) -> np.ndarray:
    """The values of codes as `ml_dtypes` reads their bits."""
    kind = FLOATS[name]
    bits = codes.astype(np.uint8)
    return bits.view(kind).astype(F32) if np.dtype(kind).itemsize == 1 else bits.astype(kind).astype(F32)


@pytest.mark.parametrize("name", FLOATS)
def test_values_are_those_of_ml_dtypes(name: str) -> None:
    table = WeightFormat(name).values
    expected = np.arange(len(table), dtype=np.uint8).view(FLOATS[name]).astype(F32)
    known = np.isfinite(expected)
    np.testing.assert_array_equal(table[known], expected[known])
    np.testing.assert_array_equal(table[~known], 0)
    assert table.max() == float(ml_dtypes.finfo(FLOATS[name]).max)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.sampled(6)
def test_codes_are_those_of_ml_dtypes(name: str, jitted: bool) -> None:
    w, format = weights(), WeightFormat(name)
    run = jax.jit(encode, static_argnums=1) if jitted else encode
    codes, scales = (np.asarray(a) for a in run(jnp.asarray(w), format))
    group = format.group or w.shape[1]
    spread = np.repeat(scales, group, 1)
    largest = F32(ml_dtypes.finfo(FLOATS[name]).max)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(spread > 0, (w / spread).astype(F32), w * F32(0))
    expected = np.clip(quotient, -largest, largest).astype(FLOATS[name])
    np.testing.assert_array_equal(codes, expected.view(np.uint8))
    np.testing.assert_array_equal(
        decode((jnp.asarray(codes), jnp.asarray(scales)), format), expected.astype(F32) * spread
    )


@pytest.mark.parametrize("name", MX)
def test_scales_are_those_of_the_ocp_specification(name: str) -> None:
    """Section 6.3: the greatest power of two in the block, divided by the greatest one of the element format."""
    w = weights()
    scales = np.asarray(encode(jnp.asarray(w), WeightFormat(name))[1])
    emax = math.floor(math.log2(float(ml_dtypes.finfo(FLOATS[name]).max)))
    for block, scale in zip(w.reshape(-1, 32), scales.reshape(-1), strict=True):
        largest = Fraction(float(np.abs(block).max()))
        power = Fraction(1) if largest == 0 else Fraction(2) ** (math.frexp(largest)[1] - 1 - emax)
        assert Fraction(float(scale)) == power
    # the scale itself is an E8M0
    np.testing.assert_array_equal(scales.astype(ml_dtypes.float8_e8m0fnu).astype(F32), scales)


def test_nvfp4_scales_are_e4m3_of_one_scale_of_the_tensor() -> None:
    w = weights()
    codes, scales = (np.asarray(a) for a in encode(jnp.asarray(w), WeightFormat("nvfp4")))
    whole = F32(np.abs(w).max()) / F32(448 * 6)
    blocks = np.abs(w).reshape(len(w), -1, 16).max(-1)
    expected = ((blocks / F32(6)).astype(F32) / whole).astype(F32).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(scales, (expected * whole).astype(F32))
    assert set(codes[np.repeat(scales, 16, 1) == 0]) <= {0, 8}


def test_nf4_takes_the_nearest_of_its_16_values() -> None:
    w, format = weights(), WeightFormat("nf4")
    codes, scales = (np.asarray(a) for a in encode(jnp.asarray(w), format))
    x = (w / np.repeat(scales, 64, 1)).astype(F32).astype(np.float64)
    distance = np.abs(x[..., None] - format.values.astype(np.float64))
    np.testing.assert_array_equal(codes, distance.argmin(-1))
    assert len(format.values) == 16
    assert format.values[7] == 0


def test_ternary_and_binary_codes() -> None:
    w = weights()[4:]
    for run in (encode, jax.jit(encode, static_argnums=1)):
        codes, scale = (np.asarray(a) for a in run(jnp.asarray(w), WeightFormat("ternary")))
        assert scale.shape == (1, 1)
        np.testing.assert_allclose(scale, np.abs(w.astype(np.float64)).mean(), rtol=1e-6)
        np.testing.assert_array_equal(codes, np.clip(np.rint((w / scale).astype(F32)), -1, 1))
        codes, again = (np.asarray(a) for a in run(jnp.asarray(w), WeightFormat("binary")))
        np.testing.assert_array_equal(codes, np.where(w < 0, -1, 1))
        np.testing.assert_array_equal(scale, again)
        assert codes.dtype == np.int8


def test_the_mean_has_one_order_of_additions() -> None:
    w = jnp.asarray(np.random.default_rng(1).normal(size=(7, 33)).astype(F32))
    assert mean_magnitude(w) == jax.jit(mean_magnitude)(w)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nf5",), "expected one of nf4, .*, got 'nf5'. Did you mean 'nf4'"),
        (("fp8_e4m3", 32), "fp8_e4m3 has one scale per channel. Leave group_size out"),
        (("ternary", 32), "ternary has one scale per tensor. Leave group_size out"),
        (("nf4", 0), "expected a whole number of at least 1, got 0"),
    ],
)
def test_invalid_formats(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightFormat(*arguments)  # pyright: ignore[reportArgumentType]


def test_groups_must_divide_the_summed_axis() -> None:
    with pytest.raises(ValueError, match=r"mxfp4: expected groups that divide the 48 weights .* got groups of 32"):
        encode(jnp.ones((2, 48)), WeightFormat("mxfp4"))
