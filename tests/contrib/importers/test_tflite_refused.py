"""Models that real tools write and qjax cannot read: the message says what they hold and what to do."""

import numpy as np
import pytest

from qjax.contrib.importers import read_graph as read_file
from qjax.contrib.importers import tflite as reader
from qjax.contrib.importers.tflite import walk
from qjax.export.read_errors import ReadError, reading
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid, schema
from tests.export.emit.tflite_runtimes import MODES, litert


def refused(file: File, inputs, outputs) -> str:
    with pytest.raises(ReadError) as caught:
        reader.read(file.to_bytes(inputs, outputs))
    return str(caught.value)


def test_codes_of_int32():
    """QUANTIZE of int32, as streaming audio models have it between their accumulators and int16."""
    file = File()
    x, y = file.tensor("int32", (1, 4), Grid(2.0**-22)), file.tensor("int16", (1, 4), Grid(2.0**-10))
    file.operator("QUANTIZE", [x], [y])
    text = refused(file, [x], [y])
    assert "operator 0 QUANTIZE ('t1'): it makes codes of int32" in text
    assert "codes are int8, uint8, int16" in text


@pytest.mark.parametrize("name", ["ADD", "MUL", "DEQUANTIZE", "LOGISTIC", "SOFTMAX", "AVERAGE_POOL_2D", "RELU", "MEAN"])
def test_operators_that_need_scales_refuse_whole_numbers(name):
    file = File()
    x = file.tensor("int32", (1, 2, 2, 1))
    y = file.tensor("int8", (1, 2, 2, 1), Grid(0.1))
    options = {"ADD": "Add", "MUL": "Mul", "SOFTMAX": "Softmax", "AVERAGE_POOL_2D": "Pool2D", "MEAN": "Reducer"}
    other = [file.numbers([1])] if name == "MEAN" else [x] if name in ("ADD", "MUL") else []
    file.operator(name, [x, *other], [y], options.get(name, ""))
    assert "its operand 't0' is whole numbers (int32), where codes are expected" in refused(file, [x], [y])


def test_what_stands_behind_an_obstacle_is_read_with_its_own_scale():
    """A sum that qjax cannot read, then a sum of its codes, then another obstacle: two lines, no invented scale."""
    file = File()
    x, a, b, c = (file.tensor("int8", (1, 4, 4, 2), Grid(0.1 + 0.1 * i, 3 + i)) for i in range(4))
    file.operator("CUMSUM", [x, file.numbers(1)], [a], "Cumsum")
    file.operator("ADD", [x, a], [b], "Add")
    file.operator(
        "CONCATENATION", [a, b], [d := file.tensor("int8", (1, 4, 4, 4), Grid(0.2, 4))], "Concatenation", axis=3
    )
    file.operator("RELU", [b], [c])
    text = refused(file, [x], [d, c])
    assert "operator 0 CUMSUM" in text
    # the sum is read; only the concatenation of two scales is not
    assert text.startswith("2 parts of the model")
    assert "operator 2 CONCATENATION" in text
    assert "(0.2, 4)" in text
    assert "(0.3, 5)" in text
    assert "(1, 0)" not in text


def test_a_matrix_with_several_scales():
    """LiteRT 2.3.0 takes such a BATCH_MATMUL, and its codes are zeros."""
    file, rng = File(), np.random.default_rng(0)
    x, y = (
        file.tensor("int16", (4, 6), Grid(2.0**-15), name="x"),
        file.tensor("int16", (4, 3), Grid(2.0**-16), name="y"),
    )
    codes = rng.integers(-127, 128, (6, 3)).astype(np.int8)
    w = file.tensor("int8", (6, 3), Grid(np.asarray([0.01, 0.02, 0.03]), 0, 1), codes, name="w")
    file.operator("BATCH_MATMUL", [x, w], [y], "BatchMatMul")
    given = rng.integers(-(2**15), 2**15, (4, 6)).astype(np.int16)
    for mode in MODES.values():
        assert not litert(file.to_bytes([x], [y]), mode, [given])["y"].any()
    text = refused(file, [x], [y])
    assert "'w' has 3 scales, where its kernels in LiteRT read one scale and make zeros" in text
    assert "use FULLY_CONNECTED" in text


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_of_unequal_ranks(axis):
    file, grid = File(), Grid(0.1)
    x, y, z = file.tensor("int8", (2, 3), grid), file.tensor("int8", (2,), grid), file.tensor("int8", (2, 4), grid)
    file.operator("CONCATENATION", [x, y], [z], "Concatenation", axis=axis)
    assert "codes of shape (2, 3) and (2,)" in refused(file, [x, y], [z])


@pytest.mark.parametrize(
    ("custom", "what"), [(b"ethos-u", "Arm's Ethos-U, which Vela compiled"), (b"edgetpu-custom-op", "Edge TPU")]
)
def test_programs_of_devices(custom, what):
    """Vela's operator reads its working memory, which nothing computes."""
    file, grid = File(), Grid(0.1)
    x, memory, y = (file.tensor("int8", (1, 4), grid) for _ in range(3))
    file.operator("CUSTOM", [x, memory], [y])
    file.model.operatorCodes[0].customCode = custom
    text = refused(file, [x], [y])
    assert what in text
    assert "Read the .tflite file that" in text
    assert "damaged" not in text


