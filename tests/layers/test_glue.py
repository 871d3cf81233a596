"""What stands between the layers of a model: additions, clamps, pooling, operations that move codes."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import check, data


def names(graph: qjax.IntegerGraph) -> list[str]:
    return [node.op for node in graph.ir.nodes]


class Glue(nnx.Module):
    """A dense layer per branch, then whatever the branch says; returns all of them."""

    def __init__(self, branches):
        self.dense = nnx.Dict({name: nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i, name in enumerate(branches)})
        self.branches = branches

    def __call__(self, x):
        return {name: function(self.dense[name](x), x) for name, function in self.branches.items()}


class Residual(nnx.Module):
    """The sum's result is read by two layers and a second sum."""

    def __init__(self):
        self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        y = nnx.relu(x + self.a(x))
        return {"sum": y + self.b(y), "skip": y}


@pytest.mark.exhaustive
def test_both_readers_of_a_residual_see_the_same_codes():
    x = data(4, 4)
    qmodel, graph = check(Residual(), x, compiled=True)
    assert list(qmodel.qparams()) == ["input", "a", "add", "b", "add#2", "a/kernel", "b/kernel"]
    assert names(graph) == ["dot", "add", "dot", "add"]
    skip = graph.ir.nodes[1].output
    assert skip in graph.ir.nodes[2].inputs
    assert skip in graph.ir.nodes[3].inputs
    assert graph.ir.outputs == (skip, graph.ir.nodes[3].output)
    # in the training forward: what leaves as "skip" is the tensor that b reads, to the bit
    out, codes = qmodel.codes(x)
    p = qmodel.qparams()["add"]
    grid = (codes["add"] - p.zero_point).astype(jnp.float32) * p.scale
    assert np.array_equal(out["skip"], grid)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_clamps_join_their_producer():
    branches = {
        "relu": lambda y, x: nnx.relu(y),
        "relu6": lambda y, x: nnx.relu6(y * 4),
        "clip": lambda y, x: jnp.clip(y, -0.4, 0.3),
        "maximum": lambda y, x: jnp.maximum(y, 0.1),
        "twice": lambda y, x: jnp.minimum(nnx.relu(y), 0.5),
    }
    _, graph = check(Glue(branches), data(4, 6))
    assert names(graph) == ["dot"] * 5


