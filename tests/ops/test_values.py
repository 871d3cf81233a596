"""The real numbers that training reads: codes times their scale, and accumulators with their offset."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.qparams import QParams, QSpec
from qjax.ops.float_accumulator import Pending
from qjax.ops.values import Quantized

RNG = np.random.default_rng(0)
CODES = RNG.integers(-128, 128, (64, 32)).astype(np.float32)
SCALE = np.float32(0.0123)
OFFSET = RNG.normal(size=(1, 32)).astype(np.float32)


def reals(codes: jax.Array) -> jax.Array:
    return Quantized(codes, jnp.full((1, 1), SCALE), QParams(SCALE, np.int32(0), QSpec())).real32()


def shifted(codes: jax.Array) -> jax.Array:
    return Pending.start(codes, jnp.asarray(SCALE), jnp.float32, rounded=False).plus(OFFSET).real32()


@pytest.mark.parametrize(("function", "expected"), [(reals, CODES * SCALE), (shifted, CODES * SCALE + OFFSET)])
def test_the_product_is_rounded_before_it_is_read(function, expected) -> None:
    assert np.array_equal(jax.jit(function)(CODES), expected)
    assert np.array_equal(function(CODES), expected)


@pytest.mark.parametrize("function", [reals, shifted])
def test_the_derivative_is_that_of_a_product(function) -> None:
    """That of the rounding would keep what the product was computed from, and compare all of it."""
    _, back = jax.vjp(function, CODES)
    assert np.array_equal(back(OFFSET + np.zeros_like(CODES))[0], (OFFSET + np.zeros_like(CODES)) * SCALE)
    assert np.array_equal(jax.jvp(function, (CODES,), (CODES,))[1], CODES * SCALE)
    assert " eq " not in str(jax.make_jaxpr(jax.grad(lambda codes: jnp.sum(jnp.sin(function(codes)))))(CODES))


def on_grid(codes, offset, scale=0.25, gamma=None) -> jax.Array:
    start = Pending.start(codes, jnp.full((1, 32), scale, jnp.float32), jnp.float32).plus(offset)
    return (start if gamma is None else start.times(gamma)).real32()


def gradient_of_bias(cotangent: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Those of codes and bias, and how many arrays of the codes' size the backward makes."""

    def gradients(codes, offset):
        return jax.vjp(lambda codes, offset: on_grid(codes, offset, **options), codes, offset)[1](cotangent)

    jaxpr: Any = jax.make_jaxpr(gradients)(CODES, OFFSET)
    called: Any = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "jit"][-1]
    made = [eqn for eqn in called.eqns if eqn.primitive.name == "mul" and eqn.outvars[0].aval.shape == CODES.shape]
    codes, bias = gradients(CODES, OFFSET)
    return np.asarray(codes), np.asarray(bias), len(made)


def test_the_gradient_of_a_bias_sums_what_the_product_reads() -> None:
    # multiples of 1/4, in powers of two: without rounding in any order
    cotangent = RNG.integers(-8, 9, CODES.shape).astype(np.float32)
    codes, bias, made = gradient_of_bias(cotangent)
    assert np.array_equal(codes, cotangent / 4)
    assert np.array_equal(bias, cotangent.sum(axis=0, keepdims=True))
    assert made == 1


def test_a_bias_learns_behind_a_factor_of_zero() -> None:
    """A batch norm's gamma may be 0: there is nothing to divide by. The scale of codes may vanish, too."""
    cotangent = RNG.integers(-8, 9, CODES.shape).astype(np.float32)
    gamma = np.where(np.arange(32) % 2, np.float32(2), np.float32(0))[None]
    codes, bias, _ = gradient_of_bias(cotangent, gamma=gamma)
    assert np.array_equal(codes, cotangent * gamma / 4)
    assert np.array_equal(bias, cotangent.sum(axis=0, keepdims=True) * gamma)
    for one in gradient_of_bias(cotangent, scale=0.0)[:2]:
        assert np.array_equal(one, np.zeros_like(one))


@pytest.mark.parametrize("function", [reals, shifted])
def test_a_loop_reads_its_numbers_and_no_arrays_of_them(function) -> None:
    """Under differentiation JAX computes before a loop what does not change in it."""

    def loss(codes: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(function(x)), None), codes, length=3)[0])

    jaxpr: Any = jax.make_jaxpr(jax.grad(loss))(CODES).jaxpr
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert [v.aval.shape for v in loops[0].invars].count(CODES.shape) == 1
