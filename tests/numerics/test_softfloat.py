"""Real against IEEE doubles on the host and against fractions, and the same bits inside jit and vmap."""

import operator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.numerics import Real
from tests.numerics.exact import ROUNDINGS, saturate32

N = 200_000


def operands(seed: int) -> np.ndarray:
    """Doubles that provoke ties, carries and cancellation: few exponents, mantissas near powers of two."""
    rng = np.random.default_rng(seed)
    low = np.float64(2**52)
    kinds = [
        rng.integers(2**52, 2**53, N).astype(np.float64),
        low + rng.integers(0, 4, N),
        2 * low - rng.integers(1, 4, N),
        rng.integers(1, 64, N).astype(np.float64) * 2.0**47,
        low + 2.0 ** rng.integers(0, 52, N),
    ]
    mantissa = np.choose(rng.integers(0, len(kinds), N), kinds)
    exponent = np.where(rng.random(N) < 0.7, rng.integers(-3, 4, N), rng.integers(-120, 120, N))
    return np.ldexp(mantissa, exponent - 52) * rng.choice([1, -1, 0], N, p=[0.5, 0.49, 0.01])


A, B = operands(1), operands(2)
# equal and adjacent magnitudes
B = np.where(np.arange(N) % 17 == 0, np.nextafter(-A, np.inf), B)
NONZERO = np.where(B == 0, 3.0, B)


def value(r: Real) -> np.ndarray:
    """The doubles of a Real, after checking that it is canonical."""
    sign, mantissa = np.asarray(r.sign), np.asarray(r.mantissa)
    assert np.array_equal(mantissa == 0, sign == 0)
    assert np.all((mantissa == 0) | ((mantissa >= 2**52) & (mantissa < 2**53)))
    assert (sign.dtype, mantissa.dtype, np.asarray(r.exponent).dtype) == (np.int32, np.uint64, np.int32)
    return r.to_float64()


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv], ids=lambda f: f.__name__)
def test_arithmetic_is_that_of_doubles(op):
    b = NONZERO if op is operator.truediv else B
    assert np.array_equal(value(op(Real.of(A), Real.of(b))), op(A, b))


def test_square_root_is_that_of_doubles():
    a = np.abs(A)
    assert np.array_equal(value(Real.of(a).sqrt()), np.sqrt(a))
    squares = np.arange(1, 5000, dtype=np.float64) ** 2
    for x in (squares, np.nextafter(squares, np.inf), np.nextafter(squares, 0)):
        assert np.array_equal(value(Real.of(x).sqrt()), np.sqrt(x))


@pytest.mark.parametrize(
    "compare",
    [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne],
    ids=lambda f: f.__name__,
)
def test_comparisons(compare):
    b = np.where(np.arange(N) % 3 == 0, A, B)
    assert np.array_equal(compare(Real.of(A), Real.of(b)), compare(A, b))


def test_selection_sign_and_powers_of_two():
    a, b = Real.of(A), Real.of(B)
    assert np.array_equal(value(a.maximum(b)), np.maximum(A, B))
    assert np.array_equal(value(a.minimum(b)), np.minimum(A, B))
    assert np.array_equal(value(-a), -A)
    assert np.array_equal(value(abs(a)), np.abs(A))
    assert np.array_equal(a.is_zero, A == 0)
    k = np.arange(N, dtype=np.int32) % 200 - 100
    assert np.array_equal(value(a.scale_by_power_of_two(k)), np.ldexp(A, k))
    condition = np.arange(N) % 2 == 0
    assert np.array_equal(value(Real.where(condition, a, b)), np.where(condition, A, B))


