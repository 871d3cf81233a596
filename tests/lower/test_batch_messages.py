"""What a user reads where a model depends on its batch, or gets arguments of another dtype."""

import re

import jax
import jax.numpy as jnp
import numpy as np
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


class Ragged(nnx.Module):
    """Takes texts of several lengths, and pads them itself."""

    def __init__(self):
        self.dense = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, texts, times):
        longest = max(map(len, texts))
        padded = jnp.stack([jnp.pad(x, ((0, longest - len(x)), (0, 0))) for x in texts])
        y = nnx.gelu(self.dense(padded)) * (1.0 + jnp.tanh(times))[:, None, None]
        return [one[: len(x)] for x, one in zip(texts, y, strict=True)]


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


class Branch(nnx.Module):
    """Has a case for the size of the batch."""

    def __init__(self, size):
        self.dense, self.size = nnx.Linear(6, 8, rngs=nnx.Rngs(0)), size

    def __call__(self, x):
        y = self.dense(x)
        return y if len(x) > self.size else -y


class Indexing(nnx.Module):
    """JAX writes `x[0]` and a broadcast otherwise for a batch of one, which computes nothing else."""

    def __init__(self):
        self.dense, self.bias = nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((1, 8)))

    def __call__(self, x, ids):
        y = self.dense(x) + self.bias[...]
        return jax.lax.dynamic_slice_in_dim(y, ids[0], 3, axis=1)


def test_a_loop_over_the_examples_with_a_quantizer_in_each_step():
    """The larger batch has places for which the sample gave no quantizer."""

    class Running(nnx.Module):
        def __call__(self, x):
            total = jnp.zeros(x.shape[1:])
            for row in x:
                total = total + row
            return x - total[None]

    x = jax.random.normal(jax.random.key(0), (4, 6))
    qmodel = qjax.quantize(Running(), qjax.Recipe(), x)
    qmodel.eval()
    with pytest.raises(ConversionError, match=r"messages.py.* the model runs operations on a larger batch that"):
        qjax.convert(qmodel, x)
    graph = qjax.convert(qmodel, x, batch="fixed")
    assert qjax.verify(graph, qmodel, [x]).exact


def test_a_case_for_a_batch_of_one_is_said():
    x = jax.random.normal(jax.random.key(0), (4, 6))
    qmodel = qjax.quantize(Branch(1), qjax.Recipe(), x)
    qmodel.eval()
    with pytest.warns(UserWarning, match=r"On a batch of 1 the model computes .*'neg' and nothing, at .*messages.py"):
        graph = qjax.convert(qmodel, x)
    # the graph has the case of the sample
    assert qjax.verify(graph, qmodel, [x]).exact
    # the sample's own case is a batch of one: no graph has both
    with pytest.raises(ConversionError, match="the model runs other operations on a batch of 1"):
        qjax.convert(qjax.quantize(Branch(1), qjax.Recipe(), x[:1]), x[:1])


@pytest.mark.exhaustive
def test_nothing_is_said_of_what_only_jax_writes_otherwise():
    given = jax.random.normal(jax.random.key(0), (4, 6)), jnp.zeros(4, jnp.int32)
    qmodel = qjax.quantize(Indexing(), qjax.Recipe(), given)
    qmodel.eval()
    graph = qjax.convert(qmodel, given)
    assert qjax.verify(graph, qmodel, [tuple(a[:1] for a in given)]).exact


def test_a_model_that_fails_on_twice_the_batch():
    given = jax.random.normal(jax.random.key(0), (4, 6)), jnp.eye(4)
    qmodel = qjax.quantize(Adjacency(), qjax.Recipe(), given)
    qmodel.eval()
    with pytest.raises(ConversionError, match=r'batch of 4, but fails on one of 8(.|\n)*batch="fixed"'):
        qjax.convert(qmodel, given)
    graph = qjax.convert(qmodel, given, batch="fixed")
    assert graph.run(graph.quantize(*given)).shape == (4, 8)


def test_examples_of_several_lengths_in_a_list():
    """As diffusion models and language models take texts: the arguments have no axis for the batch."""
    texts = [jax.random.normal(jax.random.key(n), (n, 6)) for n in (5, 7)]
    given = texts, jnp.asarray([0.3, 0.8])
    qmodel = qjax.quantize(Ragged(), qjax.Recipe(), given)
    qmodel.eval()
    found = (
        "convert: the first axis of every argument is the batch, but input/0/0 has 5, input/0/1 has 7, input/1 has 2."
    )
    with pytest.warns(UserWarning, match=re.escape(f"{found} So the graph takes these shapes only.")):
        graph = qjax.convert(qmodel, given)
    assert graph.ir.metadata["batch"] == "fixed"
    assert qjax.verify(graph, qmodel, [given]).exact
    with pytest.warns(UserWarning, match=re.escape(found)):
        exact = qjax.exact(qmodel, given)(qmodel, *given)
    codes = graph.quantize(*given)
    jax.tree.map(np.testing.assert_array_equal, graph(*given), exact)
    jax.tree.map(np.testing.assert_array_equal, graph.run(codes), graph.native(1).run(codes))
    with pytest.raises(ValueError, match=re.escape(found) + '.*convert\\(..., batch="fixed"\\)'):
        qjax.convert(qmodel, given, batch="free")


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
    message = "arguments of the sample's dtypes" if other == "float32" else "expected floats, as in the sample"
    with pytest.raises((TypeError, ValueError), match=message):
        qjax.calibrate(qmodel, [jnp.ones((8, 6), other)])
