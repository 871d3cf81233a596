"""SVDF beside LiteRT and TFLite Micro, call after call, and beside integers of Python for the other targets."""

from typing import Any

import numpy as np
import pytest

from qjax.assign.overflow import bounds
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.onnx import to_model
from qjax.export.emit.stablehlo import to_bytes as to_stablehlo
from qjax.export.read_errors import ReadError
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit import c_build
from tests.export.emit.onnx_runs import by_onnxruntime, differing
from tests.export.emit.tflite_runtimes import MODES
from tests.ops.test_lstm import by_graph, by_runtime, inputs_for


def model(
    seed: int = 0, *, state: str = "int16", rank: int = 2, memory: int = 5, wide: bool = False, **chosen: Any
) -> bytes:
    """Two SVDFs, one behind the other. wide: features and sums that reach beyond what their types hold."""
    rng, file, batch, units = np.random.default_rng(seed), File(), chosen.pop("batch", 1), 6
    x_grid = Grid(0.05, -11)
    x = file.tensor("int8", (batch, 9), x_grid, name="x")
    last, depth = x, 9
    for index in range(2):
        filters = units * rank
        half = np.iinfo(state).max
        state_grid = Grid(0.01 if wide else 8.0 / half, 0 if state == "int16" else -20)
        feature = file.tensor(
            "int8", (filters, depth), Grid(0.01), rng.integers(-127, 128, (filters, depth)).astype("int8")
        )
        codes = rng.integers(-half, half + 1, (filters, memory)).astype(state)
        time = file.tensor(state, codes.shape, Grid(1.0 / half), codes)
        steps = np.float32(state_grid.scale) * np.float32(1.0 / half)
        bias = file.tensor("int32", (units,), Grid(steps), rng.integers(-1000, 1000, units).astype(np.int32))
        held = file.tensor(state, (batch, filters * memory), state_grid, name=f"state{index}", isVariable=True)
        out = Grid(0.04 if not wide else 3e-4 if state == "int16" else 0.04, -128 + 50 * index)
        y = file.tensor("int8", (batch, units), out, name="y" if index else "middle")
        fields = {"rank": rank, "fusedActivationFunction": 1, **chosen}
        file.operator("SVDF", [last, feature, time, bias, held], [y], "SVDF", **fields)
        last, depth = y, units
    return file.to_bytes([x], [last])


VARIANTS: tuple[dict[str, Any], ...] = ({}, {"rank": 1, "memory": 8}, {"memory": 1}, {"wide": True}, {"batch": 2})


@pytest.mark.parametrize(
    ("target", "state"), [*((target, "int16") for target in MODES), ("tflite_micro", "int16"), ("tflite_micro", "int8")]
)
@pytest.mark.sampled(2)
def test_every_runtime_has_the_codes(target, state):
    seen = set()
    for seed, variant in enumerate(VARIANTS):
        data = model(seed, state=state, **variant)
        graph = reader.read(data, target=target)
        for ours, theirs in zip(by_graph(graph), by_runtime(data, target, inputs_for(graph)), strict=True):
            assert np.array_equal(ours, theirs), variant
            seen |= set(ours.ravel().tolist())
    assert len(seen) > 40


def test_sums_keep_32_bits():
    """Weights and states at their ends: what LiteRT's registers hold, and what qjax refuses to prove elsewhere."""
    data = model(3, wide=True, memory=8)
    graph = reader.read(data, target="tflite_reference")
    times = [node for node in graph.nodes if node.op == "svdf_time"]
    most = [np.abs(np.asarray(graph.constant(node, "kernel"), np.int64)).sum(1).max() * 2**15 for node in times]
    assert min(most) > 2**31
    assert [bounds(graph, node) for node in times] == [None, None]
    with pytest.raises(ReadError, match=r"\(svdf_time\) may reach \d+, beyond int32"):
        reader.read(data, target="nearest_even")


def test_other_targets_round_once():
    graph = reader.read(model(1, state="int8"), target="nearest_even")
    first, time = (next(node for node in graph.nodes if node.op == op) for op in ("svdf_feature", "svdf_time"))
    whole = graph.replace(outputs=(first.output, time.output))
    x = inputs_for(graph)[0]
    states = [np.full([n or 1 for n in graph.tensors[name].shape], -20, np.int8) for name in graph.inputs[1:]]
    feature, y = (np.asarray(value) for value in Interpreter(whole)(x, *states))
    kernel = np.asarray(graph.constant(first, "kernel"), np.int64)
    real = np.matmul(x.astype(np.int64) + 11, kernel) * (0.05 * 0.01 / (8 / 127))
    assert np.abs(feature - np.clip(real - 20, -128, 127)).max() <= 0.5 + 1e-6
    newest = np.zeros((1, 12, 5), np.int64)
    newest[0, :, 4] = feature[0].astype(np.int64) + 20
    held = {role: np.asarray(graph.constant(time, role), np.int64) for role in ("kernel", "bias")}
    sums = (newest.reshape(1, 6, 10) * held["kernel"]).sum(2) + held["bias"]
    assert np.abs(y - np.clip(sums * (8 / 127 / 127 / 0.04) - 128, -128, 127)).max() <= 0.5 + 1e-6


def test_c_onnx_and_stablehlo(tmp_path):
    named = {}
    for target, state in (("tflite_micro", "int8"), ("tflite_reference", "int16"), ("nearest_even", "int8")):
        graph = reader.read(model(2, state=state, memory=3, wide=state == "int16"), target=target)
        rng = np.random.default_rng(0)
        shapes = [[n or 1 for n in graph.tensors[name].shape] for name in graph.inputs[1:]]
        ends = np.iinfo(state)
        inputs = [inputs_for(graph)[0], *(rng.integers(ends.min, ends.max + 1, s).astype(state) for s in shapes)]
        named[target] = graph, inputs
        expected = [np.asarray(y) for y in Interpreter(graph)(*inputs)]
        feeds = dict(zip(graph.inputs, inputs, strict=True))
        for _, found in by_onnxruntime(to_model(graph, style="integer", batch=1), feeds):
            assert differing(found, expected) == 0
        assert to_stablehlo(graph, batch=1)
    compiled = c_build.Compiled(named, tmp_path)
    compiled.assert_equal(compiled.called("-O0"))


def test_what_is_refused():
    with pytest.raises(ReadError, match=r"SVDF with a state of int8 has a kernel of its own.*target='tflite_micro'"):
        reader.read(model(state="int8"), target="tflite_reference")
    with pytest.raises(ReadError, match="activation is not RELU"):
        reader.read(model(fusedActivationFunction=0))
    with pytest.raises((ReadError, ValueError), match="a kernel of its own under 'cmsis_nn'"):
        reader.read(model(), target="cmsis_nn")
    with pytest.raises(ReadError, match="for the rank 5"):
        reader.read(_with_rank(5))


def _with_rank(rank: int) -> bytes:
    file = File()
    x = file.tensor("int8", (1, 9), Grid(0.1))
    feature = file.tensor("int8", (6, 9), Grid(0.1), np.zeros((6, 9), np.int8))
    time = file.tensor("int16", (6, 2), Grid(0.1), np.zeros((6, 2), np.int16))
    held = file.tensor("int16", (1, 12), Grid(0.1), isVariable=True)
    y = file.tensor("int8", (1, 6), Grid(0.1))
    file.operator("SVDF", [x, feature, time, -1, held], [y], "SVDF", rank=rank, fusedActivationFunction=1)
    return file.to_bytes([x], [y])
