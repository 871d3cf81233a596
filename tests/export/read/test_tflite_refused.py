"""Models that real tools write and qjax cannot read: the message says what they hold and what to do."""

import numpy as np
import pytest

from qjax.export.read import read as read_file
from qjax.export.read import tflite as reader
from qjax.export.read.errors import ReadError, reading
from qjax.export.read.tflite import walk
from tests.export.emit.tflite_runtimes import MODES, litert
from tests.export.read.tflite_models import File, Grid


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
