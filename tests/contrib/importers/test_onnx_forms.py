"""Single groups of operators, in the forms that exporters write: each gives ONNX Runtime's bits."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from qjax.contrib.importers.onnx import read
from qjax.export.integer_graph import IntegerGraph
from qjax.export.read_errors import ReadError
from tests.contrib.importers.onnx_models import Maker, both, normal

N = 16
ZERO = {"uint8": (120, 131), "int8": (-3, 5), "int16": (-700, 300), "uint16": (30000, 2)}


def case(body, inputs, opset=17, dtype="uint8", scale=0.02, out=0.03):
    """x -> codes -> reals -> body -> codes -> reals y, as bytes; body: (maker, reals) -> name."""
    m, (zx, zy) = Maker(3), ZERO[dtype]
    reals = [m.through(name, f"{name}r", scale * (1 + i / 3), zx + i, dtype) for i, name in enumerate(inputs)]
    m.through(body(m, *reals), "y", out, zy, dtype)
    return m.model(inputs, {"y": None}, opset).SerializeToString()


def conv(m, x, *after, dtype="int8", shape=(6, 3, 3, 3), bias=(), **attributes):
    m.codes("w", shape, dtype, 0.01 if dtype == "int8" else 0.012, 0 if dtype == "int8" else 125)
    return m.node("Conv", [x, "w", *bias], "c", **attributes)


def float_bias(m, x):
    return conv(m, x, bias=[m.weight("b", 6)])


def channels_last(m, x):
    m.codes("w", (6, 4, 3, 3), scale=np.linspace(0.005, 0.02, 6), zero_point=[0] * 6, axis=0)
    m.node("Transpose", [x], "t", perm=[0, 3, 1, 2])
    m.node("Conv", ["t", "w"], "c", auto_pad="SAME_UPPER", strides=[2, 2])
    return m.node("Transpose", ["c"], "ct", perm=[0, 2, 3, 1])


def pool_channels_last(m, x):
    m.node("Transpose", [x], "t", perm=[0, 3, 1, 2])
    m.node("AveragePool", ["t"], "c", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    return m.node("Transpose", ["c"], "ct", perm=[0, 2, 3, 1])


def reshaped_by_shapes(m, x):
    """What exporters make of x.reshape(x.shape[0], -1)."""
    m.node("Shape", [x], "s")
    m.node("Gather", ["s", m.constant("first", np.int64(0))], "n", axis=0)
    m.node("Unsqueeze", ["n", m.constant("zero", np.array([0], np.int64))], "n1")
    m.node("Concat", ["n1", m.constant("rest", np.array([-1], np.int64))], "shape", axis=0)
    m.node("Reshape", [x, "shape"], "flat")
    m.codes("w", (48, 5), "uint8", 0.01, 128)
    return m.node("MatMul", ["flat", "w"], "c")


def attention(m, a, b):
    m.node("Transpose", [b], "bt", perm=[0, 2, 1])
    m.through("bt", "btr", 0.02 * 4 / 3, 121)
    return m.node("MatMul", [a, "btr"], "c")


def left_weight(m, x):
    m.codes("w", (7, 6), scale=0.01)
    return m.node("MatMul", ["w", x], "c")


def clip(m, x):
    return m.node("Clip", [x, m.constant("lo", np.float32(-0.5)), m.constant("hi", np.float32(1.01))], "c")


def ints(m, *lists):
    return [m.constant(f"i{len(m.constants)}", np.array(values, np.int64)) for values in lists]


def pieces(m, x):
    m.node("Split", [x, *ints(m, [1, 2])], ["p", "q"], axis=1)
    m.node("Slice", [x, *ints(m, [1], [9], [3], [1])], "s")
    m.node("Pad", ["s", *ints(m, [0, 0, 1, 0, 0, 0, 1, 2])], "padded")
    m.node("Slice", ["padded", *ints(m, [1, 0], [7, 5], [2, 3])], "back")
    return m.node("Concat", ["q", "p", "back"], "c", axis=1)


def maximum(m, x):
    return m.node("ReduceMax", [x], "c", axes=[2], keepdims=0)


IMAGE = {"x": ["N", 3, 8, 8]}
PAIR = {"x": ["N", 90], "x1": ["N", 90]}
FORMS = {
    "conv": (conv, IMAGE, {}),
    "conv of int8": (conv, IMAGE, {"dtype": "int8"}),
    "conv with uint8 weights": (lambda m, x: conv(m, x, dtype="uint8"), IMAGE, {}),
    "conv, float bias": (float_bias, IMAGE, {}),
    "conv, channels last": (channels_last, {"x": ["N", 7, 8, 4]}, {}),
    "average, channels last": (pool_channels_last, {"x": ["N", 7, 8, 4]}, {}),
    "average of int16": (
        lambda m, x: m.node("AveragePool", [x], "c", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
        IMAGE,
        {"dtype": "int16", "opset": 21},
    ),
    "global average": (lambda m, x: m.node("GlobalAveragePool", [x], "c"), {"x": ["N", 30, 5, 5]}, {"dtype": "int8"}),
    "conv, reshape": (lambda m, x: m.node("Reshape", [conv(m, x), m.constant("k", np.array([0, -1]))], "f"), IMAGE, {}),
    "conv, max pool, relu at the end": (
        lambda m, x: m.node("MaxPool", [conv(m, x)], "p", kernel_shape=[2, 2], strides=[2, 2]),
        IMAGE,
        {},
    ),
    "dense behind computed shapes": (reshaped_by_shapes, {"x": ["N", 3, 4, 4]}, {}),
    "product of activations": (attention, {"x": ["N", 5, 6], "x1": ["N", 7, 6]}, {}),
    "constant on the left": (left_weight, {"x": ["N", 6, 5]}, {}),
    "add": (lambda m, a, b: m.node("Add", [a, b], "c"), PAIR, {}),
    "add of int16": (lambda m, a, b: m.node("Add", [a, b], "c"), PAIR, {"dtype": "int16", "opset": 21}),
    "add of a constant": (lambda m, a: m.node("Add", [a, m.codes("k", (8,), "uint8", 0.01, 7)], "c"), IMAGE, {}),
    "subtract": (lambda m, a, b: m.node("Sub", [a, b], "c"), PAIR, {"dtype": "int8"}),
    "multiply": (lambda m, a, b: m.node("Mul", [a, b], "c"), PAIR, {}),
    "multiply of int16": (lambda m, a, b: m.node("Mul", [a, b], "c"), PAIR, {"dtype": "int16", "opset": 21}),
    "concatenate": (lambda m, a, b: m.node("Concat", [a, b], "c", axis=1), PAIR, {}),
    "relu": (lambda m, x: m.node("Relu", [x], "c"), IMAGE, {}),
    "clip": (clip, IMAGE, {"dtype": "int8"}),
    "pieces": (pieces, {"x": ["N", 3, 6, 5]}, {}),
    "maximum": (maximum, {"x": ["N", 3, 6]}, {}),
    "change of the grid": (lambda m, x: m.node("Identity", [x], "c"), IMAGE, {}),
    "transpose": (lambda m, x: m.node("Transpose", [x], "c", perm=[0, 2, 3, 1]), IMAGE, {"out": 0.02}),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.sampled(10)
def test_gives_the_bits_of_onnxruntime(name):
    body, inputs, options = FORMS[name]
    feeds = {key: normal(N, *shape[1:], seed=i) for i, (key, shape) in enumerate(inputs.items())}
    found, expected, graph = both(case(body, inputs, **options), feeds)
    assert "floats_in_onnxruntime" not in graph.ir.metadata
    assert len(np.unique(expected[0])) > 10
    np.testing.assert_array_equal(found[0], expected[0])


FLOATS = {
    "clamp within": lambda m, x: m.node("Relu", [conv(m, x)], "r"),
    "Flatten": lambda m, x: m.node("Flatten", [conv(m, x)], "f"),
    "ReduceMean": lambda m, x: m.node("ReduceMean", [x], "r", axes=[1]),
    "factor or an offset": lambda m, x: m.node("Mul", [conv(m, x), m.constant("k", np.float32(2))], "r"),
    "other readers": lambda m, x: m.node(
        "Add", [m.through(conv(m, x), "c0", 0.03, 9), m.through("c", "c1", 0.04, 9)], "r"
    ),
    "weight has int4": lambda m, x: m.node("Conv", [x, int4(m)], "c"),
}


def int4(m):
    values = [-8, 7, 3, -1] * 27
    m.constants.append(helper.make_tensor("w", TensorProto.INT4, [4, 3, 3, 3], values))
    m.constants.append(helper.make_tensor("wz", TensorProto.INT4, [], [0]))
    return m.node("DequantizeLinear", ["w", m.constant("ws", np.float32(0.1)), "wz"], "wr")


@pytest.mark.parametrize("reason", FLOATS)
def test_what_onnxruntime_adds_in_floats_is_refused_unless_allowed(reason):
    data = case(FLOATS[reason], IMAGE, opset=21 if "int4" in reason else 17)
    with pytest.raises(ReadError, match=f"ONNX Runtime computes it in floats .*{reason}"):
        read(data)
    found, expected, graph = both(data, {"x": normal(N, 3, 8, 8)}, floats=True)
    assert graph.ir.metadata["floats_in_onnxruntime"]
    # a step of each of at most three grids apart, where a float sum falls on the other side of a tie
    assert np.abs(np.asarray(found[0]) - expected[0]).max() < 0.03 + 0.03 + 0.04 + 1e-5
    assert (np.asarray(found[0]) != expected[0]).mean() < 0.1


def test_codes_in_and_out():
    """Operators on codes alone: the inputs' grid is that of their reader."""
    m = Maker(1)
    m.constant("w", m.rng.integers(-127, 128, (12, 8)).astype(np.int8))
    parts = ["x", *m.grid("a", 0.02, 120), "w", *m.grid("b", 0.01, 0, "int8"), *m.grid("yg", 0.03, 9)]
    m.node("QLinearMatMul", parts, "y")
    data = m.model({"x": ["N", 12]}, {"y": ["N", 8]}, kind=TensorProto.UINT8).SerializeToString()
    graph = IntegerGraph(read(data))
    (node,) = graph.ir.nodes
    assert (node.op, node.name, node.inputs) == ("dot", "y", ("x",))
    grid = graph.ir.tensors["x"].quantization
    assert grid is not None
    assert (float(np.asarray(grid.scale)), int(np.asarray(grid.zero_point))) == (np.float32(0.02), 120)
    codes = m.rng.integers(0, 256, (9, 12)).astype(np.uint8)
    assert graph.run(codes).shape == (9, 8)


