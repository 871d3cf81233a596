"""Floats between codes, and arithmetic of places: graphs with LiteRT's codes, tensor by tensor."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit.tflite_runtimes import MODES, everything, litert, micro

SHAPE = (2, 3, 5)


def bytes_of(shape: Sequence[int], out: Grid, **fields: Any) -> bytes:
    """An image of bytes without a scale, its floats, its codes."""
    file = File()
    x, real = file.tensor("uint8", shape, **fields), file.tensor("float32", shape)
    y = file.tensor("int8", shape, out)
    file.operator("CAST", [x], [real], "Cast", inDataType=3, outDataType=0)
    file.operator("QUANTIZE", [real], [y], "Quantize")
    return file.to_bytes([x], [y])


def chain(steps: Sequence[tuple[Any, ...]], grids: Sequence[Grid], out: Grid, shapes: Sequence[Sequence[int]]) -> bytes:
    """Codes, their floats, steps (an operator, its operands: the number of a value, or a real), codes."""
    file = File()
    inputs = [file.tensor("int8", shape, grid) for shape, grid in zip(shapes, grids, strict=True)]
    values = [file.tensor("float32", shape) for shape in shapes]
    for x, real in zip(inputs, values, strict=True):
        file.operator("DEQUANTIZE", [x], [real], "Dequantize")
    sizes = [tuple(shape) for shape in shapes]
    for name, *operands in steps:
        given = [o for o in operands if isinstance(o, int)]
        sizes.append(np.broadcast_shapes(*(sizes[o] for o in given)))
        held = [values[o] if isinstance(o, int) else file.numbers(o, "float32") for o in operands]
        values.append(file.tensor("float32", sizes[-1]))
        options = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div", "MAXIMUM": "MaximumMinimum"}
        file.operator(name, held, values[-1:], options.get(name, ""))
    y = file.tensor("int8", sizes[-1], out)
    file.operator("QUANTIZE", values[-1:], [y], "Quantize")
    return file.to_bytes(inputs, [y])


def feeds(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = []
    for name in graph.inputs:
        info = np.iinfo(graph.tensors[name].dtype)
        shape = [n or 1 for n in graph.tensors[name].shape]
        found.append(rng.integers(info.min, int(info.max) + 1, shape).astype(info.dtype))
    return found


def assert_litert(data: bytes, target: str, least: int, **options: Any) -> Graph:
    """Every tensor of the graph that the runtime shows is equal; least: how many it shows."""
    graph = reader.read(data, target=target, **options)
    whole = everything(graph)
    for seed in range(3):
        inputs = feeds(graph, seed)
        found = litert(data, MODES[target], inputs, every=target == "tflite_reference")
        expected = dict(zip(whole.outputs, Interpreter(whole)(*inputs), strict=True))
        shared = sorted(expected.keys() & found.keys())
        assert len(shared) >= least, shared
        for name in shared:
            assert np.array_equal(np.asarray(expected[name]), found[name]), name
    return graph


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("out", [Grid(1.0, -128), Grid(0.7, -100), Grid(3.1, 4)])
def test_an_image_of_bytes(target, out):
    data = bytes_of((1, 6, 7, 3), out)
    graph = assert_litert(data, target, 1)
    assert (graph.tensors[graph.inputs[0]].dtype, graph.tensors[graph.inputs[0]].quantization) == ("uint8", None)


def test_a_batch_of_images(tmp_path):
    path = tmp_path / "m.tflite"
    path.write_bytes(bytes_of((1, 4, 4, 3), Grid(0.9, -120), shapeSignature=[-1, 4, 4, 3]))
    graph = qjax.read(path)
    assert graph.ir.tensors[graph.ir.inputs[0]].shape == (None, 4, 4, 3)
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(graph.run(images)), litert(path.read_bytes(), "reference", [images])["t2"])


CHAINS = {
    "a square root": ([("SQRT", 0)], [Grid(0.31, -128)], Grid(0.05, -128)),
    "nothing": ([], [Grid(0.03, 5)], Grid(0.05, -7)),
    "several steps": (
        [("MUL", 0, 0.37), ("RELU6", 1), ("ADD", 1.3, 2), ("RSQRT", 3), ("SUB", 4, 0)],
        [Grid(0.05, 11)],
        Grid(0.04, 3),
    ),
    "a value twice": ([("MUL", 0, 0), ("ABS", 0), ("MAXIMUM", 1, 2), ("NEG", 3)], [Grid(0.02, -3)], Grid(0.05, 120)),
    "a quotient": ([("ADD", 1, 0.25), ("DIV", 0, 2)], [Grid(0.01, 4), Grid(0.02, -128)], Grid(0.008, -9)),
    "of one row": ([("SQRT", 1), ("MUL", 2, 0), ("SQUARE", 3)], [Grid(0.01, 4), Grid(0.02, -128)], Grid(0.02, -128)),
}


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.sampled(6)
def test_steps_in_floats(target, name):
    steps, grids, out = CHAINS[name]
    shapes = [SHAPE, (3, 1)] if name == "of one row" else [SHAPE] * len(grids)
    graph = assert_litert(chain(steps, grids, out, shapes), target, 1)
    assert len(graph.nodes) == 1


@pytest.mark.parametrize("name", ["a square root", "a quotient"])
def test_steps_in_floats_of_micro(name):
    steps, grids, out = CHAINS[name]
    data = chain(steps, grids, out, [SHAPE] * len(grids))
    graph = reader.read(data, target="tflite_micro")
    inputs = feeds(graph)
    (expected,) = Interpreter(graph)(*inputs)
    assert np.array_equal(np.asarray(expected), micro(data, inputs, graph.outputs)[graph.outputs[0]])


def test_a_quotient_elsewhere_is_rounded_once():
    """A divisor of 0 gives an end of the range, 0 / 0 the code of 0."""
    x, w, y = Grid(0.011, 4), Grid(0.02, -128), Grid(0.008, -9)
    graph = reader.read(chain([("DIV", 0, 1)], [x, w], y, [(256, 1), (1, 256)]), target="nearest_even")
    codes = np.arange(-128, 128, dtype=np.int8)
    (found,) = Interpreter(graph)(codes[:, None], codes[None])
    s_x, s_w, s_y = (Fraction(float(np.float32(grid.scale))) for grid in (x, w, y))
    ratio = s_x / s_w / s_y
    for a in range(-128, 128):
        for b in range(-128, 128):
            top, bottom = a - x.zero_point, b - w.zero_point
            end = np.sign(top) * 1000
            steps = round(ratio * top / bottom) if bottom else int(end)
            assert np.asarray(found)[a + 128, b + 128] == min(max(steps + y.zero_point, -128), 127)


def places(width: int = 6) -> bytes:
    """The place of the greatest code of a map as a row and a column, in codes and as places of another tensor."""
    file, grid, other = File(), Grid(0.1, 3), Grid(0.2, -5)
    score = file.tensor("int8", (1, 4, width, 3), grid, name="score")
    table = file.tensor("int8", (1, 4, width, 5), other, name="table")
    flat = file.tensor("int8", (1, 4 * width, 3), grid, name="flat")
    file.operator("RESHAPE", [score, file.numbers([1, -1, 3])], [flat], "Reshape")

    def whole(name: str, shape: Sequence[int]) -> int:
        return file.tensor("int32", shape, name=name)

    place, row = whole("place", (1, 3)), whole("row", (1, 3))
    first, column = whole("first", (1, 3)), whole("column", (1, 3))
    by = file.numbers(width)
    file.operator("ARG_MAX", [flat, file.numbers(1)], [place], "ArgMax", outputType=2)
    file.operator("FLOOR_DIV", [place, by], [row], "FloorDiv")
    file.operator("MUL", [row, by], [first], "Mul")
    file.operator("SUB", [place, first], [column], "Sub")
    outputs = [row, column]
    for name, axis in (("row", row), ("column", column)):
        real = file.tensor("float32", (1, 3))
        code = file.tensor("int8", (1, 3), Grid(0.13, -100), name=f"codes of {name}")
        file.operator("CAST", [axis], [real], "Cast", inDataType=2, outDataType=0)
        file.operator("QUANTIZE", [real], [code], "Quantize")
        outputs.append(code)
    rows, columns = whole("rows", (3,)), whole("columns", (3,))
    for of, to in ((row, rows), (column, columns)):
        file.operator("RESHAPE", [of, file.numbers([-1])], [to], "Reshape")
    three = whole("three", (3, 3))
    file.operator("PACK", [file.numbers([0, 0, 0]), rows, columns], [three], "Pack", axis=1, valuesCount=3)
    taken = file.tensor("int8", (3, 5), other, name="taken")
    file.operator("GATHER_ND", [table, three], [taken], "GatherNd")
    four = whole("four", (3, 4))
    file.operator("CONCATENATION", [three, file.numbers([[4], [0], [2]])], [four], "Concatenation", axis=1)
    one = file.tensor("int8", (3,), other, name="one")
    file.operator("GATHER_ND", [table, four], [one], "GatherNd")
    fixed = file.tensor("int8", (2, 5), other, name="fixed")
    file.operator("GATHER_ND", [table, file.numbers([[0, 3, 5], [0, 0, 1]])], [fixed], "GatherNd")
    left = whole("left", (1, 3))
    file.operator("FLOOR_MOD", [place, file.numbers([4, 3, 7])], [left], "FloorMod")
    both = whole("both", (1, 3))
    file.operator("ADD", [left, row], [both], "Add")
    return file.to_bytes([score, table], [*outputs, taken, one, fixed, both])


def test_places_are_litert():
    assert_litert(places(), "tflite_reference", 15)


def test_places_become_c(tmp_path):
    path = tmp_path / "m.tflite"
    path.write_bytes(places())
    graph = qjax.read(path)
    inputs = feeds(graph.ir)
    for found, expected in zip(graph.native(1).run(*inputs), graph.run(*inputs), strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_places_outside_move_to_the_edge():
    """LiteRT refuses them. Those inside are its codes."""
    file, grid = File(), Grid(0.1, 3)
    x, at = file.tensor("int8", (4, 5, 2), grid), file.tensor("int32", (6, 2))
    y = file.tensor("int8", (6, 2), grid)
    file.operator("GATHER_ND", [x, at], [y], "GatherNd")
    data = file.to_bytes([x, at], [y])
    graph = reader.read(data)
    codes = np.random.default_rng(0).integers(-128, 128, (4, 5, 2)).astype(np.int8)
    inside = np.array([[0, 0], [3, 4], [1, 2], [2, 0], [0, 4], [3, 1]], np.int32)
    (found,) = Interpreter(graph)(codes, inside)
    assert np.array_equal(np.asarray(found), litert(data, "reference", [codes, inside])["t2"])
    outside = np.array([[-1, 0], [4, 4], [1, 9], [2, -7], [0, 4], [2**31 - 1, -(2**31)]], np.int32)
    (found,) = Interpreter(graph)(codes, outside)
    assert np.array_equal(np.asarray(found), codes[[0, 3, 1, 2, 0, 3], [0, 4, 4, 0, 4, 0]])


def test_numbers_that_are_known_are_computed_at_reading():
    """The size of a reshape as a product and a quotient of shapes."""
    file, grid = File(), Grid(0.1, 3)
    x, y = file.tensor("int8", (1, 4, 6), grid), file.tensor("int8", (2, 12), grid)
    size, half, wide = (file.tensor("int32", (1,)) for _ in range(3))
    file.operator("MUL", [file.numbers([4]), file.numbers([6])], [size], "Mul")
    file.operator("FLOOR_DIV", [size, file.numbers([2])], [half], "FloorDiv")
    file.operator("CAST", [half], [wide], "Cast", inDataType=2, outDataType=2)
    shape = file.tensor("int32", (2,))
    file.operator("CONCATENATION", [file.numbers([2]), wide], [shape], "Concatenation")
    file.operator("RESHAPE", [x, shape], [y], "Reshape")
    graph = reader.read(file.to_bytes([x], [y]))
    assert graph.tensors[graph.outputs[0]].shape == (2, 12)


# ---------------------------------------------------------------------------- what is refused


def refusal(data: bytes, **options: Any) -> str:
    with pytest.raises(ReadError) as caught:
        reader.read(data, **options)
    return str(caught.value)


def test_floats_of_three_tensors():
    text = refusal(chain([("ADD", 0, 1), ("MUL", 3, 2)], [Grid(0.1)] * 3, Grid(0.1), [SHAPE] * 3))
    assert "its floats come from tensors of 256 x 256 x 256 values" in text
    assert "at most 65536 entries" in text


def test_floats_that_depend_on_their_place():
    text = refusal(chain([("MUL", 0, [0.1, 0.2, 0.3, 0.4, 0.5])], [Grid(0.1)], Grid(0.1), [SHAPE]))
    assert "is float32 of [5], beside floats that come from codes" in text
    # several elements at a time, and the last ones in another way
    assert "operator 1 LOGISTIC" in refusal(chain([("LOGISTIC", 0)], [Grid(0.1)], Grid(0.1), [SHAPE]))


def test_a_cast_of_codes():
    file = File()
    x, real, y = (
        file.tensor("int8", SHAPE, Grid(0.1)),
        file.tensor("float32", SHAPE),
        file.tensor("int8", SHAPE, Grid(1)),
    )
    file.operator("CAST", [x], [real], "Cast", inDataType=9, outDataType=0)
    file.operator("QUANTIZE", [real], [y], "Quantize")
    assert "it makes float32 of int8 with a scale" in refusal(file.to_bytes([x], [y]))


def test_bytes_that_are_no_image():
    file = File()
    x, y = file.tensor("uint8", SHAPE), file.tensor("uint8", SHAPE, Grid(0.1))
    file.operator("RELU", [x], [y])
    assert "uint8 without a scale. Inputs are codes with a scale" in refusal(file.to_bytes([x], [y]))


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("FLOOR_DIV", 0, "no constant above 0"),
        ("FLOOR_DIV", 3, "its dividend may be -2147483648"),
        ("ADD", 1, "its result may be from -2147483647 to 2147483648, beyond int32"),
    ],
)
def test_whole_numbers_that_are_not_known_to_fit(name, other, text):
    file = File()
    x, y = file.tensor("int32", (3,)), file.tensor("int32", (3,))
    options = {"FLOOR_DIV": "FloorDiv", "ADD": "Add"}
    file.operator(name, [x, file.numbers(other)], [y], options[name])
    assert text in refusal(file.to_bytes([x], [y]))


def test_places_of_a_constant_outside():
    file, grid = File(), Grid(0.1)
    x, y = file.tensor("int8", (4, 5), grid), file.tensor("int8", (1,), grid)
    file.operator("GATHER_ND", [x, file.numbers([[4, 0]])], [y], "GatherNd")
    assert "places out of (4, 5)" in refusal(file.to_bytes([x], [y]))
