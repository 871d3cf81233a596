"""PRELU and LOG_SOFTMAX of codes: LiteRT and TFLite Micro give the graph's codes."""

import numpy as np
import pytest

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.numerics.gemmlowp_log_softmax import log_softmax, prepare_log
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import RANGES, File, Grid
from tests.export.emit.tflite_runtimes import MODES, litert, micro

UNIT = Grid(1 / 16, 127)


def living(data: bytes, target: str, x: np.ndarray) -> np.ndarray:
    (found,) = (
        micro(data, [x], ["y"]) if target == "tflite_micro" else litert(data, MODES[target], [x], every=False)
    ).values()
    return found


def prelu(dtype: str, slopes: tuple[int, ...], seed: int) -> bytes:
    """Every code of the input beside every slope."""
    rng, (low, high) = np.random.default_rng(seed), RANGES[dtype]
    x_grid, a_grid, y_grid = (
        Grid(rng.uniform(*span), int(rng.integers(low + 30, high - 30)))
        for span in ((0.01, 0.2), (0.002, 0.02), (0.01, 0.2))
    )
    file = File()
    x, y = file.tensor(dtype, (1, 256, 256), x_grid), file.tensor(dtype, (1, 256, 256), y_grid, name="y")
    every = np.arange(low, high + 1).astype(dtype).reshape(slopes)
    file.operator("PRELU", [x, file.tensor(dtype, slopes, a_grid, every)], [y])
    return file.to_bytes([x], [y])


@pytest.mark.parametrize(
    ("dtype", "target"), [*(("int8", t) for t in (*MODES, "tflite_micro")), ("uint8", "tflite_xnnpack")]
)
def test_prelu(dtype, target):
    low, high = RANGES[dtype]
    codes = np.repeat(np.arange(low, high + 1).astype(dtype), 256).reshape(1, 256, 256)
    for seed, slopes in enumerate([(256,), (1, 1, 256)]):
        data = prelu(dtype, slopes, seed)
        graph = reader.read(data, target=target)
        (found,) = Interpreter(graph)(codes)
        assert np.array_equal(np.asarray(found), living(data, target, codes))


def test_prelu_in_the_real_numbers():
    """Under a target that is no runtime the table is rounded once."""
    file = File()
    x, y = file.tensor("int8", (1, 256, 2), Grid(0.5, 3)), file.tensor("int8", (1, 256, 2), Grid(0.25, -7), name="y")
    file.operator("PRELU", [x, file.tensor("int8", (2,), Grid(0.125, 1), np.asarray([-3, 5], np.int8))], [y])
    graph = reader.read(file.to_bytes([x], [y]), target="nearest_even")
    codes = np.repeat(np.arange(-128, 128).astype(np.int8), 2).reshape(1, 256, 2)
    (found,) = Interpreter(graph)(codes)
    reals = (codes - 3.0) * 0.5
    exact = np.where(reals < 0, reals * np.asarray([-0.5, 0.5]), reals) / 0.25 - 7
    assert np.array_equal(np.asarray(found), np.clip(np.rint(exact + 7) - 7, -128, 127))


def test_prelu_of_16_bits():
    file = File()
    x, y = file.tensor("int16", (1, 4), Grid(0.1)), file.tensor("int16", (1, 4), Grid(0.1))
    file.operator("PRELU", [x, file.tensor("int8", (4,), Grid(0.1), np.ones(4, np.int8))], [y])
    with pytest.raises(ReadError, match="codes of int16 with slopes of int8 become int16"):
        reader.read(file.to_bytes([x], [y]))


def rows(n: int, scale: float, count: int, grid: Grid = UNIT, dtype: str = "int8") -> bytes:
    file = File()
    x, y = file.tensor(dtype, (count, n), Grid(scale, 5)), file.tensor(dtype, (count, n), grid, name="y")
    file.operator("LOG_SOFTMAX", [x], [y], "LogSoftmax")
    return file.to_bytes([x], [y])


def random_rows(n: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    return (rng.integers(-128, 128, (count, n)) // rng.choice([1, 3, 16, 60], (count, 1))).astype(np.int8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["tflite_reference", "tflite_micro"])
def test_log_softmax(target):
    """Its integers, for short and long rows and scales of all sizes."""
    count = 0
    for n in (1, 2, 3, 10, 37, 400, 4000):
        codes = random_rows(n, max(2, 1500 // n))
        for scale in (1e-5, 0.001, 0.01, 0.031, 0.1, 0.25, 0.7, 2.3, 9.0, 15.9):
            found = log_softmax(codes, prepare_log(scale))
            assert np.array_equal(found, living(rows(n, scale, len(codes)), target, codes)), (n, scale)
            count += codes.size
    assert count > 10**5


def test_log_softmax_of_a_file(tmp_path):
    data, codes = rows(37, 0.1, 20), random_rows(37, 20)
    (tmp_path / "log.tflite").write_bytes(data)
    graph = qjax.read(tmp_path / "log.tflite")
    expected = living(data, "tflite_reference", codes)
    assert np.array_equal(graph.run(codes), expected)
    graph.save(tmp_path / "log.qjax")
    assert np.array_equal(qjax.load(tmp_path / "log.qjax").native(20).run(codes), expected)
    # written again it is the operator, and the graph
    graph.emit("tflite", tmp_path / "written.tflite", batch=20)
    written = (tmp_path / "written.tflite").read_bytes()
    assert np.array_equal(living(written, "tflite_reference", codes), expected)
    for metadata in (True, False):
        (found,) = Interpreter(reader.read(written, metadata=metadata))(codes)
        assert np.array_equal(np.asarray(found), expected)
    exact = np.asarray(graph.retarget("nearest_even").run(codes))
    reals = codes * 0.1 - np.log(np.exp(codes * 0.1).sum(-1, keepdims=True))
    assert np.array_equal(exact, np.clip(np.rint(reals * 16) + 127, -128, 127))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (rows(5, 0.1, 2), {"target": "tflite_xnnpack"}, "LOG_SOFTMAX of int8 has a kernel of its own under"),
        (rows(5, 0.1, 2, Grid(1 / 16, 126)), {}, "Its kernels have 0.0625 and 127"),
        (rows(5, 16.0, 2), {}, "codes with the scale 16"),
        (rows(4096, 0.1, 2), {}, r"\(4096,\) codes"),
        (rows(5, 0.1, 2, Grid(1 / 16, 255), "uint8"), {}, "codes of uint8 become uint8"),
    ],
)
def test_log_softmax_that_no_known_kernel_computes(data, options, message):
    with pytest.raises(ReadError, match=message):
        reader.read(data, **options)
