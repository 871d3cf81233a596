"""Choices and moves between quantizers, in the forms of exporters: ONNX Runtime's bits."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from qjax.contrib.importers.onnx import read
from qjax.export.integer_graph import IntegerGraph
from qjax.export.read_errors import ReadError
from tests.contrib.importers.onnx_models import Maker, both, normal, session
from tests.contrib.importers.test_onnx_forms import case, ints

N = 5


def number(m, name, value):
    return m.constant(name, np.asarray(value, np.float32))


def where_scalar(m, a):
    mask = m.constant("mask", np.tri(6, dtype=bool))
    return m.node("Where", [mask, a, number(m, "low", -1e9)], "c")


def where_of_data(m, a, b):
    m.node("Greater", [a, number(m, "k", 0.31)], "mask")
    return m.node("Where", ["mask", b, a], "c")


def masks(m, a):
    """Every comparison with constants that are codes' reals, lie between them, or beyond all."""
    found = None
    for i, (op, value) in enumerate(
        [("Greater", 0.5), ("GreaterOrEqual", -0.3), ("Less", 0.02), ("LessOrEqual", 100), ("Equal", 0.0)]
    ):
        m.node(op, [a, number(m, f"k{i}", value)], f"m{i}")
        found = f"m{i}" if found is None else m.node(("And", "Or", "Xor")[i % 3], [found, f"m{i}"], f"j{i}")
    m.node("Not", [found], "not")
    m.node("Less", [number(m, "left", 0.2), a], "m9")
    m.node("Xor", ["not", "m9"], "all")
    return m.node("Where", ["all", a, number(m, "zero", 0.37)], "c")


def places(m, a, b):
    """argmax of one picks masks of the other."""
    m.node("ArgMax", [a], "p", axis=2, keepdims=1)
    m.node("ArgMin", [a], "q", axis=2)
    m.node("Less", ["p", "q"], "mask")
    return m.node("Where", ["mask", a, b], "c")


def gathered(m, a):
    m.node("Gather", [a, m.constant("i", np.array([[2, -1], [0, 0]]))], "g", axis=1)
    return m.node("Gather", ["g", m.constant("j", np.array([3, 1]))], "c", axis=3)


def gathered_behind(m, a):
    m.node("Relu", [a], "r")
    return m.node("Gather", ["r", m.constant("i", np.array([1, 0, 1]))], "c", axis=-1)


def mirrored(m, a):
    """x[:, ::-1, 5:0:-2]."""
    return m.node("Slice", [a, *ints(m, [-1, 5], [-(2**62), 0], [1, 2], [-1, -2])], "c")


def resized(scales, sizes=None, **attributes):
    def body(m, a):
        inputs = [a, "", m.constant("scales", np.array(scales, np.float32)) if scales else ""]
        if sizes:
            inputs.append(m.constant("sizes", np.array(sizes)))
        return m.node("Resize", inputs, "c", mode="nearest", **attributes)

    return body


