"""The builtin operators of a .tflite file that qjax uses: options, versions, first runtime.

A version defines which types an operator has; a runtime refuses a version that it does not know. Sources:
tflite/tools/versioning/op_version.cc and runtime_version.cc of LiteRT.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Operator:
    """One builtin operator.

    options: the name of its options in the schema, without the T; "": none. versions: by dtype of the input that
    decides ("8": int8 and uint8); a dtype without an entry has version 1. decides: the index of that input. large:
    (rank, version) for inputs of more dimensions than the versions above support.
    """

    options: str
    versions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decides: int = 0
    large: tuple[int, int] | None = None


_ELEMENTWISE = {"8": 2, "int16": 4}
_POOL = {"8": 2, "int16": 3}

OPERATORS: Mapping[str, Operator] = {
    "FULLY_CONNECTED": Operator("FullyConnectedOptions", {"8": 4, "int16": 7}),
    "CONV_2D": Operator("Conv2DOptions", {"8": 3, "int16": 4}),
    "DEPTHWISE_CONV_2D": Operator("DepthwiseConv2DOptions", {"8": 3, "int16": 5}),
    "BATCH_MATMUL": Operator("BatchMatMulOptions", {"8": 2, "int16": 3}),
    "ADD": Operator("AddOptions", {"8": 2, "int16": 3, "int64": 4}),
    "SUB": Operator("SubOptions", {"8": 2, "int16": 5, "int64": 4}),
    "MUL": Operator("MulOptions", {"8": 3, "int16": 4, "int64": 5}),
    "DEQUANTIZE": Operator("DequantizeOptions", {"8": 2, "int16": 3}),
    "QUANTIZE": Operator("QuantizeOptions", {"8": 2, "int16": 2, "float32": 2}),
    "AVERAGE_POOL_2D": Operator("Pool2DOptions", _POOL),
    "MAX_POOL_2D": Operator("Pool2DOptions", _POOL),
    "MEAN": Operator("ReducerOptions", _POOL),
    "SUM": Operator("ReducerOptions", {"8": 2}),
    "REDUCE_MAX": Operator("ReducerOptions", _POOL),
    "REDUCE_MIN": Operator("ReducerOptions", _POOL),
    "REDUCE_ALL": Operator("ReducerOptions"),
    **dict.fromkeys(("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT"), Operator("")),
    **dict.fromkeys(("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "EQUAL", "NOT_EQUAL"), Operator("", {"8": 2})),
    "SELECT_V2": Operator("SelectV2Options"),
    "ARG_MAX": Operator("ArgMaxOptions", {"8": 2}),
    "ARG_MIN": Operator("ArgMinOptions", {"8": 2}),
    "TOPK_V2": Operator("TopKV2Options", {"8": 2, "int16": 3}),
    "LOGISTIC": Operator("", _POOL),
    "TANH": Operator("", _POOL),
    "SOFTMAX": Operator("SoftmaxOptions", _POOL),
    "LOG_SOFTMAX": Operator("LogSoftmaxOptions", {"8": 2}),
    "MAXIMUM": Operator("MaximumMinimumOptions", _ELEMENTWISE),
    "MINIMUM": Operator("MaximumMinimumOptions", _ELEMENTWISE),
    "CONCATENATION": Operator("ConcatenationOptions", _POOL),
    "PAD": Operator("PadOptions", _POOL, large=(4, 4)),
    "PADV2": Operator("PadV2Options", _POOL, large=(4, 4)),
    "RESHAPE": Operator("ReshapeOptions"),
    "TRANSPOSE": Operator("TransposeOptions", {"8": 2, "int16": 5, "bool": 3}, large=(5, 6)),
    "SLICE": Operator("SliceOptions", {"8": 2, "int16": 4}, large=(4, 5)),
    "STRIDED_SLICE": Operator("StridedSliceOptions", {"8": 2, "bool": 3}, large=(4, 4)),
    "BROADCAST_TO": Operator("BroadcastToOptions", {"8": 3, "int16": 3, "int32": 2, "bool": 2}),
    "GATHER": Operator("GatherOptions", {"8": 2, "int16": 4, "bool": 3}),
    "SQUARED_DIFFERENCE": Operator("SquaredDifferenceOptions", {"8": 2}),
    "RESIZE_BILINEAR": Operator("ResizeBilinearOptions", {"8": 3, "int16": 4}),
    "CAST": Operator("CastOptions", {"8": 3}),
    # functions of one tensor that qjax does not write, but for which it asks a runtime
    **dict.fromkeys(("ELU", "LOG", "SQRT", "RSQRT", "RELU_0_TO_1", "PRELU"), Operator("")),
    "HARD_SWISH": Operator("HardSwishOptions"),
    "LEAKY_RELU": Operator("LeakyReluOptions", {"8": 2, "int16": 2}),
    "GELU": Operator("GeluOptions", {"8": 2}),
    "EXP": Operator("ExpOptions"),
    "ABS": Operator("AbsOptions", {"8": 2, "int16": 3}),
    "NEG": Operator("NegOptions"),
    # float steps between codes, likewise
    "DIV": Operator("DivOptions"),
    "SQUARE": Operator("SquareOptions"),
    **dict.fromkeys(("FLOOR", "CEIL", "ROUND", "RELU", "RELU6", "RELU_N1_TO_1"), Operator("")),
}

_SINCE: Mapping[tuple[str, int], str] = {
    ("FULLY_CONNECTED", 3): "1.14.0",
    ("FULLY_CONNECTED", 4): "1.14.0",
    ("FULLY_CONNECTED", 5): "2.0.0",
    ("FULLY_CONNECTED", 7): "2.3.0",
    ("FULLY_CONNECTED", 9): "2.3.0",
    ("FULLY_CONNECTED", 10): "2.11.0",
    ("FULLY_CONNECTED", 11): "2.15.0",
    ("FULLY_CONNECTED", 12): "2.17.0",
    ("CONV_2D", 3): "1.14.0",
    ("CONV_2D", 4): "2.3.0",
    ("CONV_2D", 6): "2.9.0",
    ("CONV_2D", 7): "2.11.0",
    ("DEPTHWISE_CONV_2D", 3): "1.14.0",
    ("DEPTHWISE_CONV_2D", 5): "2.3.0",
    ("DEPTHWISE_CONV_2D", 7): "2.11.0",
    ("BATCH_MATMUL", 2): "2.3.0",
    ("BATCH_MATMUL", 3): "2.4.0",
    ("ADD", 2): "1.14.0",
    ("ADD", 3): "2.4.0",
    ("ADD", 4): "2.6.0",
    ("SUB", 2): "1.14.0",
    ("SUB", 5): "2.4.0",
    ("MUL", 3): "1.15.0",
    ("MUL", 4): "2.3.0",
    ("DEQUANTIZE", 2): "1.14.0",
    ("DEQUANTIZE", 3): "2.2.0",
    ("QUANTIZE", 2): "2.2.0",
    ("AVERAGE_POOL_2D", 2): "1.14.0",
    ("AVERAGE_POOL_2D", 3): "2.3.0",
    ("MAX_POOL_2D", 2): "1.14.0",
    ("MAX_POOL_2D", 3): "2.3.0",
    ("MEAN", 2): "1.14.0",
    ("MEAN", 3): "2.4.0",
    ("SUM", 1): "1.10.0",
    ("REDUCE_MAX", 2): "1.14.0",
    ("REDUCE_MAX", 3): "2.5.0",
    ("REDUCE_MIN", 1): "1.11.0",
    ("REDUCE_MIN", 2): "1.14.0",
    ("REDUCE_MIN", 3): "2.5.0",
    ("REDUCE_ALL", 1): "2.6.0",
    **{(name, 1): "1.11.0" for name in ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")},
    **{
        (name, 1): "1.14.0"
        for name in ("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "EQUAL", "NOT_EQUAL", "MAXIMUM", "MINIMUM")
    },
    ("SELECT_V2", 1): "2.2.0",
    ("ARG_MAX", 1): "1.9.0",
    ("ARG_MAX", 2): "1.14.0",
    ("ARG_MIN", 1): "1.9.0",
    ("ARG_MIN", 2): "1.14.0",
    ("TOPK_V2", 2): "1.14.0",
    ("TOPK_V2", 3): "2.13.0",
    ("SOFTMAX", 2): "1.14.0",
    ("LOG_SOFTMAX", 2): "1.14.0",
    ("LOGISTIC", 2): "1.14.0",
    ("TANH", 2): "1.14.0",
    ("MAXIMUM", 2): "1.14.0",
    ("MAXIMUM", 4): "2.3.0",
    ("MINIMUM", 2): "1.14.0",
    ("MINIMUM", 4): "2.3.0",
    ("CONCATENATION", 2): "1.14.0",
    ("CONCATENATION", 3): "2.3.0",
    ("PAD", 2): "1.14.0",
    ("PAD", 3): "2.4.0",
    ("PAD", 4): "2.6.0",
    ("PADV2", 2): "1.14.0",
    ("PADV2", 3): "2.4.0",
    ("PADV2", 4): "2.6.0",
    ("TRANSPOSE", 2): "1.14.0",
    ("TRANSPOSE", 3): "1.15.0",
    ("TRANSPOSE", 5): "2.4.0",
    ("TRANSPOSE", 6): "2.12.0",
    ("SLICE", 2): "1.14.0",
    ("SLICE", 4): "2.4.0",
    ("SLICE", 5): "2.5.0",
    ("STRIDED_SLICE", 2): "1.14.0",
    ("STRIDED_SLICE", 3): "2.1.0",
    ("STRIDED_SLICE", 4): "2.2.0",
    ("BROADCAST_TO", 2): "2.5.0",
    ("BROADCAST_TO", 3): "2.5.0",
    ("GATHER", 2): "1.14.0",
    ("GATHER", 3): "1.15.0",
    ("GATHER", 4): "2.4.0",
    ("GATHER", 5): "2.5.0",
    ("SQUARED_DIFFERENCE", 2): "2.5.0",
    ("RESIZE_BILINEAR", 3): "2.2.0",
    ("RESIZE_BILINEAR", 4): "2.6.0",
    ("CAST", 3): "2.8.0",
}
"""The first TensorFlow Lite that knows a version; for all others 1.5.0."""

_WEIGHTED = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D")


def version(
    operator: str,
    dtypes: Sequence[str],
    rank: int,
    *,
    per_channel: bool = False,
    grouped: bool = False,
    batched: bool = False,
) -> int:
    """The version of an operator with inputs of these dtypes.

    rank: of the deciding input. per_channel: whether its kernel has a scale per channel. grouped: whether it is a
    convolution of several groups. batched: whether it is a GATHER with separate rows for each example.
    """
    if batched:
        return 5
    known = OPERATORS[operator]
    dtype = dtypes[known.decides]
    if operator in _WEIGHTED and len(dtypes) > 1 and dtypes[1] == "int4":
        return 10 if operator == "FULLY_CONNECTED" else 7
    if operator == "FULLY_CONNECTED" and per_channel:
        return 11 if dtype == "int16" else 12
    if operator == "FULLY_CONNECTED" and dtype == "float32" and dtypes[1] == "int8":
        # version 3 only has symmetric codes of rows
        return 9
    if operator == "CONV_2D" and grouped:
        return 6
    if known.large is not None and rank > known.large[0]:
        return known.large[1]
    return known.versions.get("8" if dtype in ("int8", "uint8") else dtype, 1)


def first_runtime(used: Sequence[tuple[str, int]]) -> str:
    """The first TensorFlow Lite that knows all these operators in these versions."""
    found = [_SINCE.get(key, "1.5.0") for key in used]
    return max(found, key=lambda text: tuple(int(part) for part in text.split(".")), default="1.5.0")
