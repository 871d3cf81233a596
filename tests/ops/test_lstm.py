"""Steps of an LSTM beside LiteRT and TFLite Micro, call after call; the method of other targets beside floats."""

import importlib
from typing import Any

import numpy as np
import pytest

import qjax
from qjax import targets
from qjax.assign.overflow import bounds
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.onnx import to_model
from qjax.export.emit.stablehlo import to_bytes as to_stablehlo
from qjax.export.emit.tflite import to_bytes
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.numerics.lstm import LSTM_METHODS, exact_table, gemmlowp_table
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit import c_build
from tests.export.emit.onnx_runs import by_onnxruntime, differing
from tests.export.emit.tflite_runtimes import MODES, RESOLVERS

CALLS = 4
PLACES = 24


def model(seed: int = 0, *, steps: int = 3, cell_bits: int = 12, width: float = 0.02, **chosen: Any) -> bytes:
    """An LSTM of 7 inputs and 6 units. width: of the weights' scales, by which gates reach the ends of int16."""
    rng, file, units, into = np.random.default_rng(seed), File(), 6, 7
    batch = chosen.pop("batch", 1)
    changes: dict[int, int] = chosen.pop("changes", {})
    hidden: Grid = chosen.pop("hidden", Grid(0.0078, -2))
    x_grid, out = Grid(0.05, -11), Grid(0.0078, -2)
    major = chosen.get("timeMajor", False)
    shape = (steps, batch, into) if major else (batch, steps, into)
    x = file.tensor("int8", shape, x_grid, name="x")
    operands = [-1] * PLACES
    operands[0] = x
    for gate in range(4):
        for first, depth in ((1, into), (5, units)):
            codes = rng.integers(-127, 128, (units, depth)).astype(np.int8)
            operands[first + gate] = file.tensor("int8", (units, depth), Grid(width * rng.uniform(0.5, 1.5)), codes)
        bias = rng.integers(-3000, 3000, units).astype(np.int32)
        operands[12 + gate] = file.tensor("int32", (units,), Grid(1.0), bias)
    operands[18] = file.tensor("int8", (batch, units), out, name="h", isVariable=True)
    operands[19] = file.tensor("int16", (batch, units), Grid(2.0**-cell_bits), name="c", isVariable=True)
    for place, tensor in changes.items():
        operands[place] = tensor
    inner = [file.tensor("int16", (0,), Grid(2.0**-12)) for _ in range(4)] + [file.tensor("int8", (0,), hidden)]
    y = file.tensor("int8", (*shape[:2], units), out, name="y")
    fields = {"fusedActivationFunction": 4, **chosen}
    name = "UNIDIRECTIONAL_SEQUENCE_LSTM"
    file.operator(name, operands, [y], "UnidirectionalSequenceLSTM", intermediates=inner, **fields)
    return file.to_bytes([x], [y])


def inputs_for(graph: Graph) -> list[np.ndarray]:
    shape = [size or 1 for size in graph.tensors["x"].shape]
    return [np.random.default_rng(call).integers(-128, 128, shape).astype(np.int8) for call in range(CALLS)]


def by_graph(graph: Graph) -> list[np.ndarray]:
    """The outputs of several calls, the states of one going into the next."""
    interpreter, found = Interpreter(graph), []
    states = graph.metadata["states"]
    held = [
        np.full([size or 1 for size in graph.tensors[s["input"]].shape], s["first"], graph.tensors[s["input"]].dtype)
        for s in states
    ]
    for x in inputs_for(graph):
        y, *held = interpreter(x, *held)
        found.append(np.asarray(y))
    return found


