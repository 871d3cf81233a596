"""Sums, differences and products of tensors of different shapes as .tflite: no copy, and the runtime's own loops."""

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.tflite import to_bytes
from qjax.export.tflite_schema.model import parse
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.export.emit.tflite_runtimes import MODES, TARGETS, litert, micro, random_codes
from tests.export.graphs import assert_equal
from tests.layers.round_trip import data


class Repeats(nnx.Module):
    """Rows, single elements, middle axes; and five axes, of which a file has fewer."""

    def __call__(self, x: jax.Array):
        row, single = x[:1, :1], x[..., :1]
        deep = x.reshape(x.shape[0], 3, 7, 1, 33)
        return {
            "row": x + row,
            "single": x - single,
            "crossed": single * row,
            "factor": x * x[:1, :1, :1],
            "deep": deep * deep[:, :1, :, :, :1],
            "alternating": deep[:, :, :1] + deep[..., :1],
            "in_turn": self.in_turn(x),
        }

    def in_turn(self, x: jax.Array) -> jax.Array:
        """Five groups of axes, more than TFLite Micro's loops have."""
        wide = x.reshape(x.shape[0], 3, 7, 3, 11)
        return wide[:, :1, :, :1] + wide[..., :1]


def converted(model: nnx.Module, recipe: qjax.Recipe, x: jax.Array) -> qjax.IntegerGraph:
    qmodel = qjax.quantize(model, recipe, x)
    qjax.calibrate(qmodel, [x], progress=False)
    qmodel.eval()
    return qjax.convert(qmodel, x)


def graph_for(target: str, bits: int = 8) -> qjax.IntegerGraph:
    x = data(4, 21, 33)
    recipe = qjax.Recipe(activations=qjax.QSpec(bits=bits, symmetric=bits == 16), target=target)
    return converted(Repeats(), recipe, x)


def in_runtime(target: str, content: bytes, graph: Graph, codes: list[np.ndarray]) -> list[np.ndarray]:
    if target == "tflite_micro":
        found = micro(content, codes, graph.outputs)
    else:
        found = litert(content, MODES[target], codes, every=False)
    return [found[name] for name in graph.outputs]


def operators(content: bytes) -> list[str]:
    return [operator.name for operator in parse(content).operators]


@pytest.mark.parametrize("target", [*MODES, "tflite_micro"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.sampled(1)
def test_the_runtimes_codes_without_a_copy(target, bits):
    graph = graph_for(target, bits).ir
    content = to_bytes(graph, batch=3)
    # five groups of axes where the runtime rounds by place, so that a copy would have other codes
    by_place = target == "tflite_optimized_x86" or (target == "tflite_xnnpack" and bits == 16)
    assert operators(content).count("BROADCAST_TO") == (0 if by_place else 2)
    assert {"ADD", "SUB", "MUL"} <= set(operators(content))
    codes = random_codes(graph, 3)
    for found, wanted in zip(in_runtime(target, content, graph, codes), Interpreter(graph)(*codes), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.sampled(1)
def test_what_was_written_is_read(target):
    graph = graph_for(target).ir
    content = to_bytes(graph, batch=3)
    assert_equal(reader.read(content), graph)


class Normalized(nnx.Module):
    """A layer norm between dense layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x: jax.Array):
        return self.last(nnx.gelu(self.norm(self.first(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 6])
def test_a_file_for_one_example_takes_more(batch):
    """Its layer norm repeats means and factors, and says no size of the batch."""
    x = data(6, 5, 8)
    graph = converted(Normalized(), qjax.Recipe(target="tflite_xnnpack"), x)
    content = to_bytes(graph.ir, batch=1)
    codes = np.asarray(graph.quantize(x[:batch]))
    (found,) = in_runtime("tflite_xnnpack", content, graph.ir, [codes])
    np.testing.assert_array_equal(found, np.asarray(graph.run(codes)))


class Deep(nnx.Module):
    """Five axes: one factor for each of the first and the last, whatever the batch."""

    def __init__(self):
        self.factor = nnx.Param(data(1, 1, 1, 1, 33) + 2)

    def __call__(self, x: jax.Array):
        deep = x.reshape(x.shape[0], 3, 7, 1, 33)
        return nnx.relu(deep) * deep[:, :1, :1] * nnx.relu(self.factor[...] + deep[:, :1, :1])


@pytest.mark.exhaustive
def test_five_axes_and_a_free_batch():
    x = data(6, 21, 33)
    graph = converted(Deep(), qjax.Recipe(target="tflite_optimized_x86"), x)
    content = to_bytes(graph.ir, batch=1)
    assert "BROADCAST_TO" not in operators(content)
    model = parse(content)
    products = [operator for operator in model.operators if operator.name == "MUL"]
    assert [[len(model.tensors[index].shape) for index in operator.inputs] for operator in products] == [[3, 3]] * 2
    for batch in (1, 6):
        codes = np.asarray(graph.quantize(x[:batch]))
        (found,) = in_runtime("tflite_optimized_x86", content, graph.ir, [codes])
        np.testing.assert_array_equal(found, np.asarray(graph.run(codes)))


class InTurn(nnx.Module):
    """Seven groups of axes."""

    def __call__(self, x: jax.Array):
        y = x.reshape(x.shape[0], 2, 2, 2, 2, 2, 2)
        return y[:, :1, :, :1, :, :1, :] + y[:, :, :1, :, :1, :, :1]


def test_more_turns_than_the_runtime_has_are_refused():
    graph = converted(InTurn(), qjax.Recipe(target="tflite_optimized_x86"), data(3, 64))
    with pytest.raises(ValueError, match=r"repeat in turn along 7 axes.*jnp\.broadcast_to"):
        to_bytes(graph.ir)
