"""ExecuTorch's XNNPACK backend: what its quantizer annotates, as operators of the QDQ model for a .pte."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, same_grid, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

_REPOSITORY = "https://github.com/pytorch/executorch/blob/cff6f4dd32e630945b7188512c1f2b4f102b05ad"
QUANTIZER = Source(
    "ExecuTorch 1.5.0, backends/xnnpack/quantizer/xnnpack_quantizer.py, cff6f4d",
    f"{_REPOSITORY}/backends/xnnpack/quantizer/xnnpack_quantizer.py",
)
ANNOTATORS = Source(
    "ExecuTorch 1.5.0, backends/xnnpack/quantizer/xnnpack_quantizer_utils.py, cff6f4d",
    f"{_REPOSITORY}/backends/xnnpack/quantizer/xnnpack_quantizer_utils.py",
)

EXECUTORCH_XNNPACK = register(
    Profile(
        name="executorch_xnnpack",
        title="ExecuTorch 1.5, XNNPACK",
        targets=("executorch_xnnpack", "tflite_xnnpack", "tflite_xnnpack_arm", "onnxruntime"),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(
            specs("int8", (8,), symmetric=True, narrow=True, per_channel=True), specs("int8", (8,)), QUANTIZER
        ),
        format="pte",
        operators=(
            known(
                "Add Clip Concat Conv ConvTranspose DequantizeLinear Flatten Gemm GlobalAveragePool MatMul MaxPool "
                "Mul QuantizeLinear ReduceMean Relu Reshape Slice Squeeze Transpose",
                ANNOTATORS,
            ),
        ),
        rules=(
            activations({"int8"}, QUANTIZER, cure="Use activations=QSpec(bits=8, symmetric=False)."),
            weights({"int8"}, QUANTIZER, least=-127, cure="Use weights=QSpec(bits=8, axis=-1)."),
            same_grid(
                {"Concat"},
                ANNOTATORS,
                cure="Give the inputs one quantizer: compute them in one layer, or put a shared quantizer after them.",
            ),
        ),
        otherwise="the operator runs in floats",
        proof="Run live in the matrix: 0 codes differ in products, sums and means over height and width. "
        "Whole networks run in make test-oracles.",
    )
)
