"""Apple Core ML: the forms that coremltools can express. qjax writes no .mlpackage."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

_REPOSITORY = "https://github.com/apple/coremltools/blob/e0e2f42b0b7c601958c0c2b53ce12c8a39023d00"
GUIDE = Source(
    "coremltools 9.1.dev1, docs-guides/source/opt-quantization-overview.md",
    f"{_REPOSITORY}/docs-guides/source/opt-quantization-overview.md",
)
QUANTIZER = Source(
    "coremltools 9.1.dev1, optimize/torch/quantization/_coreml_quantizer.py",
    f"{_REPOSITORY}/coremltools/optimize/torch/quantization/_coreml_quantizer.py",
)

COREML = register(
    Profile(
        name="coreml",
        title="Apple Core ML, 8-bit weights and activations",
        targets=("onnxruntime",),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, narrow_range=False),
        scheme=Scheme(
            specs("int8", (4, 8), symmetric=True, per_channel=True), specs("int8 uint8", (8,), symmetric=True), GUIDE
        ),
        format="onnx",
        options={"style": "qdq", "portable": "floats"},
        emits=False,
        operators=(
            known(
                "Add AveragePool Clip Concat Conv DequantizeLinear Flatten Gemm GlobalAveragePool MatMul MaxPool Mul "
                "QuantizeLinear ReduceMean Relu Reshape Transpose",
                QUANTIZER,
            ),
        ),
        rules=(
            activations({"int8", "uint8"}, GUIDE, symmetric=True, cure="Use activations=QSpec(bits=8)."),
            weights({"int8", "int4"}, GUIDE, cure="Use weights=QSpec(bits=8, axis=-1)."),
        ),
        otherwise="the Neural Engine computes the layer in float16",
        proof="The rules are Apple's. Nothing ran on a Neural Engine, and qjax does not write .mlpackage files.",
    )
)
