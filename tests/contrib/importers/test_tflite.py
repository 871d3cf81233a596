"""Models that other tools could have written, read as graphs: LiteRT and TFLite Micro give the graph's codes."""

from typing import Any

import numpy as np
import pytest

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.contrib.importers import tflite_cases as cases
from tests.contrib.importers.tflite_models import File, Grid, Models, schema
from tests.export.emit.tflite_runtimes import MODES, litert, micro

RUNS = 1
NOT_IN_LITERT = {
    "int8": (),
    "uint8": (
        *("squared_difference", "squared_difference, rows", "batch_matmul", "batch_matmul, adjoint", "elu", "exp"),
        *("log", "sqrt", "rsqrt", "abs"),
    ),
    # sums of products of two tensors of 16 bits may need more than 32
    "int16": (
        *("squared_difference", "squared_difference, rows"),
        *("relu_n1_to_1", "relu_n1_to_1, other grid", "batch_matmul", "batch_matmul, adjoint", "hard_swish", "elu"),
        *("log", "sqrt", "rsqrt", "relu_0_to_1", "softmax", "greater", "less_equal", "equal", "arg_max", "arg_min"),
        *("space_to_depth", "depth_to_space"),
    ),
}
NOT_IN_MODE = {"tflite_reference": ("elu",)}
NOT_IN_MICRO = ("relu_n1_to_1", "relu_n1_to_1, other grid", "relu6, other grid", "tile", "top_k")
NOT_IN_MICRO += ("gelu", "gelu, approximate", "exp", "log", "sqrt", "relu_0_to_1")


def mismatches(graph: Graph, run) -> dict[str, int]:
    """Values that differ, by output; `run`: inputs -> outputs by name."""
    interpreter, rng = Interpreter(graph), np.random.default_rng(0)
    wrong: dict[str, int] = {}
    for _ in range(RUNS):
        inputs = []
        for name in graph.inputs:
            tensor = graph.tensors[name]
            q, shape = tensor.quantization, [n or 1 for n in tensor.shape]
            assert q is not None
            inputs.append(rng.integers(q.qmin, q.qmax + 1, shape).astype(tensor.dtype))
        found = run(inputs)
        for name, expected in zip(graph.outputs, interpreter(*inputs), strict=True):
            assert found[name].shape == expected.shape, name
            assert found[name].dtype == expected.dtype, name
            different = int((found[name] != np.asarray(expected)).sum())
            if different:
                wrong[name] = wrong.get(name, 0) + different
    return wrong


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("group", ["weighted", "transposed", "elementwise", "functions", "choices", "moves"])
@pytest.mark.sampled(3)
def test_every_operator_is_litert(group, dtype):
    everywhere = group != "moves" and (group, dtype) not in (("choices", "uint8"), ("choices", "int16"))
    for target, mode in MODES.items() if everywhere else (("tflite_reference", "reference"),):
        data = getattr(cases, group)(dtype, skip=NOT_IN_LITERT[dtype] + NOT_IN_MODE.get(target, ()))
        graph = reader.read(data, target=target)
        assert mismatches(graph, lambda x, mode=mode, data=data: litert(data, mode, x, every=False)) == {}, target


@pytest.mark.sampled(5)
@pytest.mark.parametrize("group", ["weighted", "transposed", "elementwise", "functions", "choices", "moves"])
def test_every_operator_is_tflite_micro(group):
    data = getattr(cases, group)("int8", skip=NOT_IN_MICRO)
    graph = reader.read(data, target="tflite_micro")
    assert mismatches(graph, lambda x: micro(data, x, graph.outputs)) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"])
