"""The table of artifacts: its float32 models, its counts, its page; and the whole of it in little."""

import dataclasses
import io
import json

import jax
import numpy as np
import onnxruntime
import pytest
from flax import nnx
from rich.console import Console

import qjax
from benchmarks import __main__ as program
from benchmarks import artifacts, float_onnx, shipping
from benchmarks.networks import Depthwise, Network
from experiments.data import digits
from experiments.models import MLP, ResNet
from experiments.training import scores


@pytest.fixture(autouse=True)
def optax_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def network():
    images = digits().train_images[:64]
    model = MLP((12,), rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        qmodel = qjax.quantize(model, qjax.Recipe(target="tflite_micro"), images)
    qmodel.eval()
    return Network("MLP", model, qmodel, images)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [MLP, *(pytest.param(make, marks=pytest.mark.slow) for make in (Depthwise, ResNet))])
def test_the_float32_model_is_the_network(make):
    model = make(rngs=nnx.Rngs(3))
    model.eval()
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    session = onnxruntime.InferenceSession(float_onnx.model_of(model).SerializeToString())
    (got,) = session.run(None, {"x": x.transpose(0, 3, 1, 2)})
    # floats: two orders of summation
    assert np.abs(got - np.asarray(scores(model, x))).max() < 1e-5


@pytest.mark.sampled(1)
def test_a_code_that_differs_is_counted_where_it_is(network):
    """The second runtime has one wrong code in the last image and ten in the first random input."""

    def right(graph, folder, batch):
        return shipping.Loaded(lambda batches: [np.asarray(graph.run(codes)) for codes in batches], None, 7)

    def wrong(graph, folder, batch):
        def outputs(batches):
            found = np.concatenate([np.asarray(graph.run(codes)) for codes in batches])
            found[4, 3] += 1
            found[5] = ~found[5]
            return [found]

        return shipping.Loaded(outputs, None, 8)

    ways = [shipping.Way("a", "b", "tflite_micro", load, batches=(2,)) for load in (right, wrong)]
    settings = artifacts.Settings(seconds=0.0, examples=5)
    section = artifacts.section_of(network, digits(), settings, ways)
    assert [row.differ for row in section.rows] == [(0, 0), (1, 10)]
    assert [row.compared for row in section.rows] == [(50, 50)] * 2
    assert section.differ == 11
    text = artifacts.text_of([section])
    assert "| a        | b       |        1 of 50 |       10 of 50 |     8 |" in text


def test_the_text_for_a_page_names_who_answered(network):
    text = artifacts.page_text([artifacts.Section(network, [], 12345, (0.5, 0.25))])
    assert text.startswith("MLP: 50.0% of the test images in float32, 25.0% as integers.")
    assert "12,345 bytes" in text
    assert "onnxruntime" in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_artifact_of_a_small_network(network, monkeypatch, tmp_path):
    """All formats and runtimes that are installed, with times for one of them."""
    made = [way for way in shipping.ways() if not way.needs]
    assert {way.artifact for way in made} >= {"tflite", "onnx, integer", "stablehlo", "c"}
    monkeypatch.setattr(artifacts, "trained", lambda *_, **__: [network])
    once = [dataclasses.replace(way, batches=way.batches[-1:], timed=way.runtime == "gcc -O3") for way in made]
    monkeypatch.setattr(artifacts, "ways", lambda: once)
    monkeypatch.setattr(program, "Console", lambda **_: Console(file=io.StringIO()))
    quick = dataclasses.replace(artifacts.QUICK, examples=8)
    monkeypatch.setattr(artifacts, "QUICK", quick)
    assert program.main(["artifacts", "--quick", "--seconds", "0.01", "--out", str(tmp_path)]) == 0
    (section,) = json.loads((tmp_path / "results.json").read_text())["artifacts"]["sections"]
    assert len(section["rows"]) == len(made)
    for row in section["rows"]:
        assert row["differ"] in (None, {"digits": 0, "random": 0})
        assert row["bytes"] > 1000
        assert bool(row["times"]) == (row["runtime"] == "gcc -O3")
    assert [row["arena_bytes"] for row in section["rows"] if row["runtime"] == "gcc -O3"] == [32 * 12]
