"""Every operator of float .tflite files beside LiteRT."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

import qjax
from qjax.contrib.float_models import tflite_file
from qjax.contrib.float_models.graph import OPERATORS
from qjax.contrib.float_models.module import module_of
from tests.contrib.importers.tflite_models import File

X = (2, 3, 4)
IMAGE = (1, 6, 5, 4)
SAME, VALID = 0, 1
RELU, RELU_N1, RELU6 = 1, 2, 3
rng = np.random.default_rng(0)


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@dataclasses.dataclass
class Case:
    """inputs: arrays, of which those whose places are in `constants` are stored in the file; None for an absent one."""

    inputs: list[Any]
    constants: tuple[int, ...] = ()
    options: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ("float32",)


def unary(low: float = -2.0, high: float = 2.0) -> Case:
    return Case([floats(*X, low=low, high=high)])


def binary(options: str = "", **fields: Any) -> Case:
    return Case([floats(*X), floats(3, 1, low=0.5)], (), options, fields)


def compared() -> Case:
    return Case([np.round(floats(*X)), np.round(floats(4))], outputs=("bool",))


def logic() -> Case:
    return Case([floats(*X) > 0, floats(*X) > 0], outputs=("bool",))


def reduced(dtype: str = "float32", axes: tuple[int, ...] = (1, 2), keep: bool = False) -> Case:
    x = floats(*X) if dtype == "float32" else floats(*X) > 0
    return Case([x, ints(*axes)], (1,), "Reducer", {"keepDims": keep}, (dtype,))


def conv(**fields: Any) -> dict[str, Any]:
    return {"padding": SAME, "strideH": 1, "strideW": 1, **fields}


POOL = {"padding": SAME, "strideH": 2, "strideW": 2, "filterHeight": 3, "filterWidth": 2}
W = [floats(8, 3, 3, 4), floats(8)]

CASES: dict[str, Case] = {
    "ABS": unary(),
    "ADD": binary("Add", fusedActivationFunction=RELU),
    "ADD_N": Case([floats(*X), floats(*X), floats(*X)], options="AddN"),
    "ARG_MAX": Case([floats(*X), ints(-1)[0]], (1,), "ArgMax", {"outputType": 2}, ("int32",)),
    "ARG_MIN": Case([floats(*X), ints(1)[0]], (1,), "ArgMin", {"outputType": 2}, ("int32",)),
    "ATAN2": Case([floats(*X), floats(*X)]),
    "AVERAGE_POOL_2D": Case([floats(*IMAGE)], (), "Pool2D", POOL),
    "BATCH_MATMUL": Case([floats(2, 3, 4), floats(2, 5, 4)], (), "BatchMatMul", {"adjY": True}),
    "BATCH_TO_SPACE_ND": Case([floats(4, 2, 2, 3), ints(2, 2), ints((0, 1), (1, 0))], (1, 2), "BatchToSpaceND"),
    "BROADCAST_TO": Case([floats(3, 1), ints(2, 3, 4)], (1,)),
    "CAST": Case([floats(*X)], (), "Cast", {"inDataType": 0, "outDataType": 2}, ("int32",)),
    "CEIL": unary(),
    "CONCATENATION": Case([floats(*X), floats(2, 1, 4)], (), "Concatenation", {"axis": 1}),
    "CONV_2D": Case([floats(*IMAGE), *W], (1, 2), "Conv2D", conv(fusedActivationFunction=RELU6, strideH=2)),
    "COS": unary(),
    "CUMSUM": Case([floats(*X), ints(1)[0]], (1,), "Cumsum", {"exclusive": True, "reverse": True}),
    "DEPTHWISE_CONV_2D": Case(
        [floats(*IMAGE), floats(1, 3, 2, 8), floats(8)],
        (1, 2),
        "DepthwiseConv2D",
        conv(depthMultiplier=2, fusedActivationFunction=RELU_N1),
    ),
    "DEPTH_TO_SPACE": Case([floats(1, 2, 3, 8)], (), "DepthToSpace", {"blockSize": 2}),
    "DIV": binary("Div"),
    "ELU": unary(),
    "EMBEDDING_LOOKUP": Case([ints(3, 0, 2), floats(5, 4)], (1,)),
    "EQUAL": compared(),
    "EXP": unary(),
    "EXPAND_DIMS": Case([floats(*X), ints(-1)[0]], (1,), "ExpandDims"),
    "FILL": Case([ints(2, 3), floats(1)[0]], (0,), "Fill"),
    "FLOOR": unary(),
    "FLOOR_DIV": Case([floats(*X), floats(*X, low=0.5)], (), "FloorDiv"),
    "FLOOR_MOD": Case([floats(*X), floats(*X, low=0.5)], (), "FloorMod"),
    "FULLY_CONNECTED": Case(
        [floats(3, 4), floats(7, 4), floats(7)], (1, 2), "FullyConnected", {"fusedActivationFunction": RELU}
    ),
    "GATHER": Case([floats(*X), ints(2, 0, 1)], (1,), "Gather", {"axis": 1}),
    "GATHER_ND": Case([floats(*X), ints((0, 1), (1, 2))], (1,), "GatherNd"),
    "GELU": Case([floats(*X)], (), "Gelu", {"approximate": True}),
    "GREATER": compared(),
    "GREATER_EQUAL": compared(),
    "HARD_SWISH": unary(-5, 5),
    "L2_NORMALIZATION": Case([floats(*X)], (), "L2Norm"),
    "LEAKY_RELU": Case([floats(*X)], (), "LeakyRelu", {"alpha": 0.1}),
    "LESS": compared(),
    "LESS_EQUAL": compared(),
    "LOCAL_RESPONSE_NORMALIZATION": Case(
        [floats(*IMAGE)],
        (),
        "LocalResponseNormalization",
        {"radius": 1, "bias": 1.0, "alpha": 0.5, "beta": 0.75},
    ),
    "LOG": unary(0.1),
    "LOGICAL_AND": logic(),
    "LOGICAL_NOT": Case([floats(*X) > 0], outputs=("bool",)),
    "LOGICAL_OR": logic(),
    "LOGISTIC": unary(),
    "LOG_SOFTMAX": unary(),
    "MAXIMUM": binary(),
    "MAX_POOL_2D": Case([floats(*IMAGE)], (), "Pool2D", {**POOL, "padding": VALID, "fusedActivationFunction": RELU}),
    "MEAN": reduced(keep=True),
    "MINIMUM": binary(),
    "MIRROR_PAD": Case([floats(*X), ints((0, 0), (1, 2), (2, 1))], (1,), "MirrorPad", {"mode": 0}),
    "MUL": binary("Mul"),
    "NEG": unary(),
    "NOT_EQUAL": compared(),
    "ONE_HOT": Case([ints(2, 0, 3), ints(4)[0], floats(1)[0], floats(1)[0]], (1, 2, 3), "OneHot", {"axis": -1}),
    "PACK": Case([floats(*X), floats(*X)], (), "Pack", {"axis": 1, "valuesCount": 2}),
    "PAD": Case([floats(*X), ints((0, 0), (1, 2), (2, 1))], (1,), "Pad"),
    "PADV2": Case([floats(*X), ints((0, 0), (1, 2), (2, 1)), floats(1)[0]], (1, 2), "PadV2"),
    "POW": Case([floats(*X, low=0.1), floats(*X)], (), "Pow"),
    "PRELU": Case([floats(*IMAGE), floats(1, 1, 4)], (1,)),
    "RANGE": Case([ints(1)[0], ints(9)[0], ints(3)[0]], (0, 1, 2), "Range", outputs=("int32",)),
    "RANK": Case([floats(*X)], (), "Rank", outputs=("int32",)),
    "REDUCE_ALL": reduced("bool"),
    "REDUCE_ANY": reduced("bool"),
    "REDUCE_MAX": reduced(axes=(-1,)),
    "REDUCE_MIN": reduced(),
    "REDUCE_PROD": reduced(),
    "RELU": unary(),
    "RELU6": unary(-8, 8),
    "RELU_0_TO_1": unary(),
    "RELU_N1_TO_1": unary(),
    "RESHAPE": Case([floats(*X), ints(2, -1)], (1,), "Reshape"),
    "RESIZE_BILINEAR": Case([floats(*IMAGE), ints(9, 4)], (1,), "ResizeBilinear", {"halfPixelCenters": True}),
    "RESIZE_NEAREST_NEIGHBOR": Case([floats(*IMAGE), ints(12, 7)], (1,), "ResizeNearestNeighbor"),
    "REVERSE_V2": Case([floats(*X), ints(1)], (1,), "ReverseV2"),
    "ROUND": unary(),
    "RSQRT": unary(0.1),
    "SELECT": Case([floats(2) > 0, floats(*X), floats(*X)], (), "Select"),
    "SELECT_V2": Case([floats(3, 1) > 0, floats(*X), floats(4)], (), "SelectV2"),
    "SHAPE": Case([floats(*X)], (), "Shape", {"outType": 2}, ("int32",)),
    "SIGN": unary(),
    "SIN": unary(),
    "SLICE": Case([floats(*X), ints(0, 1, 2), ints(2, -1, 1)], (1, 2), "Slice"),
    "SOFTMAX": Case([floats(*X)], (), "Softmax", {"beta": 0.5}),
    "SPACE_TO_BATCH_ND": Case([floats(1, 3, 4, 3), ints(2, 2), ints((0, 1), (1, 1))], (1, 2), "SpaceToBatchND"),
    "SPACE_TO_DEPTH": Case([floats(1, 4, 6, 3)], (), "SpaceToDepth", {"blockSize": 2}),
    "SPLIT": Case([ints(2)[0], floats(*X)], (0,), "Split", {"numSplits": 2}, ("float32",) * 2),
    "SPLIT_V": Case([floats(*X), ints(1, -1), ints(1)[0]], (1, 2), "SplitV", {"numSplits": 2}, ("float32",) * 2),
    "SQRT": unary(0.1),
    "SQUARE": unary(),
    "SQUARED_DIFFERENCE": binary("SquaredDifference"),
    "SQUEEZE": Case([floats(2, 1, 3, 1)], (), "Squeeze", {"squeezeDims": [1]}),
    "STRIDED_SLICE": Case(
        [floats(3, 4, 5), ints(0, 1, 4), ints(3, 2, 0), ints(2, 1, -2)],
        (1, 2, 3),
        "StridedSlice",
        {"endMask": 1, "shrinkAxisMask": 2},
    ),
    "SUB": binary("Sub"),
    "SUM": reduced(),
    "TANH": unary(),
    "TILE": Case([floats(*X), ints(1, 2, 2)], (1,), "Tile"),
    "TOPK_V2": Case([floats(*X), ints(2)[0]], (1,), "TopKV2", {}, ("float32", "int32")),
    "TRANSPOSE": Case([floats(*X), ints(2, 0, 1)], (1,), "Transpose"),
    "TRANSPOSE_CONV": Case(
        [ints(1, 11, 10, 8), floats(8, 3, 3, 4), floats(*IMAGE), floats(8)],
        (0, 1, 3),
        "TransposeConv",
        {"padding": SAME, "strideH": 2, "strideW": 2},
    ),
    "UNPACK": Case([floats(*X)], (), "Unpack", {"axis": 0, "num": 2}, ("float32",) * 2),
    "ZEROS_LIKE": unary(),
}
VARIANTS: dict[str, tuple[str, Case]] = {
    "conv, dilated, grouped": (
        "CONV_2D",
        Case(
            [floats(*IMAGE), floats(6, 3, 3, 2), floats(6)],
            (1, 2),
            "Conv2D",
            conv(dilationHFactor=2, dilationWFactor=2),
        ),
    ),
    "fully connected, rank 3": (
        "FULLY_CONNECTED",
        Case([floats(*X), floats(7, 4)], (1,), "FullyConnected", {"keepNumDims": True}),
    ),
    "resize, corners": (
        "RESIZE_BILINEAR",
        Case([floats(*IMAGE), ints(9, 4)], (1,), "ResizeBilinear", {"alignCorners": True}),
    ),
    "resize, neither": ("RESIZE_BILINEAR", Case([floats(*IMAGE), ints(9, 4)], (1,), "ResizeBilinear")),
    "nearest, half pixels": (
        "RESIZE_NEAREST_NEIGHBOR",
        Case([floats(*IMAGE), ints(4, 7)], (1,), "ResizeNearestNeighbor", {"halfPixelCenters": True}),
    ),
    "mirror, symmetric": (
        "MIRROR_PAD",
        Case([floats(*X), ints((0, 0), (1, 2), (2, 1))], (1,), "MirrorPad", {"mode": 1}),
    ),
    "transposed, valid": (
        "TRANSPOSE_CONV",
        Case(
            [ints(1, 13, 11, 8), floats(8, 3, 3, 4), floats(*IMAGE)],
            (0, 1),
            "TransposeConv",
            {"padding": VALID, "strideH": 2, "strideW": 2},
        ),
    ),
    "gelu by erf": ("GELU", Case([floats(*X)], (), "Gelu")),
}
ALL = {**{name: (name, case) for name, case in CASES.items()}, **VARIANTS}


def written(op: str, case: Case) -> bytes:
    file = File()
    places = [
        file.tensor(str(value.dtype), value.shape, None, value if i in case.constants else None)
        for i, value in enumerate(case.inputs)
    ]
    outputs = [file.tensor(dtype, ()) for dtype in case.outputs]
    file.operator(op, places, outputs, case.options, **case.fields)
    return file.to_bytes([p for i, p in enumerate(places) if i not in case.constants], outputs)


def beside_litert(data: bytes, given: list[Any]) -> None:
    """The module's outputs are LiteRT's."""
    model = module_of(*tflite_file.read(data))
    runtime = Interpreter(model_content=data)
    runtime.allocate_tensors()
    for details, value in zip(runtime.get_input_details(), given, strict=True):
        runtime.set_tensor(details["index"], value)
    runtime.invoke()
    expected = [runtime.get_tensor(details["index"]) for details in runtime.get_output_details()]
    found = model(*given)
    found = list(found.values()) if isinstance(found, dict) else [found]
    assert len(found) == len(expected)
    for got, want in zip(map(np.asarray, found), expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, 1e-5, 2e-6)
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ALL)
def test_one_operator(name: str):
    op, case = ALL[name]
    beside_litert(written(op, case), [value for i, value in enumerate(case.inputs) if i not in case.constants])


def test_weights_of_float16():
    file, w = File(), floats(3, 4).astype(np.float16)
    x, half, whole, y = (
        file.tensor("float32", (1, 4)),
        file.tensor("float16", w.shape, None, w, name="w"),
        file.tensor("float32", w.shape),
        file.tensor("float32", (1, 3)),
    )
    file.operator("DEQUANTIZE", [half], [whole], "Dequantize")
    file.operator("FULLY_CONNECTED", [x, whole, -1], [y], "FullyConnected")
    data = file.to_bytes([x], [y])
    beside_litert(data, [floats(1, 4)])
    model: Any = module_of(*tflite_file.read(data))
    np.testing.assert_array_equal(model.w[...], w.astype(np.float32))


def test_an_lstm():
    """Its states are variables of the interpreter, which start from zeros."""
    file, units = File(), 5
    x, y = file.tensor("float32", (2, 7, 3)), file.tensor("float32", (2, 7, units))
    inputs, recurrent, biases = (
        [file.tensor("float32", shape, None, floats(*shape)) for _ in range(4)]
        for shape in ((units, 3), (units, units), (units,))
    )
    states = [file.tensor("float32", (2, units), isVariable=True) for _ in range(2)]
    operands = [x, *inputs, *recurrent, *[-1] * 3, *biases, -1, -1, *states, *[-1] * 4]
    name = "UnidirectionalSequenceLSTM"
    file.operator("UNIDIRECTIONAL_SEQUENCE_LSTM", operands, [y], name, fusedActivationFunction=4)
    beside_litert(file.to_bytes([x], [y]), [floats(2, 7, 3)])


def test_every_operator_has_a_case():
    known = {name.removeprefix("tflite.") for name in OPERATORS if name.startswith("tflite.")}
    assert known - set(CASES) == {"DEQUANTIZE", "UNIDIRECTIONAL_SEQUENCE_LSTM"}
    assert len(known) >= 95


def test_weights_of_integers_are_the_floats_that_they_represent():
    """A file with hybrid weights: int8 with a scale for each channel, below float activations."""
    from tests.contrib.importers.tflite_models import Grid

    codes, scale = rng.integers(-127, 128, (3, 4)).astype(np.int8), np.array([0.1, 0.2, 0.3], np.float32)
    file = File()
    x, w = file.tensor("float32", (1, 4)), file.tensor("int8", (3, 4), Grid(scale), codes, name="w")
    y = file.tensor("float32", (1, 3))
    file.operator("FULLY_CONNECTED", [x, w, -1], [y], "FullyConnected")
    model: Any = module_of(*tflite_file.read(file.to_bytes([x], [y])))
    np.testing.assert_array_equal(model.w[...], codes.astype(np.float32) * scale[:, None])
    assert model.parameter_names == {"w": "w"}


def test_a_quantized_file_and_unknown_operators_are_refused():
    from tests.contrib.importers.tflite_models import Grid

    file = File()
    x, y = file.tensor("int8", (1, 4), Grid(0.1)), file.tensor("int8", (1, 4), Grid(0.1))
    file.operator("RELU", [x], [y])
    with pytest.raises(qjax.Unsupported, match=r"the file is quantized: .*qjax\.read"):
        tflite_file.read(file.to_bytes([x], [y]))
    file = File()
    x, y, z = (file.tensor("float32", (1, 4), name=name) for name in ("x", "first", "second"))
    file.operator("HASHTABLE_SIZE", [x], [y])
    file.operator("RFFT2D", [y], [z])
    with pytest.raises(qjax.Unsupported, match="2 parts") as error:
        tflite_file.read(file.to_bytes([x], [z]))
    assert "HASHTABLE_SIZE 'first'" in str(error.value)
    assert "RFFT2D 'second'" in str(error.value)
