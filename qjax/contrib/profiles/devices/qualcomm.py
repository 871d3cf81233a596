"""Qualcomm QNN, backend HTP: the models that ONNX Runtime's QNN tools and ExecuTorch's quantizer write for it."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, bias, fixed_grid, floats_between, narrow_second, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

TOOLS = Source(
    "onnxruntime 1.31.1, quantization/execution_providers/qnn/quant_config.py",
    "https://pypi.org/project/onnxruntime/1.31.1/",
)
QUANTIZER = Source(
    "ExecuTorch 1.5.0, backends/qualcomm/quantizer/qconfig.py, cff6f4d",
    "https://github.com/pytorch/executorch/blob/cff6f4dd32e630945b7188512c1f2b4f102b05ad/backends/qualcomm/quantizer/"
    "qconfig.py",
)
BUILDERS = Source(
    "ONNX Runtime, providers/qnn/builder/op_builder_factory.cc, 00cd7c6",
    "https://github.com/microsoft/onnxruntime/blob/00cd7c6df0a66cd628a5ab7e682cb870134a27ee/onnxruntime/core/"
    "providers/qnn/builder/op_builder_factory.cc",
)

QNN_HTP = register(
    Profile(
        name="qnn_htp",
        title="Qualcomm QNN, HTP, through ONNX Runtime",
        targets=("onnxruntime",),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, signed=False, symmetric=False),
        scheme=Scheme(
            specs("int8", (4, 8), symmetric=True, narrow=True, per_channel=True),
            specs("uint8 uint16", (8, 16)),
            QUANTIZER,
        ),
        format="onnx",
        options={"style": "qdq", "portable": "codes"},
        operators=(
            known(
                "Abs Add ArgMax ArgMin AveragePool Clip Concat Conv ConvTranspose DequantizeLinear Div Elu Equal Exp "
                "Expand Flatten Gather GatherElements Gelu Gemm GlobalAveragePool GlobalMaxPool Greater "
                "GreaterOrEqual HardSigmoid HardSwish LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool "
                "Mean Min Mul Neg Pad QuantizeLinear ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Round "
                "Sigmoid Sign Slice Softmax Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Unsqueeze Where",
                BUILDERS,
            ),
        ),
        rules=(
            activations(
                {"uint8", "uint16"}, QUANTIZER, cure="Use activations=QSpec(bits=8, signed=False, symmetric=False)."
            ),
            weights({"int8", "int4"}, QUANTIZER, least=-127, cure="Use weights=QSpec(bits=8, axis=-1)."),
            bias({"int32"}, QUANTIZER, cure="Emit with portable='codes'."),
            fixed_grid({"Sigmoid"}, "uint16", 2.0**-16, 0, TOOLS),
            fixed_grid({"Tanh"}, "uint16", 2.0**-15, 32768, TOOLS),
            narrow_second(
                {"MatMul"}, TOOLS, cure="Give that input 8 bits: Override(activations=QSpec(bits=8, signed=False))."
            ),
            floats_between(TOOLS),
        ),
        otherwise="the operator runs on the CPU instead of the HTP",
        proof="The rules are those of public tools. Nothing ran on an HTP, and QNN's own simulator is not public.",
    )
)
