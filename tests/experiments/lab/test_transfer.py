"""The study of transfer: its deployments against `qjax.convert`, its counts against counting."""

import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.lab.deployments import Deployed, deploy, fingerprint, flips, judged, merged, squared
from experiments.models import MLP
from qjax.comparison.result import Difference


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).uniform(size=(12, 8, 8, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def qmodel(images: np.ndarray) -> qjax.QuantizedModel:
    recipe = qjax.Recipe(activations=qjax.QSpec(bits=8, signed=False, symmetric=False))
    qmodel = qjax.quantize(MLP((8,), rngs=nnx.Rngs(0)), recipe, images)
    qmodel.eval()
    return qmodel


def made(outputs: list[list[int]], *names: str) -> Deployed:
    return Deployed(names, np.array(outputs, np.int8), Difference(), 0.0)


@pytest.mark.exhaustive
def test_deployed_outputs_are_the_graphs(qmodel: qjax.QuantizedModel, images: np.ndarray) -> None:
    found, refused = deploy(qmodel, images, ["nearest_even", "tflite_micro", "cmsis_nn", "fpga"])
    assert list(refused) == ["fpga"]
    assert sorted(name for one in found for name in one.names) == ["cmsis_nn", "nearest_even", "tflite_micro"]
    assert found[0].hidden.count == 0
    for one in found:
        for name in one.names:
            graph = qjax.convert(qmodel, images[:4], target=name)
            assert np.array_equal(one.outputs, graph.run(graph.quantize(images)))


@pytest.mark.exhaustive
def test_a_fingerprint_is_of_the_arithmetic(qmodel: qjax.QuantizedModel, images: np.ndarray) -> None:
    micro, cmsis, even = (
        fingerprint(qjax.convert(qmodel, images[:4], target=name))
        for name in ("tflite_micro", "cmsis_nn", "nearest_even")
    )
    assert micro == cmsis != even


@pytest.mark.exhaustive
def test_a_fingerprint_of_a_graph_that_reads_ids() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    qmodel = qjax.quantize(nnx.Embed(12, 5, rngs=nnx.Rngs(0)), qjax.Recipe(), ids)
    qmodel.eval()
    first, again = (fingerprint(qjax.convert(qmodel, ids, target=name)) for name in ("cmsis_nn", "tflite_micro"))
    assert first == again


def test_counts() -> None:
    a, b = made([[1, 5], [7, 3]], "a"), made([[2, 5], [3, 3]], "b")
    assert flips(a, b) == 0.0  # the first of equal scores counts
    assert flips(a, made([[6, 5], [7, 3]], "c")) == 0.5
    assert squared(a, b) == (1 + 16) / 4
    assert [one.accuracy for one in judged([a], np.array([1, 1]))] == [0.5]


def test_equal_outputs_are_one_group() -> None:
    groups = merged([made([[1, 2]], "a"), made([[1, 3]], "b"), made([[1, 2]], "c", "d")])
    assert [one.names for one in groups] == [("a", "c", "d"), ("b",)]
