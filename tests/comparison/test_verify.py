"""What `verify` says: whether the graph is the model's, how far its outputs are, why codes differ, and the cure."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.runtimes.comparing import Result
from tests.layers.round_trip import data

X = data(4, 4, 4, 2)


class Network(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = lax.reduce_window(nnx.relu(self.conv(x)), np.float32(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x / np.float32(4)
        return self.head(jnp.mean(x, axis=(1, 2)))


@functools.cache
def made(target):
    qmodel = qjax.quantize(Network(), qjax.Recipe(target=target), X)
    qjax.calibrate(qmodel, [X, data(64, 4, 4, 2, seed=1)])
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, X)


def test_nothing_differs():
    qmodel, graph = made("nearest_even")
    report = qjax.verify(graph, qmodel, [X])
    assert report.exact
    seen = f"(4 examples, {report.compared:,} codes)"
    assert report.verdict == f"No code differs: the graph computes what the training forward computes {seen}."
    assert str(report).startswith(report.verdict)
    assert [output.decibels for output in report.outputs] == [math.inf]


def test_a_target_that_rounds_twice():
    qmodel, graph = made("tflite_micro")
    report = qjax.verify(graph, qmodel, [data(64, 4, 4, 2, seed=1)])
    named = {node.name: node for node in report.nodes}
    assert named["conv"].local > 0
    assert named["conv"].cause == "rounds twice, ties up, then away from zero"
    # what the formula computes is what was trained
    assert [named[name].local for name in ("window_sum", "sum")] == [0, 0]
    assert report.as_converted
    lines = report.verdict.split("\n")
    assert lines[0] == "The graph is bit-identical to qjax.exact for this model."
    assert lines[1] == f"Predictions: {report.predictions} of 64 differ from the training forward's."
    assert f"  conv (conv), {named['conv'].local} codes by at most 1: {named['conv'].cause}" in lines
    assert "qjax.exact(qmodel, sample)" in lines[-1]


def test_the_distance_of_an_output():
    qmodel, graph = made("tflite_micro")
    x = data(64, 4, 4, 2, seed=1)
    (found,) = qjax.verify(graph, qmodel, [x[:32], x[32:]]).outputs
    trained, shipped = (np.asarray(y, np.float64) for y in (nnx.jit(lambda m, x: m(x))(qmodel, x), graph(x)))
    apart = np.abs(trained - shipped)
    assert found.by_at_most == np.max(apart) > 0
    assert found.decibels == pytest.approx(10 * math.log10(np.sum(trained**2) / np.sum(apart**2)), abs=1e-3)


class Other(nnx.Module):
    """Layers of other names, or of other widths."""

    def __init__(self, names, width=8):
        rngs = nnx.Rngs(1)
        self.names = names
        setattr(self, names[0], nnx.Conv(2, width, (3, 3), rngs=rngs))
        setattr(self, names[1], nnx.Linear(width, 3, rngs=rngs))

    def __call__(self, x):
        first, second = (getattr(self, name) for name in self.names)
        return second(jnp.mean(nnx.relu(first(x)), axis=(1, 2)))


@pytest.mark.parametrize(
    ("names", "width", "what"),
    [
        (
            ("stem", "out"),
            8,
            r"no tensor for \d of the model's \d, such as 'conv'",
        ),
        (("conv", "out"), 8, r"no tensor for \d of the model's \d"),
        (
            ("conv", "head"),
            16,
            r"whose tensor 'conv' has the shape \(None, 4, 4, 16\), where the model's has \(4, 4, 4, 8\)",
        ),
    ],
)
def test_the_graph_of_another_model_is_refused(names, width, what):
    qmodel, _ = made("nearest_even")
    other = qjax.quantize(Other(names, width), qjax.Recipe(), X)
    other.eval()
    with pytest.raises(ValueError, match=f"verify: expected the graph of this model.*{what}.*Convert the model again"):
        qjax.verify(qjax.convert(other, X), qmodel, [X])


def test_a_graph_of_another_state_of_the_model():
    qmodel, graph = made("nearest_even")
    later = nnx.clone(qmodel)
    kernel = later.model.head.kernel
    kernel[...] = kernel[...].at[2, 1].add(0.5)
    report = qjax.verify(graph, later, [X])
    assert not report.as_converted
    assert report.verdict.startswith("The graph differs from what qjax.convert returns for this model now: ")
    assert "of the node 'head' differs. Convert again." in report.verdict
    assert "Cure" not in report.verdict


def test_another_target_than_the_models():
    qmodel, _ = made("nearest_even")
    report = qjax.verify(qjax.convert(qmodel, X, target="tflite_micro"), qmodel, [data(64, 4, 4, 2, seed=1)])
    assert report.as_converted
    assert "quantize with qjax.Recipe(target='tflite_micro')" in report.verdict
    assert report.local > 0


def test_a_target_that_is_known_by_name_alone():
    qmodel, _ = made("nearest_even")
    chip = qjax.targets.Target("chip of test_verify", "double_round")
    report = qjax.verify(qjax.convert(qmodel, X, target=chip), qmodel, [data(64, 4, 4, 2, seed=1)])
    assert report.as_converted is None
    assert report.verdict.startswith("Predictions: ")


def test_sums_that_saturate_are_named():
    recipe = qjax.Recipe(target="onnxruntime_avx2", activations=qjax.QSpec(bits=8, signed=False, symmetric=False))
    model = Network()
    model.conv.kernel[...] = jnp.abs(model.conv.kernel[...])
    qmodel = qjax.quantize(model, recipe, X)
    qmodel.eval()
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X])
    assert report.as_converted
    causes = {node.cause for node in report.nodes if node.local}
    assert causes == {"sums in int16 pairs, which saturate (Recipe(reduce_range=True) keeps such sums exact)"}


def test_emitted_files_are_run_on_their_runtimes():
    """Where the runtime rounds otherwise, the report gives the place and the cure."""
    qmodel, graph = made("tflite_micro")
    batches = [data(50, 4, 4, 2, seed=seed) * 3 for seed in (1, 2)]
    runtimes = ("c", "litert", "onnxruntime")
    report = qjax.verify(graph, qmodel, batches, runtimes=runtimes)
    found = dict(zip(runtimes, report.files, strict=True))
    assert [found[name].equal for name in runtimes] == [True, False, True]
    assert [isinstance(file, Result) and file.compared for file in report.files] == [300] * 3
    assert not report.exact
    lines = report.verdict.split("\n")
    assert lines[0].endswith("Calibrate with data like these.")
    assert lines[2] == "c against qjax's interpreter, target tflite_micro: no code of 300 differs."
    assert "codes differ, by at most 1 (head at [" in lines[3]
    assert lines[3].endswith("and this graph as tflite_micro: try --target tflite_xnnpack.")


def test_a_file_that_differs_is_not_exact():
    """Also where training and graph agree in everything."""
    qmodel, graph = made("nearest_even")
    asked = {"onnxruntime": {"style": "integer"}}
    report = qjax.verify(graph, qmodel, [data(100, 4, 4, 2, seed=1) * 3], runtimes=asked)
    assert report.exact == report.files[0].equal
    (found,) = report.files
    assert isinstance(found, Result)
    assert found.compared == 300
    planted = dataclasses.replace(found.outputs[0], count=1)
    broken = report.with_files([dataclasses.replace(found, outputs=(planted,))])
    assert not broken.exact
    assert "1 of 300 codes differ" in broken.verdict


def test_runtimes_that_are_unknown():
    qmodel, graph = made("nearest_even")
    with pytest.raises(
        ValueError, match=r"expected runtimes= of c, executorch, litert, .* got 'onnx-runtime'. Did you mean 'onnx"
    ):
        qjax.verify(graph, qmodel, [X], runtimes=["onnx-runtime"])
    with pytest.raises(TypeError, match=r"a list of names, got a string: write \['c'\]"):
        qjax.verify(graph, qmodel, [X], runtimes="c")
