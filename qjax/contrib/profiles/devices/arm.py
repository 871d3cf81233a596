"""Arm: Ethos-U, whose compiler is Vela, and Cortex-M with CMSIS-NN in TFLite Micro."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.operators import PARAMETERS, Operator
from qjax.contrib.profiles.rules import (
    Source,
    Window,
    activations,
    bias,
    demand,
    dimensions,
    elements,
    same_grid,
    weight_sum,
    weights,
    window,
)
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

VELA = Source("ethos-u-vela 5.2.0, --supported-ops-report", "https://pypi.org/project/ethos-u-vela/5.2.0/")
CMSIS = Source(
    "CMSIS-NN, README.md, 99f736a (2026-07)",
    "https://github.com/ARM-software/CMSIS-NN/blob/99f736a63036613032f9b70de36b493bcd7802d4/README.md",
)
MICRO = Source(
    "TFLite Micro, micro_mutable_op_resolver.h, 90b983c (2026-08)",
    "https://github.com/tensorflow/tflite-micro/blob/90b983c2b3f1480642e040bbd2ddb37b998f3424/tensorflow/lite/micro/"
    "micro_mutable_op_resolver.h",
)
SPECIFICATION = Source(
    "LiteRT 8-bit quantization specification", "https://ai.google.dev/edge/litert/models/quantization_spec"
)

_PRODUCTS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"}
_ACTIVATIONS = "Use activations=QSpec(bits=8, symmetric=False)."
_WEIGHTS = "Use weights=QSpec(bits=8, axis=-1)."

# From the report: "Stride>3 is only supported IF (dilation = 1 AND padding = VALID)".
_UNPADDED = "strides up to 3; greater ones only without dilation and padding"


def _strides(found: Window, operator: Operator) -> bool:
    return max(found.strides) <= 3 or (max(found.dilations) == 1 and not found.padded)


def _average(found: Window, operator: Operator) -> bool:
    if not found.padded:
        return found.height * found.width <= 256 * 256 and found.height <= 256
    return found.height <= 8 and found.width <= 8


def _mean(operator: Operator) -> str | None:
    x, y = operator.inputs[0], operator.outputs[0]
    most = {"int8": 2**24, "uint8": 2**23, "int16": 2**16}
    if x is None or x.dtype not in most:
        return None if x is None else x.dtype
    count = elements(x) // max(elements(y), 1)
    return f"{count:,} elements" if count > most[x.dtype] else None


def _depth(operator: Operator) -> str | None:
    x = operator.inputs[0]
    return None if x is None or (x.shape[-1] or 1) <= 127 else f"{x.shape[-1]} channels"


def _matmul(operator: Operator) -> str | None:
    x = operator.inputs[0]
    return None if x is None or x.dtype == "int8" else x.dtype


def _mean_batch(operator: Operator) -> str | None:
    x = operator.inputs[0]
    return None if x is None or len(x.shape) < 4 or x.shape[0] in (1, None) else f"a batch of {x.shape[0]}"


def _scalar(operator: Operator) -> str | None:
    found = [tensor.name for tensor in operator.activations if not tensor.shape]
    return f"{found[0]!r} without an axis" if found else None


def _slice_strides(operator: Operator) -> str | None:
    """Whether strides above 1 apply to height and width only, and forwards."""
    strides = operator.options[PARAMETERS].get(3)
    if strides is None:
        return "computed strides"
    steps = [int(n) for n in strides]
    inner = range(max(len(steps) - 3, 0), len(steps) - 1)
    wrong = any(n < 1 or (n != 1 and axis not in inner) for axis, n in enumerate(steps))
    return f"strides {steps}" if wrong else None


ETHOS_U = register(
    Profile(
        name="ethos_u",
        title="Arm Ethos-U55 and U65, compiled by Vela 5.2",
        targets=("tflite_micro", "cmsis_nn", "tflite_reference"),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(specs("int8", (8,), symmetric=True, per_channel=True), specs("int8 int16", (8, 16)), VELA),
        format="tflite",
        options={"batch": 1, "int4": False},
        operators=(
            known(
                "ABS ADD ARG_MAX AVERAGE_POOL_2D BATCH_MATMUL CONCATENATION CONV_2D DEPTHWISE_CONV_2D ELU EXP "
                "EXPAND_DIMS FULLY_CONNECTED GELU HARD_SWISH LEAKY_RELU LOG LOGISTIC MAXIMUM MAX_POOL_2D MEAN MINIMUM "
                "MIRROR_PAD MUL NEG PACK PAD PADV2 PRELU QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU6 RELU_0_TO_1 "
                "RELU_N1_TO_1 RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 RSQRT SLICE SOFTMAX SPLIT "
                "SPLIT_V SQUARED_DIFFERENCE SQUEEZE STRIDED_SLICE SUB SUM TANH TILE TRANSPOSE TRANSPOSE_CONV "
                "UNIDIRECTIONAL_SEQUENCE_LSTM UNPACK",
                VELA,
            ),
        ),
        rules=(
            activations({"int8", "uint8", "int16"}, VELA, indices={"ARG_MAX"}, cure=_ACTIVATIONS),
            weights({"int8", "uint8"}, VELA, symmetric=False, per_channel=_PRODUCTS, cure=_WEIGHTS),
            bias({"int32", "int64"}, VELA, cure="Emit with qjax, which writes such a bias."),
            dimensions(65536, VELA),
            weight_sum(_PRODUCTS, 127 * 65536, VELA),
            window(
                {"CONV_2D", "AVERAGE_POOL_2D", "MAX_POOL_2D"}, _UNPADDED, VELA, _strides, cure="Stride in two steps."
            ),
            window(
                {"DEPTHWISE_CONV_2D"},
                "strides from 1 to 3",
                VELA,
                lambda found, _: max(found.strides) <= 3,
                cure="Stride in two steps.",
            ),
            window(
                {"MAX_POOL_2D"},
                "a kernel height up to 256, height times width up to 65,536",
                VELA,
                lambda found, _: found.height <= 256 and found.height * found.width <= 65536,
                cure="Pool in two steps.",
            ),
            window(
                {"AVERAGE_POOL_2D"},
                "with padding a kernel up to 8x8, otherwise as for MAX_POOL_2D",
                VELA,
                _average,
                cure="Pool in two steps, or without padding.",
            ),
            same_grid(
                {"MAXIMUM", "MINIMUM"},
                VELA,
                outputs=True,
                cure="Give both sides one quantizer, or clamp with an activation that the previous operator fuses.",
            ),
            demand(
                "slices",
                "positive strides, above 1 only along height and width",
                VELA,
                _slice_strides,
                cure="Reverse and stride along height or width only, or multiply by a permutation.",
                only={"STRIDED_SLICE"},
            ),
            demand(
                "scalars",
                "tensors with at least one axis",
                VELA,
                _scalar,
                cure="Keep an axis: keepdims=True.",
            ),
            demand("batch", "a batch of one", VELA, _mean_batch, cure="Emit with batch=1.", only={"MEAN"}),
            demand(
                "mean",
                "a mean of at most 16,777,216 int8 or 65,536 int16 elements",
                VELA,
                _mean,
                cure="Pool first.",
                only={"MEAN"},
            ),
            demand("depth", "at most 127 channels", VELA, _depth, cure="Compare in two steps.", only={"ARG_MAX"}),
            demand(
                "product of activations", "int8", VELA, _matmul, cure="Give both inputs 8 bits.", only={"BATCH_MATMUL"}
            ),
        ),
        otherwise="Vela assigns the operator to the CPU",
        proof="Vela itself compiles the same files in make test-oracles. Nothing ran on an Ethos-U.",
    )
)

CORTEX_M = register(
    Profile(
        name="cortex_m",
        title="Arm Cortex-M, CMSIS-NN under TFLite Micro",
        targets=("cmsis_nn", "tflite_micro"),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(
            specs("int8", (4, 8), symmetric=True, narrow=True, per_channel=True),
            specs("int8 int16", (8, 16)),
            SPECIFICATION,
        ),
        format="tflite",
        options={"batch": 1},
        operators=(
            known(
                "ADD AVERAGE_POOL_2D BATCH_MATMUL CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED MAXIMUM MAX_POOL_2D "
                "MINIMUM MUL PAD SOFTMAX SVDF TRANSPOSE TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM",
                CMSIS,
            ),
            known(
                "ABS ARG_MAX ARG_MIN BROADCAST_TO CAST CONCATENATION DEQUANTIZE EQUAL GATHER GREATER GREATER_EQUAL "
                "HARD_SWISH LEAKY_RELU LESS LESS_EQUAL LOGICAL_AND LOGICAL_NOT LOGICAL_OR LOGISTIC MEAN NEG NOT_EQUAL "
                "PADV2 QUANTIZE REDUCE_ALL REDUCE_MAX REDUCE_MIN RELU RELU6 RESHAPE SELECT_V2 SLICE SPLIT SPLIT_V "
                "SQUEEZE STRIDED_SLICE SUB SUM TANH",
                MICRO,
            ),
        ),
        rules=(
            activations(
                {"int8", "int16"},
                SPECIFICATION,
                only={
                    "ADD",
                    "MUL",
                    "CONV_2D",
                    "DEPTHWISE_CONV_2D",
                    "FULLY_CONNECTED",
                    "AVERAGE_POOL_2D",
                    "MAX_POOL_2D",
                },
                cure=_ACTIVATIONS,
            ),
            weights({"int8", "int4"}, SPECIFICATION, least=-127, only=_PRODUCTS, cure=_WEIGHTS),
            bias({"int32", "int64"}, SPECIFICATION, cure="Emit with qjax, which writes such a bias."),
        ),
        otherwise="TFLite Micro refuses the file",
        proof="TFLite Micro runs the same files on x86, where 0 codes differ. CMSIS-NN's own kernels were not run.",
    )
)
