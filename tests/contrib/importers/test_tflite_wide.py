"""Results of more bits than their operands: SOFTMAX of int8 that makes int16, and QUANTIZE that makes int32."""

import numpy as np
import pytest

from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit.tflite_runtimes import litert, micro

UNIT = Grid(2.0**-16, -(2**15))
RUNTIMES = ("tflite_reference", "tflite_micro")


def softmax(scale: float, shape: tuple[int, ...], out: Grid = UNIT) -> bytes:
    file = File()
    x, y = file.tensor("int8", shape, Grid(scale, 3)), file.tensor("int16", shape, out)
    file.operator("SOFTMAX", [x], [y], "Softmax", beta=1.0)
    return file.to_bytes([x], [y])


def run(data: bytes, graph: Graph, x: np.ndarray) -> np.ndarray:
    """What the runtime of the graph's target computes."""
    found = micro(data, [x], graph.outputs) if graph.target == "tflite_micro" else litert(data, "reference", [x])
    return found[graph.outputs[0]]


@pytest.mark.parametrize("target", RUNTIMES)
@pytest.mark.parametrize("scale", [0.0112, 0.07, 0.31, 2.7, 16.0, 40.0])
@pytest.mark.sampled(1)
def test_softmax_of_int16(scale, target):
    rng = np.random.default_rng(0)
    for shape in ((40, 2), (5, 3, 37), (3, 700)):
        data = softmax(scale, shape)
        graph = reader.read(data, target=target)
        assert graph.nodes[0].attributes["method"] == "gemmlowp_int16"
        x = rng.integers(-128, 128, shape) // rng.choice([1, 4, 32], (*shape[:-1], 1))
        (found,) = Interpreter(graph)(x.astype(np.int8))
        assert np.array_equal(np.asarray(found), run(data, graph, x.astype(np.int8)))


@pytest.mark.parametrize("target", RUNTIMES)
@pytest.mark.parametrize("scale", [2.0**-15, 2.0**-16, 1.234e-3])
def test_codes_of_int32(scale, target):
    """The last operator of keyword models: a softmax of int16 as int32, whose scale may round."""
    file = File()
    x, y = file.tensor("int8", (9, 4), Grid(0.1)), file.tensor("int16", (9, 4), Grid(1.5259022e-05, -(2**15)))
    z = file.tensor("int32", (9, 4), Grid(scale))
    file.operator("SOFTMAX", [x], [y], "Softmax", beta=1.0)
    file.operator("QUANTIZE", [y], [z], "Quantize")
    data = file.to_bytes([x], [z])
    graph = reader.read(data, target=target)
    codes = np.random.default_rng(1).integers(-128, 128, (9, 4)).astype(np.int8)
    (found,) = Interpreter(graph)(codes)
    assert np.asarray(found).dtype == np.int32
    assert np.array_equal(np.asarray(found), run(data, graph, codes))


def test_another_grid_or_runtime():
    for out in (Grid(2.0**-15, -(2**15)), Grid(2.0**-16, -1)):
        with pytest.raises(ReadError):
            reader.read(softmax(0.1, (2, 5), out))
    with pytest.raises(ReadError, match="qjax has the bits of 'tflite_xnnpack'"):
        reader.read(softmax(0.1, (2, 5)), target="tflite_xnnpack")


def test_other_operators_on_its_codes():
    """The kernels of int16 read codes with the zero point 0."""
    file = File()
    x, y, z = (
        file.tensor("int8", (2, 5), Grid(0.1)),
        file.tensor("int16", (2, 5), UNIT),
        file.tensor("int16", (2, 5), UNIT),
    )
    file.operator("SOFTMAX", [x], [y], "Softmax", beta=1.0)
    file.operator("MUL", [y, y], [z], "Mul")
    with pytest.raises(ReadError, match="int16 with the zero point 0"):
        reader.read(file.to_bytes([x], [z]))


def test_int32_inside_of_a_model():
    file = File()
    x, y = file.tensor("int8", (2, 5), Grid(0.1)), file.tensor("int32", (2, 5), Grid(0.01))
    z = file.tensor("int16", (2, 5), Grid(0.1))
    file.operator("QUANTIZE", [x], [y], "Quantize")
    file.operator("QUANTIZE", [y], [z], "Quantize")
    with pytest.raises(ReadError, match="qjax reads int32 with a scale as the model's output only"):
        reader.read(file.to_bytes([x], [z]))