@pytest.mark.filterwarnings("ignore:.*puts 50 among")
def test_clamps_of_codes():
    """Two readers: the codes are made before the clamp. A bound beyond the grid is the grid's end."""

    def function(y, x):
        return {"kept": y, "in": jnp.clip(y, -0.4, 0.3), "out": jnp.maximum(y, 50.0), "six": nnx.relu6(y)}

    _, graph = check(Glue({"a": function}), data(4, 6))
    assert names(graph) == ["dot", *["clamp"] * 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a single number")
def test_affine_steps_join_their_producer():
    branches = {
        "scaled": lambda y, x: y * 0.3,
        "negated": lambda y, x: -(y * 2.0),
        "divided": lambda y, x: 1.0 - y / 3.0,
        "annulled": lambda y, x: y * 0.0 + 0.5,
        "behind a clamp": lambda y, x: nnx.relu(y) * 2.0 - 0.25,
    }
    _, graph = check(Glue(branches), data(4, 6))
    assert names(graph) == [*["dot"] * 5, "rescale"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_pairs_of_tensors():
    branches = {
        "subtraction": lambda y, x: y - x,
        "product": lambda y, x: nnx.relu(y) * x,
        "square": lambda y, x: y * y,
        "added twice": lambda y, x: ((y + x) - y) + (y + x),
    }
    _, graph = check(Glue(branches), data(4, 6))
    assert [op for op in names(graph) if op != "dot"] == ["add", "multiply", "table", "add", "add", "add", "add"]


@pytest.mark.exhaustive
def test_operations_that_move_codes_keep_the_grid():
    branches = {
        "reshape": lambda y: y.reshape(y.shape[0], -1, 2).transpose(0, 2, 1),
        "flatten": lambda y: y.reshape(y.shape[0], 2, 3).reshape(y.shape[0], -1),
        "pad": lambda y: jnp.pad(y, ((0, 0), (1, 2))),
        "slice": lambda y: y[:, 1:5:2],
        "index": lambda y: y[:, 2],
        "split": lambda y: jnp.split(y, 3, axis=1)[1],
        "flip": lambda y: jnp.flip(y, 1),
        "broadcast": lambda y: jnp.broadcast_to(y[:, None, :], (y.shape[0], 3, y.shape[1])),
        "max": lambda y: jnp.max(y, axis=-1),
    }
    together = {"a": lambda y, x: {name: function(y) for name, function in branches.items()}}
    qmodel, graph = check(Glue(together), data(4, 6))
    assert set(qmodel.qparams()) == {"input", "dense/a/kernel", "dense/a"}
    expected = float(qmodel.qparams()["dense/a"].scale)
    assert {float(np.asarray(graph.ir.tensors[node.output].quantization.scale)) for node in graph.ir.nodes} == {
        expected
    }
    assert {"reshape", "transpose", "pad", "slice", "broadcast", "max", "reverse"} <= set(names(graph))


@pytest.mark.exhaustive
def test_concatenation_shares_one_quantizer():
    branches = {"a": lambda y, x: jnp.concatenate([nnx.relu(y), x, jnp.flip(-x, 1)], axis=-1)}
    qmodel, graph = check(Glue(branches), data(4, 6))
    tensors = graph.ir.tensors
    join = next(node for node in graph.ir.nodes if node.op == "concatenate")
    assert len(join.inputs) == 3
    for name in join.inputs:
        assert tensors[name].quantization.scale == tensors[join.output].quantization.scale
        assert tensors[name].quantization.zero_point == tensors[join.output].quantization.zero_point
    # y, the input and its negative stand on one grid, so there is one quantizer
    assert set(qmodel.qparams()) == {"dense/a", "dense/a/kernel"}


class Images(nnx.Module):
    """A convolution per branch, then a pooling."""

    def __init__(self, branches):
        self.conv = nnx.Dict({name: nnx.Conv(2, 3, (1, 1), rngs=nnx.Rngs(0)) for name in branches})
        self.branches = branches

    def __call__(self, x):
        # flax's own avg_pool divides by an integer
        with jax.numpy_dtype_promotion("standard"):
            return {name: function(self.conv[name](x)) for name, function in self.branches.items()}


@pytest.mark.exhaustive
def test_pooling_with_maxima():
    branches = {
        "window": lambda y: nnx.max_pool(y, (2, 2), (2, 2)),
        "padding": lambda y: nnx.max_pool(nnx.relu(y), (3, 3), (2, 2), padding="SAME"),
        "global": lambda y: jnp.max(y, axis=(1, 2)),
    }
    _, graph = check(Images(branches), data(2, 4, 6, 2))
    assert sorted(names(graph)) == ["conv", "conv", "conv", "max", "max_pool", "max_pool"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_pooling_with_averages():
    branches = {
        "window": lambda y: nnx.avg_pool(y, (2, 2), (2, 2)),
        "padding": lambda y: nnx.avg_pool(y, (3, 3), (2, 2), padding="SAME"),
        "what is there": lambda y: nnx.avg_pool(y, (3, 3), (2, 2), padding="SAME", count_include_pad=False),
        "global": lambda y: jnp.mean(y, axis=(1, 2)),
        "sum, then relu": lambda y: nnx.relu(jnp.sum(y, axis=1)),
    }
    _, graph = check(Images(branches), data(2, 4, 6, 2))
    assert sorted(names(graph)) == [*["conv"] * 5, *["sum"] * 2, *["window_sum"] * 3]


class Several(nnx.Module):
    """Two inputs, outputs in a dict with a tuple."""

    def __init__(self):
        self.a = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(5, 4, rngs=nnx.Rngs(1))

    def __call__(self, x, z):
        y, w = self.a(x), self.b(z)
        return {"sum": y + w, "both": (nnx.relu(y), w)}


@pytest.mark.exhaustive
def test_several_inputs_and_outputs():
    qmodel, graph = check(Several(), (data(4, 3), data(4, 5, seed=1)))
    out = graph(data(3, 3), data(3, 5))
    assert jax.tree.map(np.shape, out) == {"sum": (3, 4), "both": ((3, 4), (3, 4))}
    assert {"input/0", "input/1"} <= set(qmodel.qparams())


class Shared(nnx.Module):
    """One layer under two names, and called twice under one of them."""

    def __init__(self):
        self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.second = self.first

    def __call__(self, x):
        return self.second(nnx.relu(self.first(nnx.relu(self.first(x)))))


@pytest.mark.exhaustive
def test_shared_modules_stay_shared():
    qmodel, graph = check(Shared(), data(4, 4))
    assert qmodel.model.first is qmodel.model.second
    weights = [name for name, detail in qmodel.plan.details if detail[0] == "weight"]
    assert weights == ["first/kernel"]
    # three calls, three tensors of codes, one kernel
    assert {"first", "first#2", "first#3"} <= set(qmodel.qparams())
    kernels = [graph.ir.tensors[node.constants["kernel"]].value for node in graph.ir.nodes]
    assert all(np.array_equal(k, kernels[0]) for k in kernels)
