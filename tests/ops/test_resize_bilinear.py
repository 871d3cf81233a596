"""Bilinear resizing beside LiteRT, TFLite Micro and fractions: every method, with C and ONNX of the float one."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false

from fractions import Fraction

import numpy as np
import pytest

from qjax import targets
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.onnx import to_model
from qjax.export.emit.tflite import to_bytes
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.numerics.interpolation import RESIZE_METHODS, Grid, interpolation
from qjax.run.interpreter import Interpreter
from tests.contrib.importers import tflite_models as models
from tests.export.emit import c_build
from tests.export.emit.onnx_runs import by_onnxruntime, differing
from tests.export.emit.tflite_runtimes import MODES, litert, micro

CORNERS, HALF = ({"alignCorners": True}, {"halfPixelCenters": True})
SIZES = (
    # image, result, channels: odd sizes, one row, twice, eight times with 8 channels, smaller
    ((5, 7), (13, 11), 3),
    ((1, 9), (4, 1), 1),
    ((6, 3), (12, 6), 17),
    ((2, 3), (16, 24), 8),
    ((19, 12), (7, 5), 9),
    ((33, 33), (65, 65), 2),
)


def model(dtype: str, before: tuple[int, int], after: tuple[int, int], channels: int, chosen: dict[str, bool]) -> bytes:
    """A file of one RESIZE_BILINEAR."""
    file = models.File()
    grid = models.Grid(0.1, {"int8": -3, "uint8": 130, "int16": 0}[dtype])
    x = file.tensor(dtype, (1, *before, channels), grid, name="x")
    y = file.tensor(dtype, (1, *after, channels), grid, name="y")
    file.operator("RESIZE_BILINEAR", [x, file.numbers(list(after))], [y], "ResizeBilinear", **chosen)
    return file.to_bytes([x], [y])


def codes_for(graph: Graph, seed: int) -> np.ndarray:
    tensor = graph.tensors["x"]
    info = np.iinfo(tensor.dtype)
    shape = [size or 1 for size in tensor.shape]
    return np.random.default_rng(seed).integers(info.min, info.max + 1, shape).astype(tensor.dtype)


@pytest.mark.parametrize("chosen", [{}, CORNERS, HALF], ids=["plain", "corners", "half"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.sampled(2)
def test_every_runtime_has_the_codes(dtype, chosen):
    methods = set()
    for seed, (before, after, channels) in enumerate(SIZES):
        data = model(dtype, before, after, channels, chosen)
        for target, mode in MODES.items():
            graph = reader.read(data, target=target)
            methods.add(graph.nodes[0].attributes["method"])
            x = codes_for(graph, seed)
            expected = litert(data, mode, [x], every=False)["y"]
            assert np.array_equal(np.asarray(Interpreter(graph)(x)[0]), expected), (before, after, target)
        if dtype == "int8":
            graph = reader.read(data, target="tflite_micro")
            assert np.array_equal(np.asarray(Interpreter(graph)(x)[0]), micro(data, [x], ["y"])["y"]), (before, after)
    assert methods == ({"fixed", "float32"} if dtype == "uint8" else {"fixed"})


def test_the_float_kernels_become_c_and_onnx(tmp_path):
    """`test_every_target` has the other methods."""
    named = {}
    for target in ("tflite_reference", "tflite_optimized_x86"):
        graph = reader.read(model("uint8", (5, 7), (13, 11), 3, {}), target=target)
        assert graph.nodes[0].attributes["method"] == "float32"
        named[target] = graph, [codes_for(graph, 0)]
        (expected,) = Interpreter(graph)(*named[target][1])
        for _, found in by_onnxruntime(to_model(graph, style="integer", batch=1), {"x": named[target][1][0]}):
            assert differing(found, [np.asarray(expected)]) == 0
    compiled = c_build.Compiled(named, tmp_path)
    compiled.assert_equal(compiled.called("-O0"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("chosen", [{}, CORNERS, HALF], ids=["plain", "corners", "half"])
@pytest.mark.parametrize(
    "sizes", [SIZES[1:3], pytest.param(SIZES[:4], marks=pytest.mark.exhaustive)], ids=["few", "more"]
)
def test_other_targets_round_the_exact_sum_once(chosen, sizes):
    near = 0
    for seed, (before, after, channels) in enumerate(sizes):
        graph = reader.read(model("int8", before, after, channels, chosen), target="nearest_even")
        assert graph.nodes[0].attributes["method"] == "exact"
        x = codes_for(graph, seed)
        (found,) = Interpreter(graph)(x)
        axes = [
            positions(*each, bool(chosen.get("alignCorners")), bool(chosen.get("halfPixelCenters")))
            for each in zip(before, after, strict=True)
        ]
        for row, (top, bottom, down) in enumerate(axes[0]):
            for column, (left, right, along) in enumerate(axes[1]):
                for channel in range(channels):
                    a, b, c, d = (int(x[0, i, j, channel]) for i in (top, bottom) for j in (left, right))
                    upper, lower = a + (b - a) * along, c + (d - c) * along
                    real = upper + (lower - upper) * down
                    distance = abs(abs(real - int(real)) - Fraction(1, 2))
                    # The factor has 30 bits, so what lies on a tie may fall to either side.
                    assert abs(int(found[0, row, column, channel]) - real) <= Fraction(1, 2) + Fraction(1, 2**20)
                    near += distance == 0
    # with corners these sizes have no ties
    assert bool(near) == (chosen != CORNERS)


def positions(size: int, wanted: int, corners: bool, half: bool) -> list[tuple[int, int, Fraction]]:
    """The two elements for each one, and the share of the second."""
    found = []
    for index in range(wanted):
        if half:
            place = Fraction(2 * index + 1, 2) * size / wanted - Fraction(1, 2)
        elif corners and wanted > 1:
            place = Fraction(index * (size - 1), wanted - 1)
        else:
            place = Fraction(index * size, wanted)
        place = min(max(place, Fraction(0)), Fraction(size - 1))
        found.append((int(place), min(int(place) + 1, size - 1), place - int(place)))
    return found


@pytest.mark.parametrize("target", [*MODES, "tflite_micro"])
def test_the_operator_is_written_again(target):
    graph = reader.read(model("int8", (5, 7), (13, 11), 3, HALF), target=target)
    again = reader.read(to_bytes(graph), target=target)
    assert dict(again.nodes[0].attributes) == dict(graph.nodes[0].attributes)
    bare = reader.read(to_bytes(graph), target=target, metadata=False)
    x = codes_for(graph, 0)
    assert np.array_equal(np.asarray(Interpreter(bare)(x)[0]), np.asarray(Interpreter(graph)(x)[0]))


def test_another_grid_is_not_written():
    graph = reader.read(model("int8", (5, 7), (13, 11), 3, {}), target="nearest_even")
    assert {target.resize for target in map(targets.get, targets.names())} == set(RESIZE_METHODS)
    with pytest.raises(ValueError, match="target"):
        to_bytes(graph)


def test_a_sum_beyond_32_bits_is_refused():
    data = model("int16", (200, 201), (301, 299), 1, {})
    with pytest.raises(ReadError, match=r"\(resize_bilinear\) may reach \d+, beyond int32"):
        reader.read(data, target="nearest_even")
    graph = reader.read(data, target="tflite_reference")  # sums in 64 bits
    x = codes_for(graph, 0)
    expected = litert(data, "reference", [x], every=False)["y"]
    assert np.array_equal(np.asarray(Interpreter(graph)(x)[0]), expected)


def test_what_has_no_defined_result_is_refused():
    """Positions of 10 bits: 33 elements become 513, and the last ones lie beyond the image."""
    data = model("int8", (33, 33), (513, 513), 1, {})
    with pytest.raises(ReadError, match=r"reads outside of the image.*tflite_reference"):
        reader.read(data)
    assert reader.read(data, target="tflite_xnnpack").nodes[0].attributes["bits"] == 22
    with pytest.raises(ReadError, match="AArch64"):
        reader.read(model("uint8", (5, 7), (13, 11), 3, {}), target="tflite_optimized_arm")
    with pytest.raises(ReadError, match="AArch64"):
        reader.read(model("uint8", (2, 3), (16, 24), 8, HALF), target="tflite_optimized_arm")
    with pytest.raises(ValueError, match="exclude each other"):
        interpolation("exact", "int8", Grid(3, 5, True, True), Grid(3, 5, True, True))
    with pytest.raises(ReadError, match="corners and pixel centers that coincide"):
        reader.read(model("int8", (5, 7), (13, 11), 3, CORNERS | HALF))
