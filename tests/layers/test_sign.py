"""Weights that use their lowest code, in front of a batch norm whose gamma is negative."""

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import check


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        assert self.norm.scale is not None
        self.norm.scale[...] = np.asarray([-1.5, -0.1, 0.7, 1.0], np.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.dense(x))


@pytest.mark.exhaustive
def test_low_bits_take_a_symmetric_range() -> None:
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=3, axis=-1, narrow_range=False))
    _, graph = check(Net(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (64, 4)), recipe)
    kernel = graph.ir.tensors["dense/kernel"]
    assert kernel.quantization is not None
    assert (kernel.quantization.qmin, kernel.quantization.qmax) == (-4, 4)


@pytest.mark.exhaustive
def test_a_full_byte_has_no_room() -> None:
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=8, axis=-1, narrow_range=False))
    x = jax.random.normal(jax.random.key(0), (64, 4))
    with pytest.warns(UserWarning, match=r"test_sign.py:\d+: .*-128.*narrow_range=True"):
        qmodel = qjax.quantize(Net(nnx.Rngs(0)), recipe, x)
    with pytest.raises(qjax.ConversionError, match=r"test_sign.py:\d+: .*-128.*narrow_range=True"):
        qjax.convert(qmodel, x)
