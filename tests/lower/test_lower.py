"""What cannot be converted: the error names the primitive, this file and line, and a cure."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.lower import ConversionError

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


class Layers(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.norm, self.bn = nnx.LayerNorm(4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.stack = nnx.Param(jnp.full((3, 4, 4), 0.3))


def model(call: Callable[[Any, jax.Array], Any]) -> Layers:
    return type("Model", (Layers,), {"__call__": lambda self, x: call(self, x)})()


def convert(call: Callable[[Any, jax.Array], Any], recipe: qjax.Recipe | None = None) -> qjax.IntegerGraph:
    return qjax.convert(qjax.quantize(model(call), recipe or qjax.Recipe(), X), X)


def halve(m, x):
    return lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y * 0.5, m.a(x))


UNCONVERTIBLE = {
    # a function on one line, the primitive named, the cure
    "sort": (lambda m, x: m.b(lax.sort([m.a(x), x], num_keys=2)[1]), "'sort' on 4x4", "top_k and sorts by one key"),
    "while": (halve, "'while' on 4x4", "use a Python loop or lax.scan"),
    "statistics of the batch": (
        lambda m, x: m.b(m.bn(m.a(x), use_running_average=False)),
        "in module 'bn': 'batch_norm' on",
        "leave use_running_average=False out of its call",
    ),
    "scan over activations": (
        lambda m, x: m.b(lax.scan(lambda c, row: (c + row, None), jnp.zeros(4), m.a(x))[0]),
        "the model runs other operations on a batch of 4 than on one of 8",
        "treat all examples at once, and scan or loop over another axis",
    ),
    "mean over the batch": (
        lambda m, x: m.b(m.a(x) - m.a(x).mean(0, keepdims=True)),
        "4.0 on a batch of 4 becomes 8.0 on one of 8",
        "no operation may depend on an example's position in the batch or on the batch size",
    ),
    "sum over the batch": (
        lambda m, x: m.b(m.a(x)).sum(0),
        "'sum' .* sums over the batch, which has no fixed size",
        "Sum behind the graph's output",
    ),
    "a period without end": (
        lambda m, x: m.b(m.a(x) / jnp.asarray([[1.0, 2.0, jnp.inf, jnp.inf]])),
        "adds, multiplies or divides by a number that is NaN or infinite",
        r"Select with jnp.where: jnp.where\(keep, y, 0.0\)",
    ),
    "half of the batch": (
        lambda m, x: m.b(m.a(x))[: x.shape[0] // 2],
        r"limit of 'slice' \(slice\): \[2, 4\] on a batch of 4 becomes \[4, 4\] on one of 8",
        "A graph accepts any batch",
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", UNCONVERTIBLE)
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_the_error_names_the_primitive_the_line_and_a_cure(name):
    call, primitive, cure = UNCONVERTIBLE[name]
    with pytest.raises(ConversionError, match=f"(?s){primitive}.*{cure}") as raised:
        convert(call)
    source, first = inspect.getsourcelines(call)
    place = re.match(r"(.*?):(\d+)", str(raised.value))
    assert place is not None
    assert place[1] == __file__
    assert first <= int(place[2]) < first + len(source)


@pytest.mark.exhaustive
def test_an_accumulator_that_may_overflow():
    wide = qjax.QSpec(bits=16, symmetric=False)
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=16, axis=-1), activations=wide)
    message = r"the accumulator of 'a' \(dot\) may reach \d{10}, beyond int32. Use fewer"
    with pytest.warns(UserWarning, match=message), pytest.raises(ConversionError, match=message):
        convert(lambda m, x: m.a(x), recipe)


@pytest.mark.exhaustive
def test_an_output_that_does_not_depend_on_the_input():
    graph = convert(lambda m, x: (m.a(x), m.a.bias[...]))
    assert len(graph.ir.outputs) == 1
    assert np.array_equal(graph(X)[1], np.zeros(4))


@pytest.mark.exhaustive
def test_what_no_output_needs_is_left_out():
    graph = convert(lambda m, x: (m.b(m.a(x)), m.a(x).sum(), jnp.exp(m.a.bias[...]))[0])
    assert [node.op for node in graph.ir.nodes] == ["dot", "dot"]


@pytest.mark.exhaustive
def test_every_node_knows_its_line():
    graph = convert(lambda m, x: m.b(nnx.relu(m.a(x))).reshape(-1, 2, 2))
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert [node.location for node in graph.ir.nodes] == [f"{__file__}:{line}"] * 3


class Steps(nnx.Module):
    """In each step of a scan an integer is added before a float is, on lines that give both the name "add"."""

    def __init__(self) -> None:
        self.tables = nnx.Param(jax.random.normal(jax.random.key(0), (2, 8, 4)))

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        def step(x, table):
            places = jnp.where(ids < 0, ids + 8, ids)
            return jnp.tanh(x + table[places]), None

        return lax.scan(step, x, self.tables[...])[0]


@pytest.mark.exhaustive
def test_an_integer_of_a_step_does_not_take_the_name_of_a_quantized_tensor():
    given = X, jnp.asarray([0, -1, 3, -8], jnp.int32)
    qmodel = qjax.quantize(Steps(), qjax.Recipe(), given)
    qjax.calibrate(qmodel, [given], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, given)
    assert [node.op for node in graph.ir.nodes if node.name in ("add[0]", "add[1]")] == ["add", "add"]
    assert qjax.verify(graph, qmodel, [given]).exact
