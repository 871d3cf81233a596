"""float32 in integers against numpy's IEEE float32, and against Python integers where numpy has no operation."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics import Real, Rounding, float32
from qjax.numerics.float32 import Float32
from tests.numerics.exact import ROUNDINGS

COUNT = 10**6


def finite(bits: np.ndarray) -> np.ndarray:
    x = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1.5))


def operands(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any bits; near one another and nearly cancelling; few bits, so that ties abound; subnormal; the ends."""
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(0, 2**32, count) for _ in range(3))
    kind = np.arange(count) % 8
    near = (a & ~0xFFFFFF) + (rng.integers(0, 2**32, count) & 0x1FFFFFF)
    b = np.where(kind == 1, near ^ 0x80000000, b)
    short = 0xFFFFFFFF << rng.integers(8, 24, count)
    a, b, c = (np.where((kind == 2) | (kind == 3), v & short, v) for v in (a, b, c))
    # exponents around 127, where products and sums meet
    middle = (kind == 3) | (kind == 4) | (kind == 7)
    a, b, c = (np.where(middle, (v & 0x87FFFFFF) | 0x3C000000, v) for v in (a, b, c))
    a, b, c = (np.where((kind == 5) & (rng.integers(0, 2, count) > 0), v & 0x81FFFFFF, v) for v in (a, b, c))
    ends = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F800000, 0x3F7FFFFF, 0x4B7FFFFF, 0x4B800000, 0x80000000])
    pick = (kind == 6)[None] & (rng.integers(0, 4, (3, count)) > 0)
    a, b, c = (np.where(p, ends[rng.integers(0, ends.size, count)], v) for p, v in zip(pick, (a, b, c), strict=True))
    return finite(a), finite(b), finite(c)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits, with both zeros as +0: there is no signed zero here."""
    return np.where(x == 0, np.float32(0), x).astype(np.float32).view(np.int32)


def both(f, *arrays) -> np.ndarray:
    """f's bits on the host, which must be those under jit."""
    host = f(*arrays)
    assert isinstance(host, np.ndarray)
    traced = jax.jit(f)(*arrays)
    assert host.dtype == traced.dtype == np.int32
    assert np.array_equal(host, np.asarray(traced))
    return host


def binary(f):
    return lambda a, b: float32.to_bits(f(float32.of(a), float32.of(b)))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum"])
def test_against_numpy(name):
    a, b, _ = operands(COUNT, 1)
    if name == "divide":
        b = np.where(b == 0, np.float32(3), b)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(a, b)
    assert want.dtype == np.float32
    assert np.array_equal(both(binary(getattr(float32, name)), a, b), bits_of(want))


def test_less():
    a, b, _ = operands(COUNT, 2)
    assert np.array_equal(float32.less(float32.of(a), float32.of(b)), a < b)
    assert np.array_equal(np.asarray(jax.jit(lambda x, y: float32.less(float32.of(x), float32.of(y)))(a, b)), a < b)