def test_an_asymmetric_weight_is_centred_and_a_symmetric_one_is_kept():
    m = Maker(1)
    m.constant("w", np.array([[0, 255], [128, 1]], np.uint8))
    m.constant("v", np.array([[0, 255], [128, 1]], np.uint8))
    m.node("QLinearMatMul", ["x", *m.grid("a", 0.02, 120), "w", *m.grid("b", 0.01, 128), *m.grid("t", 0.03, 9)], "h")
    m.node("QLinearMatMul", ["h", "t_s", "t_z", "v", *m.grid("c", 0.01, 3), *m.grid("u", 0.03, 9)], "y")
    graph = read(m.model({"x": ["N", 2]}, {"y": ["N", 2]}, kind=TensorProto.UINT8).SerializeToString())
    np.testing.assert_array_equal(graph.tensors["w"].value, np.array([[-128, 127], [0, -127]], np.int8))
    assert graph.tensors["w"].dtype == "int8"
    np.testing.assert_array_equal(graph.tensors["v"].value, np.array([[-3, 252], [125, -2]], np.int16))
    assert graph.tensors["v"].dtype == "int16"


def test_a_lookup_of_rows():
    m = Maker(2)
    m.codes("table", (40, 6), "uint8", 0.02, 120)
    m.node("Gather", ["table", "x"], "rows")
    m.through("rows", "y", 0.02, 120)
    data = m.model({"x": ["N", 4]}, {"y": None}, kind=TensorProto.INT64, out_kind=TensorProto.FLOAT).SerializeToString()
    feeds = {"x": m.rng.integers(-40, 40, (9, 4))}
    found, expected, graph = both(data, {"x": feeds["x"]})
    assert [node.op for node in graph.ir.nodes] == ["embed"]
    np.testing.assert_array_equal(found[0], expected[0])


