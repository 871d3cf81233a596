"""Softmax of codes: both methods against Python's integers and fractions, and against what the runtimes answered."""

import math
import zlib
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics import softmax
from tests.numerics.exact import gemmlowp_rdbpot, gemmlowp_srdhm, nearest_away, saturate32
from tests.numerics.float32 import nearest

EXP_CONSTANTS = (
    (-2, 1672461947),
    (-1, 1302514674),
    (0, 790015084),
    (1, 290630308),
    (2, 39332535),
    (3, 720401),
    (4, 242),
)


def exp_on_negative_values(a: int) -> int:
    """gemmlowp's exp of a Q5.26 number a <= 0, as Q0.31, following fixedpoint.h line by line."""
    if a == 0:
        return 2**31 - 1
    quarter = 2**24
    rest = (a & (quarter - 1)) - quarter
    x = (rest << 5) + 2**28
    x2 = gemmlowp_srdhm(x, x)
    x3, x4 = gemmlowp_srdhm(x2, x), gemmlowp_srdhm(x2, x2)
    tail = gemmlowp_rdbpot(gemmlowp_srdhm(gemmlowp_rdbpot(x4, 2) + x3, 715827883) + x2, 1)
    y = saturate32(1895147668 + gemmlowp_srdhm(1895147668, x + tail))
    for exponent, factor in EXP_CONSTANTS:
        if (rest - a) & (1 << (26 + exponent)):
            y = gemmlowp_srdhm(y, factor)
    return y


def one_over_one_plus_x(a: int) -> int:
    half = (a + 2**31) // 2
    x = 1515870810 + gemmlowp_srdhm(half, -1010580540)
    for _ in range(3):
        x = x + saturate32(4 * gemmlowp_srdhm(x, 2**29 - gemmlowp_srdhm(half, x)))
    return saturate32(2 * x)


def gemmlowp_row(codes: list[int], scale: float, bits: int = 8) -> list[int]:
    mantissa, shift = math.frexp(min(scale * 2.0**26, 2.0**31 - 1))
    multiplier = nearest_away(Fraction(mantissa) * 2**31)
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift + 1
    least = -math.floor(31 * 2.0**26 / 2.0**shift)
    powers = [
        exp_on_negative_values(gemmlowp_srdhm((q - max(codes)) << shift, multiplier))
        if q - max(codes) >= least
        else None
        for q in codes
    ]
    total = sum(gemmlowp_rdbpot(p, 12) for p in powers if p is not None)
    headroom = 32 - total.bit_length()
    inverse = one_over_one_plus_x((total << headroom) - 2**31)
    found = [0 if p is None else gemmlowp_rdbpot(gemmlowp_srdhm(inverse, p), 43 - bits - headroom) for p in powers]
    half = 2 ** (bits - 1)
    return [max(-half, min(half - 1, y - half)) for y in found]


def float32_row(codes: list[int], table: list[Fraction]) -> list[int]:
    powers = [table[max(codes) - q] for q in codes]
    total = Fraction(0)
    for p in powers:
        total = nearest(total + p)
    inverse = nearest(1 / nearest(total / 256))
    return [max(-128, min(127, nearest_away(nearest(p * inverse)) - 128)) for p in powers]


def rows(count: int, length: int, scale: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, rng.choice([2 / scale, 5, 60], (count, 1)), (count, length)) + rng.integers(-60, 60, (count, 1))
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


METHODS = ("gemmlowp", "float32")
SMALL = [(2, 0.0625), (3, 0.0112), (10, 0.1), (33, 0.02), (511, 2.0**-9)]
SETTINGS = [*SMALL, (100, 1.7), (4, 15.9), (4, 16.0), (5, 40.0)]


@pytest.mark.parametrize(("length", "scale"), SETTINGS)
@pytest.mark.sampled(2)
def test_gemmlowp_against_integers(length, scale):
    x = rows(60, length, scale, 1)
    want = [gemmlowp_row(row, float(np.float32(scale))) for row in x.tolist()]
    constants = softmax.prepare("gemmlowp", np.float32(scale))
    assert np.array_equal(softmax.softmax(x, constants), want)
    assert np.array_equal(jax.jit(softmax.softmax)(x, constants), want)


@pytest.mark.parametrize(("length", "scale"), SMALL)
@pytest.mark.sampled(1)
def test_float32_against_fractions(length, scale):
    x = rows(40, length, scale, 2)
    constants = softmax.prepare("float32", np.float32(scale))
    assert isinstance(constants, softmax.Table)
    table = [Fraction(int(m)) * Fraction(2) ** int(e) for m, e in zip(*constants, strict=True)]
    want = [float32_row(row, table) for row in x.tolist()]
    assert np.array_equal(softmax.softmax(x, constants), want)
    assert np.array_equal(jax.jit(softmax.softmax)(x, constants), want)


# (scale, codes, gemmlowp's: TFLite Micro and LiteRT's reference kernels, float32: LiteRT optimised and by default)
DIFFERENT = [
    (0.06480588763952255, [4, -41, -51], [108, -115, -121], [109, -115, -121]),
    (0.03365442156791687, [-31, 4, -66], [-72, 55, -111], [-72, 54, -111]),
    (0.011250761337578297, [80, 125, -92], [-37, 23, -115], [-37, 24, -115]),
    (0.009138956665992737, [-82, -128, 118], [-96, -107, 74], [-95, -107, 74]),
    (0.09952373057603836, [2, -5, 22], [-99, -114, 84], [-99, -114, 85]),
]


