"""Streaming models: variables as inputs and outputs, call after call beside LiteRT, which keeps them itself."""

import numpy as np
import pytest

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid, schema
from tests.export.emit.c_build import Compiled
from tests.export.emit.tflite_runtimes import MODES, RESOLVERS

GRID, OUT = Grid(0.1, -20), Grid(0.9, 5)
SIZE, NEW = 6, 2


def streaming(first: object = 0, grid: Grid = GRID, twice: bool = False, once: bool = True) -> bytes:
    """Appends two codes to six kept ones, keeps the last six, and multiplies all eight by a matrix.

    first: the codes that the variable begins with. twice: a second read, behind the write, is added to the output.
    """
    file, rng = File(), np.random.default_rng(0)
    x = file.tensor("int8", (1, NEW), GRID)
    handle, old = file.tensor("resource", ()), file.tensor("int8", (1, SIZE), GRID)
    if once:
        file.operator("CALL_ONCE", [], [], "CallOnce", initSubgraphIndex=1)
    file.operator("VAR_HANDLE", [], [handle], "VarHandle", sharedName="kept")
    file.operator("READ_VARIABLE", [handle], [old], "ReadVariable")
    joined = file.tensor("int8", (1, SIZE + NEW), GRID)
    file.operator("CONCATENATION", [old, x], [joined], "Concatenation", axis=1)
    kept = file.tensor("int8", (1, SIZE), grid)
    box = [file.numbers(n) for n in ([0, NEW], [1, SIZE + NEW], [1, 1])]
    file.operator("STRIDED_SLICE", [joined, *box], [kept], "StridedSlice")
    file.operator("ASSIGN_VARIABLE", [handle, kept], [], "AssignVariable")
    weights = file.tensor("int8", (5, SIZE + NEW), Grid(0.02), rng.integers(-127, 128, (5, SIZE + NEW)).astype(np.int8))
    y = file.tensor("int8", (1, 5), OUT)
    file.operator("FULLY_CONNECTED", [joined, weights, -1], [y], "FullyConnected")
    outputs = [y]
    if twice:
        again, z = file.tensor("int8", (1, SIZE), GRID), file.tensor("int8", (1, SIZE), Grid(0.2))
        file.operator("READ_VARIABLE", [handle], [again], "ReadVariable")
        file.operator("ADD", [old, again], [z], "Add")
        outputs = [y, z]
    begin = File()
    begin.model, begin.graph = file.model, schema.SubGraphT()
    begin.graph.tensors, begin.graph.operators, begin.graph.inputs, begin.graph.outputs = [], [], [], []
    handle = begin.tensor("resource", (), name="handle")
    value = begin.tensor("int8", (1, SIZE), GRID, np.broadcast_to(np.asarray(first, np.int8), (1, SIZE)).copy())
    begin.operator("VAR_HANDLE", [], [handle], "VarHandle", sharedName="kept")
    begin.operator("ASSIGN_VARIABLE", [handle, value], [], "AssignVariable")
    file.model.subgraphs = [file.graph, begin.graph] if once else [file.graph]
    return file.to_bytes([x], outputs)


def litert(data: bytes, mode: str):
    """One interpreter, which keeps its variables: called with codes, it gives all outputs."""
    module = __import__("ai_edge_litert.interpreter", fromlist=["Interpreter"])
    resolver = getattr(module.OpResolverType, RESOLVERS[mode])
    runtime = module.Interpreter(model_content=data, experimental_op_resolver_type=resolver, num_threads=1)
    runtime.allocate_tensors()

    def run(x: np.ndarray) -> list[np.ndarray]:
        runtime.set_tensor(runtime.get_input_details()[0]["index"], x)
        runtime.invoke()
        return [runtime.get_tensor(details["index"]) for details in runtime.get_output_details()]

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("twice", [False, True])
def test_call_after_call_is_litert(target, twice):
    data = streaming(first=-20, twice=twice)
    graph, run = reader.read(data, target=target), litert(data, MODES[target])
    (row,) = graph.metadata["states"]
    assert graph.inputs == ("t0", row["input"])
    assert graph.outputs[-1] == row["output"]
    assert row["input"] == "kept"
    assert row["first"] == -20
    interpreter, rng = Interpreter(graph), np.random.default_rng(1)
    state, compared = np.full((1, SIZE), row["first"], np.int8), 0
    for _ in range(200):
        x = rng.integers(-128, 128, (1, NEW)).astype(np.int8)
        *found, state = interpreter(x, state)
        wanted = run(x)
        for y, want in zip(found, wanted, strict=True):
            assert np.array_equal(np.asarray(y), want)
            compared += want.size
    assert compared >= 1000


@pytest.mark.exhaustive
def test_the_graph_is_saved_converted_to_c_and_called_with_its_state(tmp_path):
    (tmp_path / "m.tflite").write_bytes(streaming())
    graph = qjax.read(tmp_path / "m.tflite", "tflite_reference")
    graph.save(tmp_path / "m.qjax")
    assert qjax.load(tmp_path / "m.qjax").ir.metadata["states"] == graph.ir.metadata["states"]
    rng = np.random.default_rng(2)
    codes = [rng.integers(-128, 128, (3, size)).astype(np.int8) for size in (NEW, SIZE)]
    compiled = Compiled({"streaming": (graph.ir, codes)}, tmp_path, batch=3)
    compiled.assert_equal(compiled.called())
    _, state = graph.run(*codes)
    assert np.array_equal(state, np.concatenate([codes[1], codes[0]], 1)[:, NEW:])
    other = graph.retarget("nearest_even")
    assert np.array_equal(other.run(*codes)[1], state)


def test_a_part_has_the_state_as_input_only():
    graph = reader.read(streaming(), target="tflite_reference", outputs=["t3"])
    assert graph.inputs == ("t0", "kept")
    assert graph.outputs == ("t3",)
    assert "states" not in graph.metadata


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"first": [0, 0, 1, 0, 0, 0]}, "the initial value of 'kept' has several codes"),
        ({"grid": Grid(0.1, -19)}, "or has another scale, elsewhere"),
        ({"once": False}, "no CALL_ONCE sets the initial value of the variable 'kept'"),
    ],
)
def test_variables_that_are_refused(given, why):
    with pytest.raises(ReadError, match=why):
        reader.read(streaming(**given), target="tflite_reference")
