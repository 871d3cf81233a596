"""The fused multiply-add beside Python's fractions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.fused import fused_multiply_add

F32 = np.float32


def rounded(value: Fraction, near: float) -> np.float32:
    """The float32 next to a fraction, ties to even; near: a float within a few steps of it."""
    start = F32(near)
    around = [start]
    for end in (F32(-np.inf), F32(np.inf)):
        step = start
        for _ in range(3):
            step = np.nextafter(step, end)
            around.append(step)
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.int32)) & 1))


def cases(rng: np.random.Generator, kind: str, count: int) -> tuple[np.ndarray, ...]:
    a, b, c = ((rng.normal(size=count) * np.exp(3 * rng.normal(size=count))).astype(F32) for _ in range(3))
    if kind == "cancelling":
        c = (-(a * b) * (1 + rng.integers(-4, 5, count) * F32(2**-23))).astype(F32)
    elif kind == "ties":
        a, b = (rng.integers(2**11, 2**12, count) * 2 + 1 for _ in range(2))
        c = rng.integers(2**22, 2**23, count) * 2.0 ** rng.integers(0, 26, count) * rng.choice([-1, 1], count)
    elif kind == "just beside a tie":
        a = np.full(count, 1 + 2**-23)
        b, c = 0.5 + rng.integers(-1, 2, count) * 2.0**-24, rng.integers(2**23, 2**24, count)
    return a.astype(F32), b.astype(F32), c.astype(F32)


@pytest.mark.parametrize("kind", ["random", "cancelling", "ties", "just beside a tie"])
def test_it_rounds_once(kind: str) -> None:
    a, b, c = cases(np.random.default_rng(0), kind, 4000)
    results = [np.asarray(f(*map(jnp.asarray, (a, b, c)))) for f in (fused_multiply_add, jax.jit(fused_multiply_add))]
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    wanted = np.asarray([rounded(value, float(value)) for value in exact])
    for result in results:
        np.testing.assert_array_equal(result, wanted)
    twice = (a * b + c).astype(F32)
    assert (twice != wanted).any()