def exact_parts(x: np.ndarray) -> tuple[list[int], list[int]]:
    """The mantissa and the exponent of each float32, by way of frexp, which is exact in float64."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return (mantissa * 2.0**24).astype(np.int64).tolist(), (exponent - 24).tolist()


def exact_bits(m: int, e: int) -> int:
    """The bits of the float32 nearest to m 2^e, ties to even, as a signed int32."""
    sign = -(2**31) if m < 0 else 0
    m = abs(m)
    if m == 0:
        return 0
    drop = max(m.bit_length() - 24, -149 - e)
    if drop > 0:
        q, rest = m >> drop, m & ((1 << drop) - 1)
        m, e = q + (2 * rest > (1 << drop) or (2 * rest == (1 << drop) and q & 1)), e + drop
    if m == 0:
        return 0
    while m < 2**23 and e > -149:
        m, e = 2 * m, e - 1
    while m >= 2**24:
        m, e = m // 2, e + 1
    if e > 104:
        return sign | 0x7F800000
    return sign | ((e + 150 << 23) + m - 2**23 if m >= 2**23 else m)


@pytest.mark.parametrize("count", [100_000, pytest.param(COUNT, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_fma_against_integers(count):
    a, b, c = operands(count, 3)
    # a third of the sums nearly cancels
    with np.errstate(all="ignore"):
        c = np.where(np.arange(count) % 3 == 0, np.float32(-1) * a * b, c)
        c = np.where(np.isfinite(c), c, np.float32(1)).astype(np.float32)
    got = both(lambda *v: float32.to_bits(float32.fma(*(float32.of(x) for x in v))), a, b, c)
    parts = [exact_parts(x) for x in (a, b, c)]
    columns = zip(*(column for part in parts for column in part), strict=True)
    wrong = 0
    for (ma, ea, mb, eb, mc, ec), bits in zip(columns, got.tolist(), strict=True):
        e = min(ea + eb, ec)
        wrong += exact_bits((ma * mb << (ea + eb - e)) + (mc << (ec - e)), e) != bits
    assert wrong == 0


def test_from_int32():
    rng = np.random.default_rng(4)
    x = (rng.integers(-(2**31), 2**31, COUNT) >> rng.integers(0, 32, COUNT)).astype(np.int32)
    x[:6] = [2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, 0, -(2**24) - 1]
    assert np.array_equal(both(lambda v: float32.to_bits(float32.from_int32(v)), x), bits_of(x.astype(np.float32)))


def integer_inputs(count: int) -> np.ndarray:
    """Floats around every power of two, exact halves, both ends of int32, and any bits."""
    rng = np.random.default_rng(5)
    halves = (rng.integers(-(2**23), 2**23, count).astype(np.float32) + np.float32(0.5)) / np.float32(2)
    ends = np.array([2**31, 2**31 - 128, -(2**31), -(2**31) - 256, 0.5, -0.5, 0.49999997, 1.5, 2.5, 1e30, -1e30, 1e-40])
    spread = rng.normal(0, 1, count) * np.exp2(rng.uniform(-4, 34, count))
    return np.concatenate([operands(count, 6)[0], halves, ends, spread]).astype(np.float32)


@pytest.mark.parametrize("overflow", ["saturate", "indefinite"])
@pytest.mark.parametrize("rounding", sorted(ROUNDINGS))
@pytest.mark.sampled(6)
def test_to_int32_against_fractions(rounding, overflow):
    x = integer_inputs(4000)
    got = both(lambda v: float32.to_int32(float32.of(v), Rounding(rounding), overflow), x)

    def exact(v: float) -> int:
        y = ROUNDINGS[rounding](Fraction(v))
        outside = not -(2**31) <= y < 2**31
        return -(2**31) if outside and overflow == "indefinite" else max(-(2**31), min(2**31 - 1, y))

    assert got.tolist() == [exact(v) for v in x.tolist()]


def test_rint_against_numpy():
    x = integer_inputs(COUNT // 3)
    rounded = np.rint(x)
    outside = ~((rounded >= -(2.0**31)) & (rounded < 2.0**31))
    plain = np.where(outside, np.float32(0), rounded).astype(np.int64)
    saturated = np.where(outside, np.where(x > 0, 2**31 - 1, -(2**31)), plain)
    assert np.array_equal(both(lambda v: float32.to_int32(float32.of(v)), x), saturated)
    indefinite = np.where(outside, -(2**31), plain)
    assert np.array_equal(both(lambda v: float32.to_int32(float32.of(v), overflow="indefinite"), x), indefinite)


def test_bits_there_and_back():
    x = np.concatenate([operands(COUNT, 7)[0], -operands(1000, 8)[0]])
    a = float32.of(x)
    assert np.array_equal(both(lambda v: float32.to_bits(float32.of(v)), x), bits_of(x))
    assert np.array_equal(float32.to_array(a).view(np.int32), bits_of(x))
    assert jax.jit(float32.to_array)(a).dtype == jnp.float32
    # canonical
    m = np.abs(a.mantissa)
    assert np.all(((m >= 2**23) & (m < 2**24)) | ((m < 2**23) & (a.exponent == -149)) | ((m == 0) & (a.exponent == 0)))
    unnormalized = float32.multiply(float32.from_int32(np.int32(3)), float32.from_int32(np.int32(5)))
    assert unnormalized.mantissa == 15
    assert float32.of(unnormalized) == (15 << 20, -20)


def test_reals_and_python_floats_are_rounded():
    x = np.random.default_rng(9).normal(0, 1, 1000)
    assert np.array_equal(float32.to_array(float32.of(Real.of(x))), x.astype(np.float32))
    assert float32.to_array(float32.of(0.1)) == np.float32(0.1)
    assert float32.of(0.0) == (0, 0)


def test_operands_broadcast_and_map():
    a, b, _ = operands(12, 10)
    a, b = a.reshape(3, 4), b[:4]
    with np.errstate(all="ignore"):
        want = bits_of(a * b)
    assert np.array_equal(both(binary(float32.multiply), a, b), want)
    assert np.array_equal(np.asarray(jax.vmap(binary(float32.multiply), (0, None))(a, b)), want)
    scalar = jax.jit(lambda v, m: float32.to_bits(float32.multiply(float32.of(v), m)))(a, float32.of(0.25))
    assert np.array_equal(np.asarray(scalar), bits_of(a * np.float32(0.25)))


def test_no_float_in_the_program():
    def f(x, scale: Float32, offset: Float32):
        return float32.to_int32(float32.fma(float32.from_int32(x), scale, offset))

    x = np.arange(8, dtype=np.int32)
    text = jax.jit(f).lower(x, float32.of(0.3), float32.of(2.0)).as_text()
    assert "f32" not in text
    assert "f64" not in text


def test_errors():
    with pytest.raises(TypeError, match=r"expected a float32 array, a Real or a Python float. Got int32"):
        float32.of(np.int32(3))
    with pytest.raises(ValueError, match="finite"):
        float32.of(np.array([1.0, np.inf], np.float32))
    with pytest.raises(ZeroDivisionError, match="division of a float32 by zero"):
        float32.divide(float32.of(1.0), float32.of(0.0))
