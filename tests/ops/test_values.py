"""The real numbers that training reads: codes times their scale, and accumulators with their offset."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.qparams import QParams, QSpec
from qjax.ops.pending import Pending
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


@pytest.mark.parametrize("function", [reals, shifted])
def test_a_loop_reads_its_numbers_and_no_arrays_of_them(function) -> None:
    """Under differentiation JAX computes before a loop what does not change in it."""

    def loss(codes: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(function(x)), None), codes, length=3)[0])

    jaxpr: Any = jax.make_jaxpr(jax.grad(loss))(CODES).jaxpr
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert [v.aval.shape for v in loops[0].invars].count(CODES.shape) == 1
