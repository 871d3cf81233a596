"""Google: LiteRT on the CPU, and Coral's Edge TPU."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.operators import Operator
from qjax.contrib.profiles.rules import (
    Source,
    activations,
    bias,
    demand,
    fixed_grid,
    innermost,
    same_grid,
    static,
    weights,
)
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

SPECIFICATION = Source(
    "LiteRT 8-bit quantization specification", "https://ai.google.dev/edge/litert/models/quantization_spec"
)
LITERT_KERNELS = Source("ai-edge-litert 2.3.0, run live by make test", "https://pypi.org/project/ai-edge-litert/")
CORAL = Source("TensorFlow models on the Edge TPU", "https://coral.ai/docs/edgetpu/models-intro/")
AXIS = Source(
    "the Edge TPU compiler's operators, as listed by Axis for ARTPEC-7",
    "https://developer.axis.com/computer-vision/on-device/system-on-chip/artpec-7/supported-ops/",
)
_TARGETS = ("tflite_xnnpack", "tflite_xnnpack_arm", "tflite_reference", "tflite_optimized_x86", "tflite_optimized_arm")
_ACTIVATIONS = "Use activations=QSpec(bits=8, symmetric=False)."
_WEIGHTS = "Use weights=QSpec(bits=8, axis=-1)."
_CONVOLUTIONS = {"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"}

LITERT = register(
    Profile(
        name="litert",
        title="LiteRT 2.3 on CPUs, static quantization",
        targets=_TARGETS,
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(
            specs("int8", (4, 8), symmetric=True, narrow=True, per_channel=True),
            specs("int8 int16", (8, 16)),
            SPECIFICATION,
        ),
        format="tflite",
        operators=(
            known(
                "ADD ARG_MAX ARG_MIN AVERAGE_POOL_2D BATCH_MATMUL BROADCAST_TO CAST CONCATENATION CONV_2D "
                "DEPTHWISE_CONV_2D DEQUANTIZE EQUAL FULLY_CONNECTED GATHER GREATER GREATER_EQUAL LESS LESS_EQUAL "
                "LOGICAL_AND LOGICAL_NOT LOGICAL_OR LOGISTIC MAXIMUM MAX_POOL_2D MEAN MINIMUM MUL NOT_EQUAL PAD PADV2 "
                "QUANTIZE REDUCE_ALL REDUCE_MAX REDUCE_MIN RESHAPE SELECT_V2 SLICE SOFTMAX STRIDED_SLICE SUB SUM TANH "
                "TOPK_V2 TRANSPOSE",
                LITERT_KERNELS,
            ),
        ),
        rules=(
            weights(
                {"int8", "int4"},
                SPECIFICATION,
                least=-127,
                only=_CONVOLUTIONS | {"FULLY_CONNECTED"},
                cure=_WEIGHTS,
            ),
            bias({"int32", "int64"}, SPECIFICATION, cure="Emit with qjax, which writes such a bias."),
            same_grid(
                {"CONCATENATION"},
                SPECIFICATION,
                outputs=True,
                cure="Insert a QUANTIZE before it, as qjax and other converters do.",
            ),
            fixed_grid({"SOFTMAX", "LOGISTIC"}, "int8", 2.0**-8, -128, SPECIFICATION),
            fixed_grid({"TANH"}, "int8", 2.0**-7, 0, SPECIFICATION),
        ),
        otherwise="LiteRT refuses the file, or computes different codes",
        proof="Run live in the matrix: 0 codes differ, also with dynamic rows and blockwise int4 weights.",
        floats=True,
    )
)


def _fused_activation(operator: Operator) -> str | None:
    code = operator.options.get("activation", 0)
    return None if not code else "a fused activation"


def _same_dilation(operator: Operator) -> str | None:
    both = operator.options.get("dilation_h", 1), operator.options.get("dilation_w", 1)
    return None if both[0] == both[1] else f"dilations {both[0]} and {both[1]}"


EDGE_TPU = register(
    Profile(
        name="edge_tpu",
        title="Coral Edge TPU",
        targets=("tflite_reference", *_TARGETS[:2], *_TARGETS[3:]),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(specs("int8", (8,), symmetric=True, per_channel=True), specs("int8 uint8", (8,)), CORAL),
        format="tflite",
        options={"batch": 1, "int4": False},
        cut=True,
        operators=(
            known(
                "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXPAND_DIMS FULLY_CONNECTED "
                "L2_NORMALIZATION LOGISTIC MAXIMUM MAX_POOL_2D MEAN MINIMUM MUL PACK PAD PRELU QUANTIZE REDUCE_MAX "
                "REDUCE_MIN RELU RELU6 RELU_N1_TO_1 RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR",
                AXIS,
            ),
            known(
                "SLICE SOFTMAX SPACE_TO_DEPTH SPLIT SQUEEZE STRIDED_SLICE SUB SUM SQUARED_DIFFERENCE TANH TRANSPOSE "
                "TRANSPOSE_CONV",
                Source(
                    "the rest of that table after ResizeBilinear, which could not be read", AXIS.url, verified=False
                ),
            ),
        ),
        rules=(
            activations({"int8", "uint8"}, CORAL, cure=_ACTIVATIONS),
            weights({"int8", "uint8"}, CORAL, symmetric=False, cure=_WEIGHTS),
            static(CORAL),
            innermost(3, CORAL),
            demand(
                "fused activation",
                "no fused activation",
                AXIS,
                _fused_activation,
                cure="Move the activation before it.",
                only={"AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION"},
            ),
            demand(
                "dilation",
                "the same dilation along both axes",
                AXIS,
                _same_dilation,
                cure="Dilate both axes alike.",
                only=_CONVOLUTIONS,
            ),
        ),
        otherwise="the compiler assigns that operator, and all after it, to the CPU",
        proof="The rules are Google's and Axis'. The compiler is closed-source and was not run.",
    )
)
