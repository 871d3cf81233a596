"""Espressif ESP-DL: symmetric codes whose scales are powers of two."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, floats_between, power_of_two, rank, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

STATE = Source(
    "ESP-DL, operator_support_state.md, 12c0616 (2026-07)",
    "https://github.com/espressif/esp-dl/blob/12c0616de145b704e1149c474b9a1e852e631d67/operator_support_state.md",
)
QUANTIZER = Source(
    "esp-ppq, quantization/quantizer/EspdlQuantizer.py, de6381b (2026-06)",
    "https://github.com/espressif/esp-ppq/blob/de6381b0110ccbf75bd5f2e06ddfdebd0432e8a2/esp_ppq/quantization/"
    "quantizer/EspdlQuantizer.py",
)
_SYMMETRIC = "Use activations=QSpec(bits=8, narrow_range=False)."
_TQT = "Use method='tqt' and weight_method='tqt', which learn power-of-two scales."

ESP_DL = register(
    Profile(
        name="esp_dl",
        title="Espressif ESP-DL on ESP32-P4",
        targets=("onnxruntime",),
        weights=QSpec(bits=8, axis=-1, narrow_range=False),
        activations=QSpec(bits=8, narrow_range=False),
        scheme=Scheme(
            specs("int8 int16", (8, 16), symmetric=True, per_channel=True),
            specs("int8 int16", (8, 16), symmetric=True),
            QUANTIZER,
        ),
        format="onnx",
        options={"style": "qdq", "portable": "floats"},
        emits=False,
        recipe={"method": "tqt", "weight_method": "tqt"},
        operators=(
            known(
                "Add AveragePool Clip Concat Conv ConvTranspose DequantizeLinear Div Elu Equal Exp Flatten Gather "
                "Gemm "
                "GlobalAveragePool Greater GreaterOrEqual HardSigmoid HardSwish LeakyRelu Less LessOrEqual Log MatMul "
                "MaxPool Mul Neg Pad Pow PRelu QuantizeLinear ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu "
                "Reshape Sigmoid Slice Split Sqrt Squeeze Sub Swish Tanh Transpose Unsqueeze",
                STATE,
            ),
        ),
        rules=(
            activations({"int8", "int16"}, QUANTIZER, symmetric=True, cure=_SYMMETRIC),
            weights({"int8", "int16"}, QUANTIZER, cure="Use weights=QSpec(bits=8, axis=-1)."),
            power_of_two(QUANTIZER, cure=_TQT),
            rank(4, STATE, only={"Add", "Div", "MatMul", "Mul", "Sub", "ReduceMax", "ReduceMean", "ReduceMin"}),
            floats_between(STATE),
        ),
        otherwise="esp-ppq cannot express the layer",
        proof="The rules are Espressif's. Nothing ran on an ESP32, and qjax does not write .espdl files. The P4 rounds "
        "half to even; the S3 rounds half up and has per-tensor weight scales.",
    )
)