@pytest.mark.parametrize("scale", [1.4e-45, 1.1e-38])
def test_subnormal_scales(scale):
    file = File()
    x, y = (file.tensor("int8", (1, 4), Grid(np.float32(scale))) for _ in range(2))
    file.operator("RELU", [x], [y])
    assert "at least 1.2e-38" in refused(file, [x], [y])


def test_what_no_check_foresees_is_a_read_error(tmp_path, monkeypatch):
    """The operator has its name in the message, and the cause stays chained."""

    def handler(_walk, operator):
        raise KeyError(operator.name)

    monkeypatch.setitem(walk.READERS, "RELU", walk.Reader(handler))
    file = File()
    x, y = (file.tensor("int8", (1, 4), Grid(0.1)) for _ in range(2))
    file.operator("RELU", [x], [y])
    path = tmp_path / "m.tflite"
    path.write_bytes(file.to_bytes([x], [y]))
    with pytest.raises(
        ReadError, match=r"m\.tflite: operator 0 RELU: qjax expected something else .*KeyError"
    ) as caught:
        read_file(path)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, AssertionError, RecursionError, MemoryError])
def test_whatever_goes_wrong(error):
    with pytest.raises(ReadError, match="the part: qjax expected something else"), reading("the part"):
        raise error("x")


def clamp_beside(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A model of one RELU, and an input that nothing reads."""
    file = File()
    idle = file.tensor(dtype, shape, Grid(0.1) if dtype == "int8" else None, name="idle")
    x, y = (file.tensor("int8", (1, 4), Grid(0.1), name=name) for name in "xy")
    file.operator("RELU", [x], [y])
    return file.to_bytes([idle, x], [y])


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_an_input_that_nothing_reads_stays(dtype):
    """A caller gives a value to every input of the file, in order."""
    graph = reader.read(clamp_beside(dtype, (1, 3)))
    assert graph.inputs == ("idle", "x")
    assert graph.tensors["idle"].shape == (None, 3)
    (found,) = Interpreter(graph)(np.zeros((2, 3), dtype), np.asarray([[-5, 1, 0, 7]] * 2, np.int8))
    assert np.array_equal(found, [[0, 1, 0, 7]] * 2)
    assert reader.read(clamp_beside(dtype, (5, 3))).tensors["idle"].shape == (5, 3)
    assert reader.read(clamp_beside(dtype, (1, 3)), outputs=["y"]).inputs == ("x",)


@pytest.mark.parametrize("dtype", ["float32", "int64", "string"])
def test_an_input_that_nothing_reads_of_another_type(dtype):
    data = clamp_beside(dtype, (1, 3))
    with pytest.raises(ReadError, match=rf"input 'idle': nothing reads it, and it is {dtype}. .*outputs=\[...\]"):
        reader.read(data)
    assert reader.read(data, outputs=["y"]).inputs == ("x",)


def test_without_outputs():
    file = File()
    x, y = (file.tensor("int8", (1, 4), Grid(0.1), name=name) for name in "xy")
    file.operator("RELU", [x], [y])
    data = file.to_bytes([x], [])
    with pytest.raises(ReadError, match=r"the model has no outputs. Name the tensors to compute"):
        reader.read(data)
    assert len(reader.read(data, outputs=["y"]).nodes) == 1


def signed(names: dict[str, int]) -> bytes:
    """A file of two subgraphs, RELU of four codes and RELU6 of five, with these signatures."""
    import flatbuffers

    file, second = File(), File()
    second.model.operatorCodes, second.model.buffers = file.model.operatorCodes, file.model.buffers
    for one, operator, size in ((file, "RELU", 4), (second, "RELU6", 5)):
        x, y = (one.tensor("int8", (1, size), Grid(0.01), name=f"{operator} {end}") for end in "xy")
        one.operator(operator, [x], [y])
        one.graph.inputs, one.graph.outputs = [x], [y]
    file.model.subgraphs.append(second.graph)
    file.model.signatureDefs = []
    for name, index in names.items():
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = name, index
        file.model.signatureDefs.append(signature)
    builder = flatbuffers.Builder(1024)
    builder.Finish(file.model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def test_signatures():
    data = signed({"encode": 0, "decode": 1})
    with pytest.raises(ReadError, match=r"the signatures 'encode', 'decode'. Choose the one to read.*signature=..."):
        reader.read(data)
    assert reader.read(data, signature="encode").inputs == ("RELU x",)
    assert reader.read(data, signature="decode").inputs == ("RELU6 x",)
    with pytest.raises(ReadError, match="no signature 'train'; its signatures are 'encode', 'decode'"):
        reader.read(data, signature="train")
    with pytest.raises(ReadError, match="signature 'far' of subgraph 7 of 2"):
        reader.read(signed({"far": 7}), signature="far")
    with pytest.raises(ReadError, match=r"2 subgraphs. Leave control flow"):
        reader.read(signed({"encode": 0}))
