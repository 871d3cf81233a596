"""Texas Instruments TIDL: prequantized ONNX of 8 bits."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.operators import Operator
from qjax.contrib.profiles.rules import Source, Window, activations, demand, floats_between, rank, weights, window
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

_REPOSITORY = "https://github.com/TexasInstruments/edgeai-tidl-tools/blob/95ba2c7ec62bbedeb637d7a5c0273fcede21cac9"
QUANTIZATION = Source(
    "edgeai-tidl-tools, docs/tidl_fsg_quantization.md, 95ba2c7 (2025-05)",
    f"{_REPOSITORY}/docs/tidl_fsg_quantization.md",
)
OPERATORS = Source(
    "edgeai-tidl-tools, docs/supported_ops_rts_versions.md, 95ba2c7 (2025-05)",
    f"{_REPOSITORY}/docs/supported_ops_rts_versions.md",
)


_IMAGES = {"Conv", "Gemm", "MatMul", "AveragePool", "GlobalAveragePool", "MaxPool"}


def _strides(found: Window, operator: Operator) -> bool:
    h, w = found.strides
    size = max(found.height, found.width)
    return h == w and not (h == 2 and size > 7) and not (h == 4 and size != 11)


def _group(operator: Operator) -> int:
    return int(operator.options.get("group", 1))


def _depthwise(found: Window, operator: Operator) -> bool:
    if _group(operator) == 1:
        return True
    return found.height == found.width and found.height in (3, 5, 7) and max(found.strides) <= 2


def _subtrahend(operator: Operator) -> str | None:
    return "two computed inputs" if all(t is not None and not t.constant for t in operator.inputs) else None


def _alone(operator: Operator) -> str | None:
    return "an operator by itself"


TIDL = register(
    Profile(
        name="tidl",
        title="Texas Instruments TIDL, prequantized ONNX",
        targets=("onnxruntime",),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, narrow_range=False),
        scheme=Scheme(
            specs("int8", (8,), symmetric=True, per_channel=True),
            specs("int8 uint8", (8,), symmetric=True),
            QUANTIZATION,
        ),
        format="onnx",
        options={"style": "qdq", "portable": "floats", "batch": 1},
        operators=(
            known(
                "Abs Add ArgMax AveragePool BatchNormalization Clip Concat Conv ConvTranspose DequantizeLinear Div Elu "
                "Exp Flatten Floor Gather Gemm GlobalAveragePool HardSigmoid HardSwish LayerNormalization LeakyRelu "
                "Log MatMul Max MaxPool Mul Neg Pad Pow PRelu QuantizeLinear ReduceMax ReduceMean ReduceMin Relu "
                "Reshape Resize Sigmoid Slice Softmax Split Sqrt Squeeze Sub Sum Tanh TopK Transpose Unsqueeze",
                OPERATORS,
            ),
        ),
        rules=(
            activations(
                {"int8", "uint8"},
                QUANTIZATION,
                symmetric=True,
                cure="Use activations=QSpec(bits=8, narrow_range=False). All devices but TDA4VM allow symmetric=False.",
            ),
            weights({"int8"}, QUANTIZATION, cure="Use weights=QSpec(bits=8, axis=-1)."),
            rank(
                4, OPERATORS, only={"Conv", "Gemm", "MatMul", "AveragePool", "GlobalAveragePool", "MaxPool"}, used=True
            ),
            rank(6, OPERATORS, used=True),
            window(
                {"Conv"},
                "equal strides; stride 2 only with kernels up to 7, stride 4 only with 11x11",
                OPERATORS,
                _strides,
                cure="Stride in two steps.",
            ),
            window(
                {"Conv"},
                "depthwise kernels of 3x3, 5x5 or 7x7 with stride 1 or 2",
                OPERATORS,
                _depthwise,
                cure="Use one of these kernels, or a convolution that is not grouped.",
            ),
            demand(
                "mean",
                "a mean within LayerNormalization, or GlobalAveragePool",
                OPERATORS,
                _alone,
                cure="Average over height and width of an image, which becomes GlobalAveragePool.",
                only={"ReduceMean"},
            ),
            demand(
                "subtraction",
                "a constant on one side",
                OPERATORS,
                _subtrahend,
                cure="Add instead, with the sign in the weights.",
                only={"Sub"},
            ),
            floats_between(QUANTIZATION),
        ),
        otherwise="the operator runs on the Cortex-A",
        proof="The rules are TI's. Its tools are not on PyPI and were not run, and nothing ran on a device.",
    )
)
