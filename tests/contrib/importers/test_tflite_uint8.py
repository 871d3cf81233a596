"""Old files: SOFTMAX and CONCATENATION of uint8, places of int64, beside LiteRT; the same codes in C."""

import numpy as np
import pytest

from qjax.contrib.importers import tflite as reader
from qjax.export.integer_graph import IntegerGraph
from qjax.export.read_errors import ReadError
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid, schema
from tests.export.emit.c_build import Compiled
from tests.export.emit.tflite_runtimes import MODES, litert

UNIT = Grid(2.0**-8)


def softmax(rows: int, length: int, scale: float, zero_point: int, out: Grid = UNIT) -> bytes:
    file = File()
    x = file.tensor("uint8", (rows, length), Grid(scale, zero_point))
    y = file.tensor("uint8", (rows, length), out)
    file.operator("SOFTMAX", [x], [y], "Softmax", beta=1.0)
    return file.to_bytes([x], [y])


def concatenation(grids: list[Grid], out: Grid, rows: int = 16) -> bytes:
    """Every code of each input, side by side."""
    file = File()
    parts = [file.tensor("uint8", (rows, 16), grid) for grid in grids]
    y = file.tensor("uint8", (rows, 16 * len(parts)), out)
    file.operator("CONCATENATION", parts, [y], "Concatenation", axis=1)
    return file.to_bytes(parts, [y])


def every_code() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", MODES)
def test_softmax_is_that_of_litert(target):
    """Rows whose codes lie near one another, so that many shares are neither 0 nor 1."""
    rng, compared = np.random.default_rng(0), 0
    for length, scale, zero_point in ((3, 0.02, 7), (10, 0.1, 128), (91, 0.0625, 0), (400, 0.12, 255)):
        rows = 40_000 // length
        x = np.clip(rng.normal(150, 40, (rows, length)), 0, 255).astype(np.uint8)
        data = softmax(rows, length, scale, zero_point)
        graph = reader.read(data, target=target)
        (y,) = Interpreter(graph)(x)
        (found,) = litert(data, MODES[target], [x], every=False).values()
        assert (np.asarray(y) != found).sum() == 0, (length, scale)
        assert len(np.unique(found)) > 8
        compared += found.size
    assert compared > 150_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_concatenation_of_other_scales_is_that_of_litert(target, rounds):
    """Every code under 120 pairs of scales and zero points, or 400."""
    rng, compared = np.random.default_rng(1), 0
    for _ in range(rounds):
        scale = 2.0 ** rng.uniform(-8, 1)
        grids = [Grid(scale * 2.0 ** rng.uniform(-2, 2), int(rng.integers(0, 256))) for _ in range(40)]
        grids[0].scale = scale  # another zero point only
        out = Grid(scale, int(rng.integers(0, 256)))
        data = concatenation(grids, out)
        inputs = [every_code()] * 40
        (y,) = Interpreter(reader.read(data, target=target))(*inputs)
        (found,) = litert(data, MODES[target], inputs, every=False).values()
        assert (np.asarray(y) != found).sum() == 0, (grids, out)
        compared += found.size
    assert compared > 10_000 * rounds


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_places_of_int64_are_those_of_litert(target, dtype):
    """Few codes, so that the greatest occurs several times."""
    file, shape = File(), (100, 120, 9)
    x, axis = file.tensor(dtype, shape, Grid(0.1, 3)), file.numbers([-1])
    outputs = [file.tensor("int64", shape[:-1]) for _ in range(2)]
    for name, y in zip(("ARG_MAX", "ARG_MIN"), outputs, strict=True):
        file.operator(name, [x, axis], [y], name.title().replace("_", ""), outputType=schema.TensorType.INT64)
    data = file.to_bytes([x], outputs)
    codes = np.random.default_rng(2).integers(0, 12, shape).astype(dtype)
    graph = reader.read(data, target=target)
    found = litert(data, MODES[target], [codes], every=False)
    for name, y in zip(graph.outputs, Interpreter(graph)(codes), strict=True):
        assert y.dtype == np.int32
        assert np.array_equal(np.asarray(y), found[name])


@pytest.mark.exhaustive
def test_both_in_c_and_under_another_target(tmp_path):
    data = concatenation([Grid(0.1, 3), Grid(0.2, 90)], Grid(0.15, 20))
    joined = reader.read(data, target="tflite_reference")
    shares = reader.read(softmax(16, 16, 0.1, 4), target="tflite_reference")
    given = {"joined": (joined, [every_code()] * 2), "shares": (shares, [every_code()])}
    compiled = Compiled(given, tmp_path, batch=16)
    compiled.assert_equal(compiled.called())
    other = IntegerGraph(joined).retarget("nearest_even")
    x = np.asarray(every_code(), np.float64)
    real = np.concatenate([(x - 3) * np.float32(0.1), (x - 90) * np.float32(0.2)], 1)
    want = np.clip(np.rint(real / np.float32(0.15)) + 20, 0, 255)
    # doubles put none of these numbers on the other side of a tie
    assert np.array_equal(np.asarray(other.run(every_code(), every_code())), want)


def test_what_has_no_known_bits():
    with pytest.raises(ReadError, match="int8 codes, an output scale of 1/256"):
        reader.read(softmax(2, 4, 0.1, 0), target="tflite_optimized_arm")
    with pytest.raises(ReadError, match="int8 and uint8 codes, an output scale of 1/256"):
        reader.read(softmax(2, 4, 0.1, 0, Grid(2.0**-8, 3)), target="tflite_reference")
    file = File()
    parts = [file.tensor("int8", (2, 3), Grid(0.1 * (i + 1))) for i in range(2)]
    file.operator("CONCATENATION", parts, [y := file.tensor("int8", (2, 6), Grid(0.1))], "Concatenation", axis=1)
    with pytest.raises(ReadError, match="which its kernel ignores or computes in floats"):
        reader.read(file.to_bytes(parts, [y]), target="tflite_reference")
