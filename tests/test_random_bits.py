"""The keys of the tests draw JAX's own numbers."""

import jax
import numpy as np
import pytest

SHAPE = (2, 3, 1, 5)

DRAWS = {
    "normal": lambda key: jax.random.normal(key, SHAPE),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, SHAPE),
    "bytes": lambda key: jax.random.bits(key, SHAPE, "uint8"),
    "permutation": lambda key: jax.random.permutation(key, 9),
    "behind a split": lambda key: jax.random.uniform(jax.random.fold_in(jax.random.split(key)[1], 7), SHAPE),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_jax(name):
    own, jaxs = jax.random.key(3), jax.random.key(3, impl="threefry2x32")
    assert own.dtype != jaxs.dtype
    np.testing.assert_array_equal(DRAWS[name](own), DRAWS[name](jaxs))