IMAGE, PAIR, ROW = {"x": [N, 3, 6, 6]}, {"x": ["N", 4, 6], "x1": ["N", 4, 6]}, {"x": ["N", 6, 6]}
SPACES = {
    f"resize {mode} {near} {scale}": (
        resized([1, 1, scale, 1.5 if scale != 2 else 3], coordinate_transformation_mode=mode, nearest_mode=near),
        IMAGE,
        {},
    )
    for mode, near, scale in [
        ("asymmetric", "floor", 2),
        ("half_pixel", "round_prefer_floor", 2),
        ("half_pixel", "round_prefer_ceil", 2.5),
        ("half_pixel", "ceil", 0.7),
        ("align_corners", "round_prefer_floor", 1.9),
        ("pytorch_half_pixel", "floor", 0.4),
        ("asymmetric", "round_prefer_ceil", 1.3),
    ]
}
FORMS = {
    "where, a mask and a number": (where_scalar, ROW, {"dtype": "int8"}),
    "where, two tensors of different grids": (where_of_data, PAIR, {}),
    "comparisons": (masks, ROW, {"dtype": "int8"}),
    "places": (places, PAIR, {}),
    "gather": (gathered, IMAGE, {"dtype": "int8"}),
    "gather behind relu": (gathered_behind, ROW, {}),
    "slice backwards": (mirrored, ROW, {}),
    "max of two": (lambda m, a, b: m.node("Max", [a, b], "c"), PAIR, {}),
    "min of two and clip": (
        lambda m, a, b: m.node("Clip", [m.node("Min", [a, b], "n"), number(m, "l", -0.4), number(m, "h", 0.9)], "c"),
        PAIR,
        {"dtype": "int8"},
    ),
    "max with a row": (lambda m, a: m.node("Max", [a, number(m, "k", [-1, 0, 1, 0.5, 2, -9])], "c"), ROW, {}),
    "min over axes": (lambda m, a: m.node("ReduceMin", [a], "c", axes=[1], keepdims=1), ROW, {}),
    "depth to space": (lambda m, a: m.node("DepthToSpace", [a], "c", blocksize=2), {"x": ["N", 8, 3, 5]}, {}),
    "depth to space, columns first": (
        lambda m, a: m.node("DepthToSpace", [a], "c", blocksize=2, mode="CRD"),
        {"x": ["N", 12, 3, 5]},
        {"dtype": "int8"},
    ),
    "space to depth": (lambda m, a: m.node("SpaceToDepth", [a], "c", blocksize=3), {"x": ["N", 2, 6, 9]}, {}),
    "resize to sizes": (resized([], [N, 3, 9, 4], coordinate_transformation_mode="asymmetric"), IMAGE, {}),
    "sigmoid behind a transpose": (
        lambda m, a: m.node("Sigmoid", [m.node("Transpose", [a], "t", perm=[0, 2, 1])], "c"),
        ROW,
        {"out": 1 / 256},
    ),
    **SPACES,
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.sampled(8)
def test_gives_the_bits_of_onnxruntime(name):
    body, inputs, options = FORMS[name]
    feeds = {key: normal(N, *shape[1:], seed=i) for i, (key, shape) in enumerate(inputs.items())}
    found, expected, graph = both(case(body, inputs, **options), feeds)
    assert "floats_in_onnxruntime" not in graph.ir.metadata
    assert len(np.unique(expected[0])) > 8
    np.testing.assert_array_equal(found[0], expected[0])


def test_masks_and_indices_come_in_and_go_out():
    m = Maker(2)
    m.dequantize("x", "r", 0.02, 120)
    m.node("Where", ["mask", "r", m.node("Gather", ["r", "i"], "g", axis=1)], "w")
    m.quantize("w", "y", 0.02, 120)
    m.node("ArgMax", ["y"], "place", axis=-1, keepdims=0)
    m.node("Equal", ["place", "i"], "same")
    info = helper.make_tensor_value_info
    model = m.model({"x": [3, 3]}, {"y": None}, kind=TensorProto.UINT8)
    model.graph.input.extend([info("mask", TensorProto.BOOL, [3, 1]), info("i", TensorProto.INT64, [3])])
    model.graph.output.extend([info("place", TensorProto.INT64, None), info("same", TensorProto.BOOL, None)])
    data = model.SerializeToString()
    graph = IntegerGraph(read(data))
    codes, mask, i = (
        m.rng.integers(0, 256, (3, 3)).astype(np.uint8),
        np.array([[True], [False], [True]]),
        np.array([2, 0, 1]),
    )
    expected = session(data, {}).run(None, {"x": codes, "mask": mask, "i": i})
    found = graph.run(codes, mask, i.astype(np.int32))
    assert [str(np.asarray(f).dtype) for f in found] == ["uint8", "int32", "bool"]
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("opset", "axis"), [(17, -1), (17, 2), (11, 2)])
def test_softmax_is_that_of_the_runtime(dtype, opset, axis):
    data = case(lambda m, x: m.node("Softmax", [x], "c", axis=axis), {"x": ["N", 4, 9]}, opset, dtype, out=1 / 255)
    found, expected, graph = both(data, {"x": normal(N, 4, 9)})
    assert [node.attributes["method"] for node in graph.ir.nodes if node.op == "softmax"] == ["onnx"]
    assert len(np.unique(expected[0])) > 50
    np.testing.assert_array_equal(found[0], expected[0])


def test_rows_and_transposed_windows_are_read_where_floats_are_allowed():
    """ConvTranspose is float sums. The formula of QLinearSoftmax is known for the last axis, where it has a result."""
    for body, inputs, why in (
        (lambda m, x: m.node("Softmax", [x], "c", axis=1), {"x": ["N", 4, 9]}, "over the axes .1. of 3"),
        (lambda m, x: m.node("Softmax", [x], "c", axis=-1), {"x": ["N", 4, 1]}, "overflows in rows of 1"),
        (
            lambda m, x: m.node(
                "ConvTranspose", [x, m.codes("w", (4, 3, 3, 2))], "c",
                strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 0], dilations=[1, 2], group=2,
            ),
            {"x": ["N", 4, 5, 4]},
            "ConvTranspose has no kernel of codes",
        ),
    ):  # fmt: skip
        data = case(body, inputs, out=0.02 if "Transpose" in why else 1 / 256)
        with pytest.raises(ReadError, match=why):
            read(data)
        if "overflows" in why:
            assert read(data, floats=True)
            continue
        found, expected, graph = both(data, {"x": normal(N, *inputs["x"][1:])}, floats=True)
        assert graph.ir.metadata["floats_in_onnxruntime"]
        assert len(np.unique(expected[0])) > 10
        assert np.abs(np.asarray(found[0]) - expected[0]).max() < 0.021
        assert (np.asarray(found[0]) != expected[0]).mean() < 0.02


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda m, x: m.node("Cast", [m.node("ArgMax", [x], "k", axis=1, select_last_index=1)], "c", to=1),
            "the last of equal elements",
        ),
        (
            lambda m, x: m.node("Resize", [x, "", m.constant("s", np.ones(3, np.float32))], "c", mode="linear"),
            "interpolates",
        ),
        (lambda m, x: m.node("Gather", [x, m.constant("i", np.array([6]))], "c", axis=1), "an index is none of 6"),
        (lambda m, x: m.node("Slice", [x, *ints(m, [0], [4], [1], [0])], "c"), "steps of 0"),
        (lambda m, x: m.node("Where", [x, x, x], "c"), r"takes tensor\(bool\) here"),
        (lambda m, x: m.node("DepthToSpace", [x], "c", blocksize=2), "expected four axes"),
    ],
)
def test_clear_errors(body, message):
    with pytest.raises(ReadError, match=message):
        read(case(body, ROW))
