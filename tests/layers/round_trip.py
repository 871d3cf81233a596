"""The whole path for one model: quantize, train a step, convert, verify, exact, at two batch sizes."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer

import qjax
from qjax.api import exact as implementation
from qjax.graph import kernels
from qjax.graph.ir import Graph
from tests import in_numpy


def data(*shape: int, seed: int = 0) -> jax.Array:
    """Normal data, reproducible."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def doubled(sample: Any) -> Any:
    """The same inputs for a batch of twice the size, with new values in the second half."""

    def double(x: Any) -> Any:
        x = np.asarray(x)
        return jnp.asarray(np.concatenate([x, x[::-1] * 2 if x.dtype.kind == "f" else x[::-1]]))

    return jax.tree.map(double, sample)


def train_step(qmodel: qjax.QuantizedModel, sample: Any, rate: float = 1e-2) -> jax.Array:
    """One step of SGD towards zero outputs; returns the loss."""
    args = sample if isinstance(sample, tuple) else (sample,)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(rate), wrt=nnx.Param)
    qmodel.train()
    definition, state = nnx.split((qmodel, optimizer))

    def step(state: Any, args: Any) -> Any:
        qmodel, optimizer = nnx.merge(definition, state)

        def loss(qmodel: Any) -> jax.Array:
            leaves = jax.tree.leaves(qmodel(*args))
            return sum((jnp.mean(jnp.square(y.astype(jnp.float32))) for y in leaves), jnp.zeros(()))

        value, grads = nnx.value_and_grad(loss)(qmodel)
        optimizer.update(qmodel, grads)
        return value, nnx.state((qmodel, optimizer))

    value, state = jax.jit(step)(state, args)
    nnx.update((qmodel, optimizer), state)
    qmodel.eval()
    return value


def run_exact(forward: Any, qmodel: qjax.QuantizedModel, *inputs: Any) -> Any:
    """The exact forward inside of one jit."""
    definition, state = nnx.split(qmodel)
    return jax.jit(lambda state, inputs: forward(nnx.merge(definition, state), *inputs))(state, inputs)


def host(tree: Any) -> Any:
    """Arrays on the host; random keys as their words."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def assert_same(a: Any, b: Any) -> None:
    """The same structure and the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def assert_verified(report: Any) -> None:
    """At most one code per 10^5 off, by at most one step, where a node's inputs agree."""
    allowed = max(1, report.compared // 100_000)
    assert report.compared > 0
    assert report.local <= allowed, str(report)
    assert report.local_max <= 1, str(report)


def traced_graph(forward: Any, qmodel: qjax.QuantizedModel, *inputs: Any) -> tuple[Any, Graph]:
    """The shapes of an exact forward's outputs, and the graph that it makes of traced parameters."""
    seen: list[Graph] = []

    def prepare(graph: Graph) -> Any:
        seen.append(graph)
        return kernels.prepare(graph)

    with mock.patch.object(implementation, "prepare", prepare):
        shapes = nnx.eval_shape(forward, qmodel, *inputs)
    (graph,) = seen
    return shapes, graph


def assert_same_nodes(traced: Graph, graph: Graph) -> None:
    """All but the numbers that only a trace knows: nodes, attributes, roles, shapes, dtypes, concrete constants."""
    assert (traced.inputs, traced.outputs, traced.target) == (graph.inputs, graph.outputs, graph.target)
    assert [node.name for node in traced.nodes] == [node.name for node in graph.nodes]
    for a, b in zip(traced.nodes, graph.nodes, strict=True):
        assert (a.op, a.inputs, a.output, a.attributes) == (b.op, b.inputs, b.output, b.attributes)
        assert a.constants.keys() == b.constants.keys(), a.name
        for role in a.constants:
            left, right = traced.constant(a, role), graph.constant(b, role)
            assert (left.shape, left.dtype) == (right.shape, right.dtype), (a.name, role)
            assert isinstance(left, Tracer) or np.array_equal(left, right), (a.name, role)


always_compiled = False
"""Whether `check` compiles and runs every exact forward; conftest sets it for `make test-all`."""

FEW = 2
"""The exact forward of a graph of so few nodes is compiled in every run."""


def check(
    model: nnx.Module, sample: Any, recipe: qjax.Recipe | None = None, *, steps: int = 1, compiled: bool = False
) -> tuple[qjax.QuantizedModel, qjax.IntegerGraph]:
    """Run the whole path and assert that training forward, exact forward and graph agree.

    compiled: run the exact forward, inside jit. XLA takes longer for that than for all the rest. So that of a larger
    model is only traced, its graph compared node by node, and `make test-all` runs all.
    """
    before = host(nnx.state(model))
    qmodel = qjax.quantize(model, recipe or qjax.Recipe(), sample)
    for _ in range(steps):
        assert np.isfinite(train_step(qmodel, sample))
    qmodel.eval()
    args = sample if isinstance(sample, tuple) else (sample,)
    graph = qjax.convert(qmodel, sample)
    assert_same(before, host(nnx.state(model)))
    more = doubled(args)
    # the sample is the first half of it
    assert_verified(qjax.verify(graph, qmodel, [more]))
    forward = qjax.exact(qmodel, sample)
    if compiled or always_compiled or in_numpy.Switch.on or len(graph.ir.nodes) <= FEW:
        assert_same(run_exact(forward, qmodel, *more), graph(*more))
    else:
        shapes, traced = traced_graph(forward, qmodel, *more)
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, graph(*more))
        assert_same_nodes(traced, graph.ir)
    return qmodel, graph
