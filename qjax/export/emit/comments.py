"""What an emitted file says about a rule or formula: one line of its own for each name.

Emitted files do not quote the docstrings of the kernels, so that a docstring can be reworded without a change of any
file. A rule or formula that a user registers has no line here, and is mentioned by its name alone.
"""

RULES = {
    "double_round": "the high word rounded with ties up, then a right shift rounded with ties away from zero",
    "float32": "the product of accumulator and scale in float32, rounded to the nearest integer with ties to even",
    "float32_bias": "accumulator plus bias, times the scale, each step in float32; ties to even",
    "float32_x86": "as float32, but a product beyond int32 becomes the lowest code",
    "float32_zero_point_fma": "one float32 multiply-add of product and zero point, then rounded with ties to even",
    "float32_zero_point_inside": "the zero point added in float32 before the rounding with ties to even",
    "float64_away": "the product in float64, rounded with ties away from zero",
    "int16x8": "a multiplier of 15 bits, and one rounding with ties up",
    "nearest_away": "one rounding of the exact product, ties away from zero",
    "nearest_even": "one rounding of the exact product, ties to even",
    "nemo": "an integer multiplier, then one right shift that rounds down",
    "neon": "the high word rounded with ties up, then a right shift rounded with ties up",
    "nvdla": "a 16-bit scale, then one right shift with ties away from zero",
    "openvino": "the product in float32 plus a float32 bias that includes the zero point; ties to even",
    "power_of_two": "one shift, with the rounding and overflow modes of ap_fixed",
    "ruy": "the high word rounded down, then a right shift of at least 1 rounded with ties up",
    "single_round": "one rounding of the exact product, ties up",
    "stochastic": "the exact product, rounded up with a probability equal to its fraction",
    "tflite_arm_depthwise": "the high word rounded with ties up, then a right shift rounded with ties up",
    "tflite_arm_depthwise_3x3": "as neon, but a left shift follows the rounded product",
    "tflite_arm_gemm": "ruy, but neon where the output is a single row of channels",
    "tflite_depthwise_neon": "neon in whole blocks of 8 channels, double_round in the remaining channels",
    "torch_fbgemm": "the bias added by one float32 multiply-add, then times the scale; ties to even",
    "torch_onednn": "scale, bias, output scale and zero point applied one by one in float32; ties to even",
    "torch_onednn_conv": "scale, bias, output scale and zero point applied one by one in float32; ties to even",
    "torch_qnnpack": "accumulator plus integer bias, times the scale in float32; ties to even",
    "tosa_double": "apply_scale_32 of TOSA 1.0 with DOUBLE_ROUND",
    "tosa_single": "apply_scale_32 of TOSA 1.0 with SINGLE_ROUND",
    "tvm": "one rounding of the exact product with ties up, which wraps in int32",
    "tvm_tonearest": "one rounding of the exact product, ties away from zero",
    "xnnpack_rndnu": "a saturating left shift, the high word rounded down, then a right shift rounded with ties up",
}
"""Of each rule, how it rounds the product of the accumulator and the effective scale."""

_EXECUTED = "dequantize, compute in float32, quantize"
_LITERT_BLOCKS = "rounded as by NEON in whole blocks, and as by the reference kernel in the remaining elements"

FORMULAS = {
    "executorch_rescale": "dequantize and quantize again, both in float32",
    "onnx_add": "two float32 multiply-adds on the codes, with the zero points gathered in one constant",
    "onnx_average_pool": "a float32 sum of the window's numbers, divided by their count and by the output's scale",
    "onnx_float_add": _EXECUTED,
    "onnx_float_average_pool": _EXECUTED,
    "onnx_float_multiply": _EXECUTED,
    "onnx_global_average": "the integer sum times one float32 factor",
    "onnx_multiply": "the product of the centred codes times one float32 scale, zero point inside the rounding",
    "onnx_rescale": _EXECUTED,
    "openvino_add": "two integer factors of at most 15 bits, exact in float32, and one rounding with ties to even",
    "tflite_add": "both operands rescaled to a common scale 20 bits finer (int16: 15), and the sum rescaled once",
    "tflite_add_neon": f"as tflite_add, {_LITERT_BLOCKS}",
    "tflite_average_pool": "an integer division of the sum of the codes, ties away from the code 0",
    "tflite_matmul": "the product of two activations, requantized with a scale formed in float32",
    "tflite_mean": "the centred sum times a multiplier that was divided by the count in integers",
    "tflite_mean_neon": "the sum of the codes times a multiplier, and a separately rounded offset",
    "tflite_micro_matmul": "the product of two activations, requantized with a scale formed in float64",
    "tflite_multiply": "the product of the centred codes, requantized with a scale formed in float32",
    "tflite_multiply_neon": f"as tflite_multiply, {_LITERT_BLOCKS}",
    "tflite_rescale_neon": f"one requantization, {_LITERT_BLOCKS}",
    "torch_adaptive_mean": "the centred sum times 1 / n and plus the zero point, in one float32 multiply-add",
    "torch_add": _EXECUTED,
    "torch_average_pool": "the centred sum times 1 / n in float32; whole blocks of 8 channels add the zero point last",
    "torch_average_pool_contiguous": "the centred sum times 1 / n in float32, rounded after the zero point is added",
    "torch_mean": "the sum of the codes divided by their count in float32",
    "torch_multiply": "the product of the centred codes times one float32 scale",
    "torch_qnnpack_add": "two integer factors of 22 bits and one shift, ties away from zero",
    "torch_qnnpack_add_broadcast": "torch_qnnpack_add, or torch_add where the operands have different shapes",
    "torch_qnnpack_average": "the centred sum times one float32 scale",
    "torch_rescale": "one float32 multiply-add of the dequantized number, with the zero point inside the rounding",
    "tosa_add": "both operands rescaled to a common scale 20 bits finer, and the sum rescaled once",
    "tosa_average_pool": "the centred sum times the integer reciprocal of the count, by apply_scale_32",
    "xnnpack_add": "two integer multipliers of 21 bits and one shift, ties up",
    "xnnpack_matmul": "the product of two activations, requantized with a scale formed in float32",
    "xnnpack_mean": "the sum of the codes times one float32 factor, plus a constant with both zero points",
    "xnnpack_mean_arm": "as xnnpack_mean, with product and sum in one multiply-add",
    "xnnpack_multiply": "the product of the centred codes times one float32 scale, ties to even",
    "xnnpack_multiply_arm": "the product of the centred codes, requantized as by xnnpack_rndnu",
    "xnnpack_rescale": "one integer multiplier with 8 fractional bits, ties up",
}
"""Of each registered formula, the steps from the codes to the result."""


def of_rule(name: str) -> str:
    """The comment on code that requantizes by the rule, one sentence."""
    return _sentence("rule", name, RULES.get(name.partition(":")[0]))


def of_formula(name: str) -> str:
    """The comment on code that computes the formula, which may be a rule with the form of its scale ("ruy/f32")."""
    return _sentence("formula", name, FORMULAS.get(name) or RULES.get(name.partition("/")[0].partition(":")[0]))


def _sentence(kind: str, name: str, line: str | None) -> str:
    return f"The {kind} {name}." if line is None else f"The {kind} {name}: {line}."


__all__ = ["FORMULAS", "RULES", "of_formula", "of_rule"]