@pytest.mark.parametrize(("scale", "codes", "fixed", "table"), DIFFERENT)
def test_where_the_runtimes_differ(scale, codes, fixed, table):
    x = np.array(codes, np.int8)
    assert softmax.softmax(x, softmax.prepare("gemmlowp", scale)).tolist() == fixed
    assert softmax.softmax(x, softmax.prepare("float32", scale)).tolist() == table


# CRC-32 of the answers of tflite-micro 0.dev20261023 and of all modes of ai-edge-litert 2.3.0
@pytest.mark.parametrize(
    ("scale", "length", "checksum"),
    [(0.1, 10, 1565309876), (0.02, 100, 520341008), (1.5, 7, 2042358114), (2.0**-6, 300, 2003314115)],
)
@pytest.mark.parametrize("method", METHODS)
def test_answers_of_the_runtimes(method, scale, length, checksum):
    index = np.arange(20 * length)
    x = (((index * 7919 + index**2 * 31) % 256 - 128).astype(np.int8) // 4).astype(np.int8).reshape(20, length)
    y = softmax.softmax(x, softmax.prepare(method, np.float32(scale)))
    assert isinstance(y, np.ndarray)
    assert y.dtype == np.int8
    assert zlib.crc32(y.tobytes()) == checksum


@pytest.mark.parametrize("method", ["gemmlowp", "float32", "uint16"])
@pytest.mark.exhaustive
def test_in_every_transform(method):
    # large enough for a table of exponentials in some of these, and not in others
    x = rows(24, 90, 0.1, 3)
    constants = softmax.prepare(method, 0.1)
    want = softmax.softmax(x, constants)
    boxes = x.reshape(4, 6, 90)
    for y in (
        jax.jit(softmax.softmax)(boxes, constants),
        softmax.softmax(jnp.asarray(boxes), constants),
        jax.vmap(softmax.softmax, (0, None))(boxes, constants),
        jax.vmap(softmax.softmax, (1, None), 1)(boxes, constants),
        jax.lax.map(lambda row: softmax.softmax(row, constants), boxes),
    ):
        assert y.dtype == jnp.int8
        assert np.array_equal(np.asarray(y).reshape(x.shape), want)
    text = jax.jit(softmax.softmax).lower(boxes, constants).as_text()
    assert not any(f in text for f in ("f16", "f32", "f64", "float"))


def test_ends():
    for method in METHODS:
        constants = softmax.prepare(method, 0.1)
        assert softmax.softmax(np.array([3], np.int8), constants).tolist() == [127]
        assert softmax.softmax(np.array([-128, 127], np.int8), constants).tolist() == [-128, 127]
        # a sum of 512 and more, which gemmlowp itself refuses
        assert set(softmax.softmax(np.zeros(1000, np.int8), constants).tolist()) == {-128}


@pytest.mark.parametrize("method", ["gemmlowp", "float32"])
def test_codes_of_uint8_are_those_of_int8_moved(method):
    codes = rows(40, 19, 0.1, 3)
    constants = softmax.prepare(method, 0.1)
    moved = softmax.softmax((codes.astype(np.int32) + 128).astype(np.uint8), constants)
    assert moved.dtype == np.uint8
    assert np.array_equal(moved.astype(np.int32) - 128, softmax.softmax(codes, constants))


def test_errors():
    constants = softmax.prepare("gemmlowp", 0.1)
    with pytest.raises(ValueError, match=r"a method among gemmlowp, float32.*\. Got 'exact'"):
        softmax.prepare("exact", 0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"finite and positive\. Got -0\.1"):
        softmax.prepare("float32", -0.1)
    with pytest.raises(ValueError, match=r"input scales above 2\^-26"):
        softmax.prepare("gemmlowp", 2.0**-26)
    with pytest.raises(TypeError, match=r"softmax takes int8 or uint8 codes\. Got int32"):
        softmax.softmax(np.zeros(3, np.int32), constants)
    with pytest.raises(TypeError, match=r"softmax takes int8 codes\. Got uint8"):
        softmax.softmax(np.zeros(3, np.uint8), softmax.prepare("uint16", 0.1))
    for shape in ((), (3, 0), (4096,)):
        with pytest.raises(ValueError, match="from 1 to 4095 codes on its last axis"):
            softmax.softmax(np.zeros(shape, np.int8), constants)


@pytest.mark.parametrize(("length", "scale"), SETTINGS)
@pytest.mark.sampled(1)
def test_gemmlowp_of_16_bits_against_integers(length, scale):
    x = rows(60, length, scale, 1)
    want = [gemmlowp_row(row, float(np.float32(scale)), 16) for row in x.tolist()]
    constants = softmax.prepare("gemmlowp", np.float32(scale))
    found = softmax.softmax(x, constants, 16)
    assert found.dtype == np.int16
    assert np.array_equal(found, want)
    assert np.array_equal(jax.jit(softmax.softmax, static_argnums=2)(x, constants, 16), want)


def test_16_bits_are_of_gemmlowp_and_int8():
    gemmlowp, float32 = softmax.prepare("gemmlowp", 0.1), softmax.prepare("float32", 0.1)
    for dtype, constants in (("uint8", gemmlowp), ("int8", float32)):
        with pytest.raises(ValueError, match=f"gemmlowp of int8 codes, 16. Got 16 of {dtype}"):
            softmax.softmax(np.zeros(3, dtype), constants, 16)
