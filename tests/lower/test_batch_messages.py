"""What a user reads where a model depends on its batch, or gets arguments of another dtype."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import qjax
from qjax.graph.check import GraphError
from qjax.graph.unsupported import ConversionError


class Adjacency(nnx.Module):
    """A layer of a graph network: the nodes are the rows, and know each other."""

    def __init__(self):
        self.dense = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x, adjacency):
        return jnp.matmul(adjacency, self.dense(x))


class Median(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.median(self.dense(x), axis=1)


class Converting(nnx.Module):
    """Takes images of bytes as well as of floats."""

    def __init__(self):
        self.dense = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x.astype(jnp.float32))


def test_a_model_that_fails_on_twice_the_batch():
    given = jax.random.normal(jax.random.key(0), (4, 6)), jnp.eye(4)
    qmodel = qjax.quantize(Adjacency(), qjax.Recipe(), given)
    qmodel.eval()
    with pytest.raises(ConversionError, match=r'batch of 4, but fails on one of 8(.|\n)*batch="fixed"'):
        qjax.convert(qmodel, given)
    graph = qjax.convert(qmodel, given, batch="fixed")
    assert graph.run(*graph.quantize(*given)).shape == (4, 8)


@pytest.mark.parametrize("batch", ["free", "fixed"])
def test_a_median_holds_nan(batch):
    x = jax.random.normal(jax.random.key(0), (3, 5, 6))
    qmodel = qjax.quantize(Median(), qjax.Recipe(), x)
    qmodel.eval()
    with pytest.raises(GraphError, match="Integers have no NaN"):
        qjax.convert(qmodel, x, batch=batch)


@pytest.mark.parametrize(("sample", "other"), [("float32", "uint8"), ("uint8", "float32")])
def test_arguments_of_another_dtype(sample, other):
    qmodel = qjax.quantize(Converting(), qjax.Recipe(), jnp.ones((8, 6), sample))
    with pytest.raises(ValueError, match="arguments of the sample's dtypes"):
        qjax.calibrate(qmodel, [jnp.ones((8, 6), other)])
