"""Reals inside a trace: the processor's doubles, where XLA would rewrite them, and the integers for TPUs."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics import Real
from qjax.numerics import _binary64 as binary64
from qjax.numerics.softfloat import _PATTERNS

N = 20_000
OPS = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}


def floats(seed: int, n: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.normal(size=n), rng.integers(-30, 30, n)).astype(np.float32)


def words(r: Real) -> Any:
    """A Real's fields as arrays that leave a trace whatever `jax_enable_x64` says."""
    with jax.enable_x64(True):
        return r.sign, (r.mantissa >> np.uint64(32)).astype(jnp.uint32), r.mantissa.astype(jnp.uint32), r.exponent


def check(f: Callable[..., Real], *args: Any, wrap: Callable[[Any], Any] = jax.jit) -> None:
    got = wrap(lambda *args: words(f(*args)))(*args)
    want = words(f(*args))
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(g), np.asarray(w))


def test_every_exponent_of_float32_is_read() -> None:
    bits = np.arange(256, dtype=np.uint32)[:255, None] << 23 | np.array([0, 1, 2**22, 2**23 - 1], np.uint32)
    subnormal = np.uint32(1) << np.arange(23, dtype=np.uint32)
    x = np.concatenate([bits.ravel(), subnormal, subnormal * 2 - 1]).view(np.float32)
    check(Real.of, np.concatenate([x, -x]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.sampled(3)
def test_integers_are_read(dtype: str) -> None:
    info = np.iinfo(dtype)
    powers = 2 ** np.arange(info.bits - (info.min < 0), dtype=np.int64)
    x = np.concatenate([[info.min, info.max, 0], powers, powers - 1, -powers])
    check(Real.of, x[(x >= info.min) & (x <= info.max)].astype(dtype))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.sampled(2)
def test_of_doubles(op: Any) -> None:
    """Full mantissas: products of float32, whose doubles have 48 bits."""
    a, b, c, d = (floats(seed) for seed in range(4))
    check(lambda a, b, c, d: op(Real.of(a) * b, Real.of(c) / d), a, b, c, d)


def test_a_quotient_by_one_scale_is_not_a_product_with_its_reciprocal() -> None:
    a = floats(0)
    for b in (np.float32(0.1), np.float32(3), np.float32(1.9999999), np.float32(1e-40)):
        check(lambda a, b: Real.of(a) / Real.of(b), a, b)
        check(lambda a, b=b: Real.of(a) / Real.of(b), a)
        check(lambda b: Real.of(a) / Real.of(b), b)
        check(lambda b: Real.of(np.float32(1)) / Real.of(b), b)
    scales = floats(1, 16)
    got = jax.jit(jax.vmap(lambda b: words(Real.of(a[:64]) / Real.of(b))))(scales)
    want = words(Real.of(a[:64])[None] / Real.of(scales)[:, None])
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(g), np.asarray(w))


def test_chains_of_divisions_round_each() -> None:
    a, b, c = (floats(seed) for seed in range(3))
    check(lambda a, b, c: Real.of(a) / b / c, a, b, c)
    check(lambda a, b, c: Real.of(a) / (Real.of(b) / c), a, b, c)
    check(lambda a, b, c: (Real.of(a) / b) / (Real.of(c) / a), a, b, c)


def test_a_product_is_rounded_before_the_sum() -> None:
    a, b, c = (floats(seed) for seed in range(3))
    check(lambda a, b, c: Real.of(a) * b * c + Real.of(b) * c * a, a, b, c)
    # the exact sum is 0; a fused multiply-add would leave the rounding error of the product
    check(lambda a, b, c: Real.of(a) * b * c - Real.of(a) * b * c, a, b, c)


def test_constants_are_not_merged() -> None:
    a = floats(0)
    check(lambda a: Real.of(a) * Real.of(0.1) * Real.of(0.7), a)
    check(lambda a: Real.of(a) + Real.of(0.1) + Real.of(1e9) - Real.of(1e9), a)


def test_square_roots_of_squares_and_others() -> None:
    a = np.abs(floats(0))
    check(lambda a: Real.of(a).sqrt() * Real.of(a).sqrt(), a)
    check(lambda a: (Real.of(a) * Real.of(a)).sqrt(), a)


def test_subnormal_float32_and_integers_are_exact() -> None:
    tiny = np.arange(-300, 300).astype(np.float32) * np.float32(2.0**-149)
    check(Real.of, tiny)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32):
        ends = np.iinfo(dtype)
        check(Real.of, np.array([ends.min, ends.min + 1, 0, 1, ends.max - 1, ends.max], dtype))


def test_signs_and_order() -> None:
    a, b = floats(0), floats(1)
    a[:100], b[50:150] = 0, 0
    check(lambda a, b: -Real.of(a) + abs(Real.of(b)), a, b)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        got = jax.jit(lambda a, b, compare=compare: compare(Real.of(a), Real.of(b)))(a, b)
        assert np.array_equal(np.asarray(got), compare(a, b))


def test_powers_of_two_end_in_zero() -> None:
    a = floats(0, 16)
    for k in (-40, 0, 40):
        check(lambda a, k=k: Real.of(a).scale_by_power_of_two(k), a)
    gone = jax.jit(lambda a: Real.of(a).scale_by_power_of_two(-3000).sign)(a)
    assert np.array_equal(np.asarray(gone), np.zeros(16, np.int32))


@pytest.mark.parametrize("name", [*OPS, "sqrt"])
def test_the_integers_of_processors_without_doubles(name: str) -> None:
    a, b = floats(0), floats(1)
    a, b = (Real.of(a) * Real.of(b)), Real.of(b)
    with jax.enable_x64(True):
        packed = [jax.jit(lambda *p: binary64.pack(jnp, *p))(*x.parts()) for x in (abs(a), b)]
        packed = packed[: 1 if name == "sqrt" else 2]
        integers = _PATTERNS[name](*packed)
        native = jax.jit(lambda *p: getattr(binary64, name)(*p, _PATTERNS[name]))(*packed)
        assert np.array_equal(np.asarray(integers), np.asarray(native))