def by_runtime(data: bytes, target: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    found = []
    if target == "tflite_micro":
        interpreter = importlib.import_module("tflite_micro").runtime.Interpreter.from_bytes(data, arena_size=1 << 20)
        for x in arrays:
            interpreter.set_input(x, 0)
            interpreter.invoke()
            found.append(np.array(interpreter.get_output(0)))
        return found
    module = importlib.import_module("ai_edge_litert.interpreter")
    resolver = getattr(module.OpResolverType, RESOLVERS[MODES[target]])
    interpreter = module.Interpreter(model_content=data, experimental_op_resolver_type=resolver, num_threads=1)
    interpreter.allocate_tensors()
    for x in arrays:
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        found.append(np.array(interpreter.get_tensor(interpreter.get_output_details()[0]["index"])))
    return found


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"width": 0.3},  # gates at the ends, where the runtimes clamp in another order
    {"cell_bits": 9, "width": 0.1},
    {"cell_bits": 15},
    {"cell_bits": 11, "cellClip": 1.7, "width": 0.1},
    {"timeMajor": True, "batch": 2},
    {"steps": 1, "width": 0.05},
)


@pytest.mark.parametrize("target", ["tflite_micro", *MODES])
@pytest.mark.sampled(1)
def test_every_runtime_has_the_codes(target):
    seen = set()
    for seed, variant in enumerate(VARIANTS):
        data = model(seed, **variant)
        graph = reader.read(data, target=target)
        found = by_graph(graph)
        for ours, theirs in zip(found, by_runtime(data, target, inputs_for(graph)), strict=True):
            assert np.array_equal(ours, theirs), variant
            seen |= set(ours.ravel().tolist())
    assert len(seen) > 100


def test_the_two_runtimes_differ():
    """Else the order in which they clamp would not be tested."""
    data = model(1, width=0.3)
    one, other = (by_graph(reader.read(data, target=target)) for target in ("tflite_reference", "tflite_micro"))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_other_targets_are_near_to_floats():
    """A float LSTM of the same numbers; 0.0078 is a code."""
    graph = reader.read(model(2, steps=1, width=0.01), target="nearest_even")
    found, (cell, hidden) = by_graph(graph), (node for node in graph.nodes if node.op.startswith("lstm"))
    quantized = reader.read(model(2, steps=1, width=0.01), target="tflite_reference")
    gates: Any = {}
    x_scale, h_scale = 0.05, 0.0078
    for node in (cell, hidden):
        held = {role: graph.constant(node, role) for role in ("kernel", "recurrent", "bias")}
        gates[node.op] = held
    assert {role for node in quantized.nodes for role in node.constants} >= {"logistic", "tanh"}
    scales = _scales(2, 0.01)
    h, c = np.zeros((1, 6)), np.zeros((1, 6))
    for x, ours in zip(inputs_for(graph), found, strict=True):
        real = x[:, 0].astype(np.float64) + 11
        numbers = []
        for gate in range(4):
            held = gates["lstm_hidden" if gate == 3 else "lstm_cell"]
            part = slice(0, 6) if gate == 3 else slice(6 * gate, 6 * gate + 6)
            kernel, recurrent = held["kernel"][:, part] * scales[gate][0], held["recurrent"][:, part] * scales[gate][1]
            bias = held["bias"][part] * scales[gate][0] * x_scale
            numbers.append(np.matmul(real * x_scale, kernel) + np.matmul(h, recurrent) + bias)
        i, f, o = (1 / (1 + np.exp(-np.clip(numbers[gate], -8, 8))) for gate in (0, 1, 3))
        c = f * c + i * np.tanh(np.clip(numbers[2], -8, 8))
        h = np.clip(o * np.tanh(c), -126 * h_scale, 129 * h_scale)
        assert np.abs((ours[:, 0].astype(np.float64) + 2) * h_scale - h).max() < 1.5 * h_scale