def test_accumulators_near_ties_of_uint8(name):
    """Weights of zero and the accumulator as the bias: the scales of uint8 kernels are formed in float32."""
    count = 4000
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x_scale, w_scale = np.float32(rng.uniform(0.01, 0.1)), np.float32(rng.uniform(0.001, 0.05))
        y_scale = np.float32(x_scale * w_scale * 2.0 ** rng.uniform(7, 15))
        step = float(x_scale) * float(w_scale) / float(y_scale)
        ties = np.rint((rng.integers(-110, 110, count) + 0.5) / step) + rng.integers(-1, 2, count)
        matrix = name == "FULLY_CONNECTED"
        file = File()
        x = file.tensor("uint8", (1, 1) if matrix else (1, 1, 1, 1), Grid(x_scale, 128))
        shape = (count, 1) if matrix else (1, 1, 1, count) if name.startswith("DEPTH") else (count, 1, 1, 1)
        w = file.tensor("uint8", shape, Grid(w_scale, 120), np.full(shape, 120, np.uint8))
        bias = file.tensor("int32", (count,), Grid(x_scale * w_scale), ties.astype(np.int32))
        y = file.tensor("uint8", (1, count) if matrix else (1, 1, 1, count), Grid(y_scale, 128))
        options = {
            "FULLY_CONNECTED": ("FullyConnected", {}),
            "CONV_2D": ("Conv2D", {"strideH": 1, "strideW": 1}),
            "DEPTHWISE_CONV_2D": ("DepthwiseConv2D", {"strideH": 1, "strideW": 1, "depthMultiplier": count}),
            "TRANSPOSE_CONV": ("TransposeConv", {"strideH": 1, "strideW": 1}),
        }[name]
        inputs = [file.numbers([1, 1, 1, count]), w, x, bias] if name.startswith("TRANS") else [x, w, bias]
        file.operator(name, inputs, [y], options[0], **options[1])
        data = file.to_bytes([x], [y])
        for target, mode in MODES.items():
            graph = reader.read(data, target=target)
            assert mismatches(graph, lambda x, data=data, mode=mode: litert(data, mode, x, every=False)) == {}


def float_model() -> bytes:
    """QUANTIZE, an activation, a product, DEQUANTIZE; a free batch."""
    m = Models("int8", 9)
    file = File()
    grid, out = Grid(0.05, -7), Grid(0.3, 11)
    x = file.tensor("float32", (1, 4, 3), name="pixels", shapeSignature=[-1, 4, 3])
    q = file.tensor("int8", (1, 4, 3), grid)
    flat = file.tensor("int8", (1, 12), grid)
    w = file.tensor("int8", (5, 12), Grid(np.linspace(0.01, 0.02, 5)), m.codes((5, 12)).clip(-127))
    y = file.tensor("int8", (1, 5), out)
    real = file.tensor("float32", (1, 5))
    file.operator("QUANTIZE", [x], [q], "Quantize")
    file.operator("RESHAPE", [q, file.numbers([-1, 12])], [flat], "Reshape")
    file.operator("FULLY_CONNECTED", [flat, w, -1], [y], "FullyConnected")
    file.operator("DEQUANTIZE", [y], [real], "Dequantize")
    return file.to_bytes([x], [real])


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", MODES)
def test_float_inputs_and_outputs(tmp_path, target):
    path = tmp_path / "model.tflite"
    path.write_bytes(float_model())
    graph = qjax.read(path, target)
    assert graph.ir.tensors[graph.ir.inputs[0]].shape == (None, 4, 3)
    x = np.random.default_rng(0).normal(size=(10, 4, 3)).astype(np.float32)
    codes = graph.run(graph.quantize(x))
    assert np.array_equal(np.asarray(codes), litert(float_model(), MODES[target], [x])["t4"])
    if target == "tflite_reference":
        # the optimised DEQUANTIZE adds in another order, and its reals differ in the last bit
        (expected,) = litert(float_model(), MODES[target], [x], every=False).values()
        assert np.array_equal(np.asarray(graph(x)), expected)


def test_shapes_that_are_computed_from_shapes():
    """SHAPE, STRIDED_SLICE, PACK and RESHAPE: the batch is free."""
    file, grid = File(), Grid(0.1, 3)
    x = file.tensor("int8", (1, 2, 6), grid, shapeSignature=[-1, 2, 6])
    shape = file.tensor("int32", (3,))
    batch = file.tensor("int32", ())
    packed = file.tensor("int32", (3,))
    y = file.tensor("int8", (1, 4, 3), grid)
    vectors = [file.numbers([0]), file.numbers([1]), file.numbers([1])]
    four, three = file.numbers(4), file.numbers(3)
    file.operator("SHAPE", [x], [shape], "Shape", outType=2)
    file.operator("STRIDED_SLICE", [shape, *vectors], [batch], "StridedSlice", shrinkAxisMask=1)
    file.operator("PACK", [batch, four, three], [packed], "Pack", valuesCount=3)
    file.operator("RESHAPE", [x, packed], [y], "Reshape")
    graph = reader.read(file.to_bytes([x], [y]))
    assert [node.op for node in graph.nodes] == ["reshape"]
    assert graph.tensors[graph.outputs[0]].shape == (None, 4, 3)


