"""NVIDIA TensorRT: QDQ models with symmetric INT8."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, bias, floats_between, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

HEADER = Source(
    "NvInfer.h, IQuantizeLayer and IDequantizeLayer, TensorRT 11.1.0",
    "https://github.com/NVIDIA/TensorRT/blob/a892d22267d9cd2dedc1a0893e6892ac901f6d3d/include/NvInfer.h",
)
PARSER = Source(
    "onnx-tensorrt, docs/operators.md, TensorRT 10.0",
    "https://github.com/onnx/onnx-tensorrt/blob/10.0-GA/docs/operators.md",
)
_SYMMETRIC = "Use activations=QSpec(bits=8, narrow_range=False), which is symmetric."
_FLOATS = "Emit with portable='floats'."

TENSORRT = register(
    Profile(
        name="tensorrt",
        title="NVIDIA TensorRT 11",
        targets=("onnxruntime",),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, narrow_range=False),
        scheme=Scheme(
            specs("int8", (8,), symmetric=True, per_channel=True), specs("int8", (8,), symmetric=True), HEADER
        ),
        format="onnx",
        options={"style": "qdq", "portable": "floats"},
        operators=(
            known(
                "Add AveragePool Clip Concat Conv ConvTranspose DequantizeLinear Div Expand Flatten Gather Gemm "
                "GlobalAveragePool GlobalMaxPool HardSigmoid Identity LeakyRelu MatMul Max MaxPool Min Mul Pad "
                "QuantizeLinear ReduceMax ReduceMean ReduceMin Relu Reshape Sigmoid Slice Softmax Split Squeeze Sub "
                "Tanh Transpose Unsqueeze Where",
                PARSER,
            ),
        ),
        rules=(
            activations({"int8"}, HEADER, symmetric=True, cure=_SYMMETRIC),
            weights({"int8"}, HEADER, cure="Use weights=QSpec(bits=8, axis=-1)."),
            bias({"float32"}, HEADER, cure=_FLOATS),
            floats_between(PARSER),
        ),
        otherwise="the parser refuses the file, or the layer runs in floats",
        proof="The rules are NVIDIA's. No engine was built, and the rounding of its kernels is unknown.",
    )
)