def test_functions_are_inlined():
    m = Maker(4)
    body = [
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["b"]),
    ]
    opsets = [helper.make_opsetid("", 17)]
    function = helper.make_function("own", "FakeQuant", ["a", "s", "z"], ["b"], body, opsets)
    m.codes("w", (12, 8))
    m.node("FakeQuant", ["x", *m.grid("g", 0.02, 120)], "xr", domain="own")
    m.node("MatMul", ["xr", "w"], "c")
    m.node("FakeQuant", ["c", *m.grid("h", 0.03, 131)], "y", domain="own")
    model = m.model({"x": ["N", 12]}, {"y": ["N", 8]}, functions=[function])
    model.opset_import.append(helper.make_opsetid("own", 1))
    found, expected, graph = both(model.SerializeToString(), {"x": normal(N, 12)})
    assert [node.op for node in graph.ir.nodes] == ["dot"]
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("batch", [4, "N", -1])
def test_a_batch_is_fixed_symbolic_or_unknown(batch):
    data = case(conv, {"x": [batch if batch != -1 else None, 3, 8, 8]})
    graph = read(data)
    assert graph.tensors[graph.inputs[0]].shape == (4 if batch == 4 else None, 3, 8, 8)
    found, expected, _ = both(data, {"x": normal(4, 3, 8, 8)})
    np.testing.assert_array_equal(found[0], expected[0])
