"""The rules of requantization: each of the ways in which a runtime rounds acc * e, under its name.

| module | rules |
| --- | --- |
| `classic` | one rounding of the exact product; gemmlowp's, NEON's and ruy's two; stochastic |
| `floating` | runtimes that multiply in float32 or float64 |
| `tflite` | TFLite's depthwise convolution, whose last channels round differently |
| `tflite_arm` | TFLite's optimised kernels on AArch64, which differ by shape |
| `published` | TVM, XNNPACK, NVDLA, TOSA, TFLite's int16 activations, NEMO |
| `power_of_two` | one shift, with the roundings and overflows of ap_fixed |
| `torch` | PyTorch's engines, whose float steps begin at the scales |
| `openvino` | OpenVINO's CPU plugin |

A rule is a `Rule` in the registry. To add one, write its `prepare` and `apply` and register it; it is then available by
its name, and a graph stores its constants by their field names.
"""

from qjax.numerics.rules import classic, floating, openvino, power_of_two, published, tflite, tflite_arm, torch
from qjax.numerics.rules.floating import Float32WithBias, Float64
from qjax.numerics.rules.power_of_two import PowerOfTwo
from qjax.numerics.rules.published import ScaledInteger, TosaScale, apply_scale_16
from qjax.numerics.rules.registry import (
    Call,
    Product,
    Rule,
    get_rule,
    register_family,
    register_rule,
    rule_names,
)

__all__ = [
    "Call",
    "Float32WithBias",
    "Float64",
    "PowerOfTwo",
    "Product",
    "Rule",
    "ScaledInteger",
    "TosaScale",
    "apply_scale_16",
    "classic",
    "floating",
    "get_rule",
    "openvino",
    "power_of_two",
    "published",
    "register_family",
    "register_rule",
    "rule_names",
    "tflite",
    "tflite_arm",
    "torch",
]