def test_rows_of_a_table():
    file, grid = File(), Grid(0.1, 3)
    m = Models("int8")
    index = file.tensor("int32", (1, 3))
    table = file.tensor("int8", (10, 4), grid, m.codes((10, 4)))
    y, padded = (file.tensor("int8", (1, rows, 4), grid) for rows in (3, 4))
    lowest = file.tensor("int8", (1,), grid, np.asarray([-128], np.int8))
    file.operator("GATHER", [table, index], [y], "Gather")
    file.operator("PADV2", [y, file.numbers([[0, 0], [1, 0], [0, 0]]), lowest], [padded], "PadV2")
    data = file.to_bytes([index], [padded])
    graph = reader.read(data)
    indices = np.asarray([[0, 9, 4]], np.int32)
    found = litert(data, "reference", [indices], every=False)
    assert np.array_equal(np.asarray(Interpreter(graph)(indices)[0]), found[graph.outputs[0]])


def test_a_batch_is_free_only_where_examples_stay_apart():
    def batch(*case, **fields) -> int | None:
        m = Models("int8")
        m.simple("y", *case, same=True, **fields)
        return reader.read(m.to_bytes()).tensors["t0"].shape[0]

    assert batch("REDUCE_MAX", ((1, 6, 4),), (1, 4), "Reducer", [[1]]) is None
    assert batch("RESHAPE", ((1, 6, 4),), (6, 4), "Reshape", [[6, 4]]) is None
    assert batch("RESHAPE", ((1, 6, 4),), (1, 24), "Reshape", [[1, -1]]) is None
    assert batch("REDUCE_MAX", ((1, 6, 4),), (6, 4), "Reducer", [[0]]) == 1
    assert batch("CONCATENATION", ((1, 4), (1, 4)), (2, 4), "Concatenation", axis=0) == 1
    assert batch("REVERSE_V2", ((1, 4),), (1, 4), "ReverseV2", [[0]]) == 1
    assert batch("RESHAPE", ((4, 6),), (4, 3, 2), "Reshape", [[4, 3, 2]]) == 4


def test_what_has_no_integers_is_listed_at_once():
    file, grid = File(), Grid(0.1, 3)
    x = file.tensor("int8", (1, 4), grid)
    names = ("LOGISTIC", "LOG_SOFTMAX", "SOFTMAX", "SIN")
    last = x
    for name in names:
        y = file.tensor("int8", (1, 4), Grid(1 / 256, -128))
        file.operator(name, [last], [y], "Softmax" if name == "SOFTMAX" else "")
        last = y
    other = file.tensor("float32", (1, 4))
    file.operator("ADD", [last, file.tensor("float32", (1, 4), None, np.zeros(4, np.float32))], [other], "Add")
    with pytest.raises(ReadError, match="4 parts") as caught:
        reader.read(file.to_bytes([x], [other]))
    for line in ("1 LOG_SOFTMAX ('t2')", "2 SOFTMAX ('t3'): a beta of 0", "3 SIN ('t4')", "float32"):
        assert line in str(caught.value)


def test_a_part_of_a_model(tmp_path):
    file, grid = File(), Grid(0.1, 3)
    x, y, z = (file.tensor("int8", (1, 4), grid, name=name) for name in ("x", "logits", "probabilities"))
    file.operator("RELU", [x], [y])
    file.operator("SOFTMAX", [y], [z], "Softmax", beta=1.0)
    path = tmp_path / "model.tflite"
    path.write_bytes(file.to_bytes([x], [z]))
    with pytest.raises(ReadError, match=r"outputs=\['logits'\]"):
        qjax.read(path)
    graph = qjax.read(path, outputs=["logits"])
    assert graph.ir.outputs == ("logits",)
    with pytest.raises(ValueError, match=r"no operator computes 'nothing'.*'logits'"):
        qjax.read(path, outputs=["nothing"])


