"""Intel OpenVINO: the quantization schemes that NNCF prescribes for each plugin."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Rule, Source, activations, floats_between, same_grid, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

_REPOSITORY = "https://github.com/openvinotoolkit/nncf/blob/ef8e1dbd826a66c47f1be13b3137baff92f644a4"


def _setup(plugin: str) -> Source:
    return Source(
        f"NNCF, src/nncf/common/hardware/setups/{plugin}.py and qspaces.py, ef8e1db (2026-05)",
        f"{_REPOSITORY}/src/nncf/common/hardware/setups/{plugin}.py",
    )


MEASURED = Source(
    "execution graph of openvino 2026.4.1 (CPU): convolutions with uint8 weights run in float32",
    "https://pypi.org/project/openvino/2026.4.1/",
)

# The operators that NNCF lists, under ONNX's names. Relu and Clip are fused into the operator before them.
_OPERATORS = (
    "Add AveragePool Clip Concat Conv ConvTranspose DequantizeLinear Div Equal Expand Flatten Gather Gemm "
    "GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual Less LessOrEqual MatMul Max MaxPool Min Mul Pad "
    "QuantizeLinear ReduceMax ReduceMean ReduceSum Relu Reshape Slice Split Squeeze Sub Transpose Unsqueeze"
)
_UNIFIED = "Give the inputs one quantizer: compute them by one layer, or put a shared quantizer behind them."


def _profile(plugin: str, proof: str, unified: tuple[str, ...]) -> Profile:
    source = _setup(plugin)
    rules: tuple[Rule, ...] = (
        activations({"int8", "uint8"}, source, cure="Use activations=QSpec(bits=8, symmetric=False)."),
        weights({"int8"}, source, least=-127, cure="Use weights=QSpec(bits=8, axis=-1)."),
        same_grid(unified, source, cure=_UNIFIED),
        floats_between(source),
    )
    return register(
        Profile(
            name=f"openvino_{plugin}",
            title=f"Intel OpenVINO, plugin {plugin.upper()}",
            targets=("onnxruntime",),
            weights=QSpec(bits=8, axis=-1),
            activations=QSpec(bits=8, symmetric=False),
            scheme=Scheme(
                specs("int8", (8,), symmetric=True, narrow=True, per_channel=True), specs("int8 uint8", (8,)), source
            ),
            format="onnx",
            options={"style": "qdq", "portable": "floats"},
            operators=(known(_OPERATORS, source),),
            rules=rules,
            otherwise="the operator runs in floats",
            proof=proof,
        )
    )


CPU = _profile(
    "cpu",
    "Run live: make test-oracles counts the 8-bit kernels of openvino 2026.4.1.",
    ("Concat",),
)
GPU = _profile("gpu", "The rules are NNCF's. Nothing ran on an Intel GPU.", ("Concat",))
NPU = _profile(
    "npu",
    "The rules are NNCF's. Nothing ran on an Intel NPU.",
    ("Add", "Concat", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Sub"),
)