def test_broadcasting_indexing_and_mixed_operands():
    a, b = Real.of(A[:6].reshape(2, 3)), Real.of(NONZERO[:3])
    assert np.array_equal(value(a / b), A[:6].reshape(2, 3) / NONZERO[:3])
    assert np.array_equal(value(a[1]), A[3:6])
    assert np.array_equal(value(a.reshape(3, 2)), A[:6].reshape(3, 2))
    assert a.shape == (2, 3)
    assert a.broadcast_to((4, 2, 3)).shape == (4, 2, 3)
    x = np.float32(0.1)
    assert (x * Real.of(3.0)).to_float64() == np.float64(x) * 3
    assert (1.0 / Real.of(x)).to_float64() == 1 / np.float64(x)
    assert (1 - Real.of(x)).to_float64() == 1 - np.float64(x)
    assert (np.ones(3) + Real.of(A[:3])).to_float64().tolist() == (np.ones(3) + A[:3]).tolist()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_16_bit_float_converts_exactly(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    x = x[np.isfinite(x.astype(np.float32))]
    assert np.array_equal(value(Real.of(x)), x.astype(np.float64))
    assert np.array_equal(np.asarray(jax.jit(lambda v: Real.of(v).to_float32())(x)), x.astype(np.float32))


def float32_patterns() -> np.ndarray:
    bits = np.random.default_rng(3).integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
    bits[: N // 8] &= np.uint32(0x807FFFFF)
    x = bits.view(np.float32)
    return x[np.isfinite(x)]


def test_float32_round_trip_keeps_subnormals():
    x = float32_patterns()
    x = np.where(x == 0, np.float32(0), x)
    for y in (Real.of(x).to_float32(), jax.jit(lambda v: Real.of(v).to_float32())(x)):
        assert np.array_equal(np.asarray(y).view(np.int32), x.view(np.int32))


def test_rounding_to_float32_is_that_of_the_cast():
    rng = np.random.default_rng(4)
    x = np.ldexp(A / np.maximum(np.abs(A), 1e-300), rng.integers(-155, 131, N)) * (1 + rng.random(N))
    halves = float32_patterns().astype(np.float64)
    with np.errstate(over="ignore"):
        # exact ties between neighbouring float32 numbers, and one double to either side
        after = np.nextafter(halves.astype(np.float32), np.float32(np.inf)).astype(np.float64)
        ties = (halves + after)[np.isfinite(after)] / 2
        x = np.concatenate([x, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
        want = x.astype(np.float32) + np.float32(0)
    assert np.array_equal(Real.of(x).to_float32(), want)


@pytest.mark.parametrize("rounding", sorted(ROUNDINGS))
def test_to_integers(rounding):
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [
            np.arange(-40, 41) / 4,
            [
                2.0**31,
                -(2.0**31),
                2.0**31 - 0.5,
                -(2.0**31) - 0.5,
                2.0**63,
                -(2.0**63),
                2.0**62,
                1e300,
                -1e300,
                1e-300,
            ],
            np.ldexp(rng.normal(size=500), rng.integers(-60, 70, 500)),
        ]
    )
    exact = [ROUNDINGS[rounding](Fraction(float(v))) for v in x]
    assert np.array_equal(Real.of(x).to_int32(rounding), [saturate32(v) for v in exact])
    assert np.array_equal(Real.of(x).to_int64(rounding), [max(-(2**63), min(2**63 - 1, v)) for v in exact])
    x32 = x[np.abs(x) < 1e38].astype(np.float32)
    want = [saturate32(ROUNDINGS[rounding](Fraction(float(v)))) for v in x32]
    assert np.array_equal(np.asarray(jax.jit(lambda v: Real.of(v).to_int32(rounding))(x32)), want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_convert_as_a_cast_to_double(dtype):
    info = np.iinfo(dtype)
    x = np.array([info.min, info.min + 1, 0, 1, 3, info.max // 3, info.max - 1, info.max], dtype)
    assert np.array_equal(value(Real.of(x)), x.astype(np.float64))
    if x.dtype.itemsize <= 4:
        y = jax.jit(lambda v: (Real.of(v) + 0.5).to_float32())(x)
        assert np.array_equal(np.asarray(y), (x.astype(np.float64) + 0.5).astype(np.float32))


def program(x, y, n):
    """Every operation once, ending in things that leave a jit: float32, int32, bool."""
    x, y, n = Real.of(x), Real.of(y), Real.of(n)
    z = ((x * y + n) / y - x).maximum(-y)
    root = (abs(z) + y).sqrt().scale_by_power_of_two(-3)
    chosen = Real.where(z > root, z, root * x)
    return chosen.to_float32(), (root * n).to_int32("nearest_away"), z <= root, z.is_zero


def test_host_jit_and_vmap_agree():
    rng = np.random.default_rng(6)
    x = rng.normal(size=N).astype(np.float32)
    y = np.exp(4 * rng.normal(size=N)).astype(np.float32)
    n = rng.integers(-(2**31), 2**31, N).astype(np.int32)
    host = program(x, y, n)
    assert all(isinstance(v, np.ndarray) for v in host)
    for f in (jax.jit(program), jax.jit(jax.vmap(program))):
        for got, want in zip(f(x, y, n), host, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(np.asarray(got), want)
    concrete = program(jnp.asarray(x), jnp.asarray(y), jnp.asarray(n))
    assert all(np.array_equal(a, b) for a, b in zip(concrete, host, strict=True))


def test_carried_as_a_pytree_inside_one_trace():
    x = np.array([0.1, 0.7], np.float32)

    def newton(x):
        start = Real.of(x)
        with jax.enable_x64(True):
            end = jax.lax.fori_loop(0, 4, lambda _, r: (r + start / r).scale_by_power_of_two(-1), start)
        return end.to_float32()

    r = x.astype(np.float64)
    for _ in range(4):
        r = (r + x.astype(np.float64) / r) / 2
    assert np.array_equal(np.asarray(jax.jit(newton)(x)), r.astype(np.float32))


def test_the_pattern_is_that_of_the_double():
    x = np.array([0.1, -0.7, 0, 3e38, -1e-38], np.float32)
    bits = x.astype(np.float64).view(np.uint64)
    with jax.enable_x64(True):
        traced = jax.jit(lambda x: Real.of_pattern(Real.of(x).pattern()).pattern())(x)
    assert np.array_equal(Real.of(x).pattern(), bits)
    assert np.array_equal(traced, bits)


def test_fields_that_a_branch_reads_first_are_read_again_outside():
    x = np.array([0.1, -0.7], np.float32)

    def program(x):
        r = Real.of(x) * Real.of(np.float32(0.3))
        inside = jax.lax.cond(x[0] > 0, lambda: r.exponent, lambda: -r.exponent)
        return inside, r.sign, r.exponent

    inside, sign, exponent = jax.jit(program)(x)
    host = Real.of(x) * Real.of(np.float32(0.3))
    assert np.array_equal(inside, host.exponent)
    assert np.array_equal(sign, host.sign)
    assert np.array_equal(exponent, host.exponent)


finite = st.floats(min_value=2.0**-200, max_value=2.0**200) | st.floats(min_value=-(2.0**200), max_value=-(2.0**-200))


@given(finite, finite)
def test_results_are_the_exact_ones_rounded_once(a, b):
    x, y = Fraction(a), Fraction(b)
    assert (Real.of(a) + Real.of(b)).to_float64() == float(x + y)
    assert (Real.of(a) * Real.of(b)).to_float64() == float(x * y)
    assert (Real.of(a) / Real.of(b)).to_float64() == float(x / y)


@pytest.mark.parametrize("flag", [False, True])
def test_the_64_bit_flag_changes_nothing(flag):
    x = np.array([0.1, 0.2, 0.3], np.float32)
    with jax.enable_x64(flag):
        assert np.array_equal(np.asarray(jax.jit(lambda v: (1.0 / Real.of(v)).to_float32())(x)), 1 / x)


def test_errors():
    for bad in (np.nan, np.inf, np.array([1.0, -np.inf], np.float32), jnp.float16(np.inf)):
        with pytest.raises(ValueError, match="must be finite"):
            Real.of(bad)
    with pytest.raises(ZeroDivisionError, match="greater than 0"):
        _ = Real.of(1.0) / Real.of(np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="at least 0"):
        Real.of(-1.0).sqrt()
    with pytest.raises(ValueError, match="deterministically"):
        Real.of(1.5).to_int32("stochastic")
    for bad in (True, "1", 2**80):
        with pytest.raises(TypeError, match="made of float or integer arrays"):
            Real.of(bad)
    with pytest.raises(TypeError, match="on the host only"):
        jax.jit(lambda v: Real.of(v).to_float64())(np.float32(1))
    assert (Real.of(0.0) * Real.of(-3.0)).is_zero


def test_a_mantissa_truncated_at_a_jit_boundary_is_refused():
    r = Real.of(np.array([0.1], np.float32))
    broken = Real(r.sign, r.mantissa.astype(np.uint32), r.exponent)
    with pytest.raises(TypeError, match=r"must be uint64. Got uint32.*crossed the boundary"):
        _ = broken + 1.0