def _scales(seed: int, width: float) -> list[list[float]]:
    """The scales of `model`'s weights, drawn as there."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(4):
        pair = []
        for depth in (7, 6):
            rng.integers(-127, 128, (6, depth))
            pair.append(float(np.float32(width * rng.uniform(0.5, 1.5))))
        rng.integers(-3000, 3000, 6)
        found.append(pair)
    return found


@pytest.mark.parametrize("bits", range(9, 16))
def test_tables_are_near_to_the_functions(bits):
    x = np.arange(-(2**15), 2**15) * 2.0**-bits
    for function, real in (("logistic", 1 / (1 + np.exp(-x))), ("tanh", np.tanh(x))):
        expected = np.clip(np.rint(real * 2**15), -(2**15), 2**15 - 1)
        assert np.array_equal(exact_table(function, bits), expected)
        assert np.abs(gemmlowp_table(function, bits).astype(np.int64) - expected).max() <= 24


def test_c_onnx_and_stablehlo(tmp_path):
    named = {}
    for target in ("tflite_micro", "tflite_reference", "nearest_even"):
        graph = reader.read(model(3, width=0.1), target=target)
        rng = np.random.default_rng(0)
        states = [rng.integers(-128, 128, (1, 6)).astype(np.int8), rng.integers(-9999, 9999, (1, 6)).astype(np.int16)]
        inputs = [inputs_for(graph)[0], *states]
        named[target] = graph, inputs
        expected = [np.asarray(y) for y in Interpreter(graph)(*inputs)]
        feeds = dict(zip(graph.inputs, inputs, strict=True))
        for _, found in by_onnxruntime(to_model(graph, style="integer", batch=1), feeds):
            assert differing(found, expected) == 0
        assert to_stablehlo(graph, batch=1)
        with pytest.raises(ValueError, match=r"lstm|LSTM|target"):
            to_bytes(graph)
    compiled = c_build.Compiled(named, tmp_path)
    compiled.assert_equal(compiled.called("-O0"))


@pytest.mark.exhaustive
def test_retarget_and_artifact(tmp_path):
    graph = qjax.read(_saved(tmp_path, model(4)), "tflite_micro")
    graph.save(tmp_path / "model.qjax")
    again = qjax.load(tmp_path / "model.qjax")
    for a, b in zip(by_graph(again.ir), by_graph(graph.ir), strict=True):
        assert np.array_equal(a, b)
    other = again.retarget("tflite_xnnpack")
    for a, b in zip(by_graph(other.ir), by_graph(reader.read(model(4), target="tflite_xnnpack")), strict=True):
        assert np.array_equal(a, b)
    bare = qjax.read(tmp_path / "model.tflite", "tflite_reference")
    with pytest.raises(ValueError, match=r"needs the runtime's own tables.*Read the file again"):
        bare.retarget("tflite_micro")
    assert {target.lstm for target in map(targets.get, targets.names())} == {None, *LSTM_METHODS}


def _saved(folder: Any, data: bytes) -> Any:
    (folder / "model.tflite").write_bytes(data)
    return folder / "model.tflite"


def test_what_is_no_plain_lstm_is_refused():
    def refused(match: str, target: str = "tflite_reference", **chosen: Any) -> None:
        with pytest.raises((ReadError, ValueError), match=match):
            reader.read(model(**chosen), target=target)

    refused("an LSTM with peephole", changes={9: 3})
    refused("an LSTM with a projection", changes={16: 3})
    refused("an LSTM with layer normalization", changes={20: 3})
    refused("whose input and forget gates are coupled", changes={1: -1})
    refused("whose activation is not TANH", fusedActivationFunction=1)
    refused("diagonal recurrent weights", diagonalRecurrentTensors=True)
    refused("its hidden state has the scale 0.5", hidden=Grid(0.5, -2))
    refused(r"a cell of scale 2\^-8", cell_bits=8)
    refused("a kernel of its own under 'tflite_xnnpack_arm'", "tflite_xnnpack_arm")
    refused("a kernel of its own under 'cmsis_nn'", "cmsis_nn")


def test_accumulators_are_bounded():
    graph = reader.read(model(5))
    for node in graph.nodes:
        if node.op.startswith("lstm"):
            low, high = bounds(graph, node) or (0, 0)
            kernel = np.abs(np.asarray(graph.constant(node, "kernel"), np.int64))
            assert -(kernel.sum(0).max() * 138 + 3000) <= low < 0 < high <= kernel.sum(0).max() * 138 + 3000
