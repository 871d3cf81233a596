"""The enumerations of the .tflite schema as names by number, and the fields of the operators' options.

Source: schema.fbs of LiteRT, version 3.
"""

from collections.abc import Mapping

TENSOR_TYPES = (
    "float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64 resource variant "
    "uint32 uint16 int4 bfloat16 int2 uint4 float8_e4m3fn float8_e5m2"
).split()

ACTIVATIONS = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")

PADDINGS = ("SAME", "VALID")

BUILTIN_OPERATORS = """
ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR
FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM
MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS
SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER BATCH_TO_SPACE_ND
SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE BIDIRECTIONAL_SEQUENCE_RNN
EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG PADV2
GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG
SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT
UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU
SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE
MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND
SELECT_V2 DENSIFY SEGMENT_SUM BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D
CONV_3D IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE
VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL
GELU DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2
UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT
""".split()
"""The operators by number; those behind them are StableHLO's."""

Fields = Mapping[str, tuple[int, str, int]]
"""name -> number in the table, type, default; the type "ints" is a vector of int32."""

_STRIDES = {"padding": (0, "i8", 0), "stride_w": (1, "i32", 0), "stride_h": (2, "i32", 0)}

OPTIONS: Mapping[str, tuple[int, Fields]] = {
    "CONV_2D": (
        1,
        _STRIDES | {"activation": (3, "i8", 0), "dilation_w": (4, "i32", 1), "dilation_h": (5, "i32", 1)},
    ),
    "DEPTHWISE_CONV_2D": (
        2,
        _STRIDES
        | {
            "multiplier": (3, "i32", 0),
            "activation": (4, "i8", 0),
            "dilation_w": (5, "i32", 1),
            "dilation_h": (6, "i32", 1),
        },
    ),
    "TRANSPOSE_CONV": (49, _STRIDES | {"activation": (3, "i8", 0)}),
    "FULLY_CONNECTED": (8, {"activation": (0, "i8", 0), "format": (1, "i8", 0), "keep_dims": (2, "bool", 0)}),
    "BATCH_MATMUL": (101, {"adj_x": (0, "bool", 0), "adj_y": (1, "bool", 0)}),
    "ADD": (11, {"activation": (0, "i8", 0), "powers_of_two": (1, "bool", 1)}),
    "SUB": (28, {"activation": (0, "i8", 0), "powers_of_two": (1, "bool", 1)}),
    "MUL": (21, {"activation": (0, "i8", 0)}),
    **dict.fromkeys(
        ("AVERAGE_POOL_2D", "MAX_POOL_2D"),
        (5, _STRIDES | {"filter_w": (3, "i32", 0), "filter_h": (4, "i32", 0), "activation": (5, "i8", 0)}),
    ),
    **dict.fromkeys(("MEAN", "REDUCE_MAX"), (27, {"keep_dims": (0, "bool", 0)})),
    "CONCATENATION": (10, {"axis": (0, "i32", 0), "activation": (1, "i8", 0)}),
    "RESHAPE": (17, {"shape": (0, "ints", 0)}),
    "SQUEEZE": (30, {"axes": (0, "ints", 0)}),
    "STRIDED_SLICE": (
        32,
        {
            "begin_mask": (0, "i32", 0),
            "end_mask": (1, "i32", 0),
            "ellipsis_mask": (2, "i32", 0),
            "new_axis_mask": (3, "i32", 0),
            "shrink_axis_mask": (4, "i32", 0),
            "offset": (5, "bool", 0),
        },
    ),
    "SPLIT": (35, {"parts": (0, "i32", 0)}),
    "SPLIT_V": (79, {"parts": (0, "i32", 0)}),
    "GATHER": (23, {"axis": (0, "i32", 0), "batch_dims": (1, "i32", 0)}),
    "PACK": (59, {"count": (0, "i32", 0), "axis": (1, "i32", 0)}),
    "UNPACK": (64, {"count": (0, "i32", 0), "axis": (1, "i32", 0)}),
    "SHAPE": (55, {}),
    "CAST": (37, {"from": (0, "i8", 0), "to": (1, "i8", 0)}),
}
"""By operator: the number of its options in the union BuiltinOptions, and the fields that decide a result."""