@pytest.mark.parametrize(
    ("target", "group", "label"),
    [
        ("tflite_micro", cases.elementwise, "relu6, other grid"),
        ("tflite_optimized_arm", cases.elementwise, "relu, other grid"),
        ("tflite_optimized_arm", cases.transposed, "transpose_conv"),
    ],
)
def test_kernels_whose_bits_are_not_known_are_refused(target, group, label):
    with pytest.raises(ReadError, match=f"kernel of its own under '{target}'"):
        reader.read(group("int8", only=label), target=target)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_a_transposed_convolution_whose_size_is_an_input(dtype):
    """The graph has the size that the file states for the result; the input stays one of the graph."""
    m = Models(dtype, 8)
    two: dict[str, Any] = {"strideH": 2, "strideW": 3}
    m.weighted("y", "TRANSPOSE_CONV", (1, 3, 2, 4), (5, 3, 3, 4), (1, 6, 6, 5), "TransposeConv", 0, first=[0], **two)
    size = m.file.tensor("int32", (4,), name="size")
    m.file.graph.operators[0].inputs[0] = size
    m.inputs.insert(0, size)
    data, wanted = m.to_bytes(), np.asarray([1, 6, 6, 5], np.int32)
    for target, mode in (*MODES.items(), ("tflite_micro", "")):
        graph = reader.read(data, target=target)
        x = np.random.default_rng(0).integers(m.low, m.high + 1, (1, 3, 2, 4)).astype(dtype)
        ours = np.asarray(Interpreter(graph)(wanted, x)[0])
        run = litert(data, mode, [wanted, x], every=False) if mode else micro(data, [wanted, x], ["y"])
        assert np.array_equal(ours, run["y"]), target


def test_names_are_unique():
    file, grid = File(), Grid(0.1, 3)
    x, y, z = (file.tensor("int8", (1, 4), grid, name=name) for name in ("x", "x", ""))
    file.operator("RELU", [x], [y])
    file.operator("RELU6", [y], [z])
    graph = reader.read(file.to_bytes([x], [z]))
    assert graph.inputs == ("x",)
    assert [node.name for node in graph.nodes] == ["x#2", "tensor2"]


def without_shapes(data: bytes, *, inputs: bool = False) -> bytes:
    """The file without the shapes of what its operators compute, or of its inputs."""
    import flatbuffers

    model = schema.ModelT.InitFromPackedBuf(data, 0)
    graph = model.subgraphs[0]
    computed = {index for operator in graph.operators for index in operator.outputs}
    for index in graph.inputs if inputs else computed:
        graph.tensors[index].shape = None
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("group", ["weighted", "elementwise", "choices", "moves"])
def test_shapes_that_follow_from_the_operators(group):
    """A converter that did not know the image's size writes none; the runtime finds them, and so does the reader."""
    data = getattr(cases, group)("int8", skip=("elu",))
    whole, bare = reader.read(data), reader.read(without_shapes(data))
    assert {name: t.shape for name, t in whole.tensors.items()} == {name: t.shape for name, t in bare.tensors.items()}
    assert [(n.op, n.attributes) for n in whole.nodes] == [(n.op, n.attributes) for n in bare.nodes]


def test_shapes_computed_from_shapes():
    file = File()
    x, y, z = (file.tensor("int8", s, Grid(0.1, 3)) for s in ((2, 4, 4, 2), (2, 4, 4, 2), (2, 32)))
    shape, first, both = (file.tensor("int32", s) for s in ((4,), (), (2,)))
    file.operator("RELU", [x], [y])
    file.operator("SHAPE", [y], [shape], "Shape", outType=schema.TensorType.INT32)
    ends = [file.numbers([n]) for n in (0, 1, 1)]
    file.operator("STRIDED_SLICE", [shape, *ends], [first], "StridedSlice", shrinkAxisMask=1)
    file.operator("PACK", [first, file.numbers(32)], [both], "Pack", valuesCount=2)
    file.operator("RESHAPE", [y, both], [z], "Reshape")
    data = file.to_bytes([x], [z])
    graph, codes = reader.read(without_shapes(data)), np.arange(64, dtype=np.int8).reshape(2, 4, 4, 2)
    (found,) = Interpreter(graph)(codes)
    assert np.array_equal(found, litert(data, "reference", [codes])[graph.outputs[0]])
    with pytest.raises(ReadError, match="input 't0': the file has no shape of it"):
        reader.read(without_shapes(data, inputs=True))
