"""Describes in words how a node turns accumulators into codes: one phrase per rule of requantization and per formula.

A phrase continues "the target ...". A rule or formula of the user's own has no phrase, and is called by its name.
"""

from collections.abc import Mapping
from typing import Any

from qjax.graph.ir import Node
from qjax.ops import backend

RULES = {
    "double_round": "rounds twice, ties up, then away from zero",
    "float32": "rounds a float32 product once, ties to even",
    "float32_bias": "adds a float32 bias and rounds a float32 product once, ties to even",
    "float32_x86": "rounds a float32 product once, ties to even, what int32 cannot hold to the least code",
    "float32_zero_point_fma": "adds the zero point in one float32 multiply-add and rounds once, ties to even",
    "float32_zero_point_inside": "adds the zero point to a float32 product and rounds the sum once, ties to even",
    "float64_away": "rounds a double product once, ties away from zero",
    "int16x8": "rounds once, ties up, with a multiplier of 15 bits",
    "nearest_away": "rounds once, ties away from zero",
    "nearest_even": "rounds once, ties to even",
    "neon": "rounds twice, ties up both times",
    "nvdla": "rounds once, ties away from zero, with a multiplier of 15 bits",
    "openvino": "adds a float32 bias with the zero point to a float32 product and rounds once, ties to even",
    "power_of_two": "shifts and rounds once, ties to even",
    "ruy": "rounds once, ties up, behind a left shift that wraps",
    "single_round": "rounds once, ties up",
    "stochastic": "rounds up or down at random",
    "torch_fbgemm": "adds a float32 bias and rounds a float32 product once, ties to even",
    "torch_onednn": "adds bias and zero point in float32 steps and rounds once, ties to even",
    "torch_onednn_conv": "adds bias and zero point in float32 steps and rounds once, ties to even",
    "torch_qnnpack": "adds a rounded bias and rounds a float32 product once, ties to even",
    "tflite_arm_depthwise": "rounds twice, ties up both times",
    "tflite_arm_depthwise_3x3": "rounds twice, ties up both times, and shifts left after that",
    "tflite_arm_gemm": "rounds once, ties up, but twice where the output is a single row",
    "tflite_depthwise_neon": "rounds twice, ties up both times in blocks of 8 channels",
    "tosa_double": "adds a nudge of 2^30 before it rounds once, ties up",
    "tosa_single": "rounds once, ties up",
    "tvm": "rounds once, ties up, and shifts powers of two in 32 bits",
    "tvm_tonearest": "rounds once, ties away from zero",
    "xnnpack_rndnu": "rounds once, ties up, with a float32 scale",
}

FORMULAS = {
    "executorch_rescale": "dequantizes to float32, multiplies by 1/s and rounds once",
    "onnx_add": "multiplies and adds in float32, the zero points in one constant, and rounds once",
    "onnx_average_pool": "adds the window in float32, one code after the other, divides, and rounds once",
    "onnx_float_add": "dequantizes to float32, adds, divides by the scale and rounds once",
    "onnx_float_average_pool": "dequantizes to float32, averages, divides by the scale and rounds once",
    "onnx_float_multiply": "dequantizes to float32, multiplies, divides by the scale and rounds once",
    "onnx_global_average": "multiplies the integer sum by a float32 scale and rounds once",
    "onnx_multiply": "rounds a float32 product once, the zero point inside",
    "onnx_rescale": "dequantizes to float32, divides by the scale and rounds once",
    "openvino_add": "adds two products of 14-bit multipliers and shifts once, ties to even",
    "tflite_add": "rounds each operand 20 bits up twice, and their sum twice",
    "tflite_add_neon": "shifts and rounds each operand once 20 bits up, and their sum twice, in blocks of 16",
    "tflite_average_pool": "divides the sum of the codes as they are, ties away from the code 0",
    "tflite_matmul": "rounds twice, ties up, then away from zero, with a float32 product of the scales",
    "tflite_mean": "divides the multiplier by the count, and rounds twice",
    "tflite_mean_neon": "rounds the sum twice, and the zero points' share apart",
    "tflite_micro_matmul": "rounds twice, ties up, then away from zero",
    "tflite_multiply": "rounds the product twice, with int32 steps",
    "tflite_multiply_neon": "rounds the product twice, ties up both times in blocks of 16",
    "tflite_rescale_neon": "rounds twice, ties up both times in blocks of 16",
    "torch_adaptive_mean": "multiplies the sum by 1/n and adds the zero point in one float32 step, in blocks",
    "torch_add": "dequantizes to float32, adds, multiplies by 1/s and rounds once, in blocks of 64",
    "torch_average_pool": "multiplies the sum by float32(1/n) and rounds once, in blocks of channels",
    "torch_average_pool_contiguous": "multiplies the sum by float32(1/n), adds the zero point, and rounds once",
    "torch_mean": "divides the sum of the codes as they are by n in float32 and rounds once",
    "torch_multiply": "rounds a float32 product once, with the reciprocal of the scale",
    "torch_qnnpack_add": "adds two products of 22-bit multipliers and shifts once, ties away from zero",
    "torch_qnnpack_add_broadcast": "adds two products of 22-bit multipliers and shifts once, ties away from zero; "
    "operands of different shapes are added in float32",
    "torch_qnnpack_average": "multiplies the integer sum by a float32 scale and rounds once",
    "torch_rescale": "dequantizes to float32, and multiplies by 1/s and adds the zero point in one step",
    "tosa_add": "rescales each operand 20 bits up and then their sum, each with ties up",
    "tosa_average_pool": "multiplies the sum by a 31-bit reciprocal of the count and rounds once, ties up",
    "xnnpack_add": "adds two products of 21-bit multipliers and shifts once, ties up",
    "xnnpack_matmul": "rounds a float32 product once where the second operand is symmetric, else twice",
    "xnnpack_mean": "rounds a float32 product of the sum once, the zero points in one constant",
    "xnnpack_mean_arm": "rounds a fused float32 multiply-add of the sum and the zero points' constant once",
    "xnnpack_multiply": "rounds a float32 product once, ties to even",
    "xnnpack_multiply_arm": "rounds once, ties up, with a float32 scale",
    "xnnpack_rescale": "multiplies by the scale in 256ths and shifts once, ties up",
}

QUANTIZATIONS = {
    "reciprocal": "computes rint(x * (1/s)) + z",
    "reciprocal_fma": "computes rint(fma(x, 1/s, z))",
    "reciprocal_inside": "computes rint(x * (1/s) + z)",
    "division": "computes rint(x / s) + z",
    "division_away": "computes round(x / s) + z, ties away from zero",
    "division_inside": "computes rint(x / s + z)",
}

_TIES = {
    "nearest_even": "rounds once, ties to even",
    "nearest_away": "rounds once, ties away from zero",
    "nearest_up": "rounds once, ties up",
    "toward_zero": "rounds once, toward zero",
    "floor": "rounds once, down",
    "ceil": "rounds once, up",
}


def method_of(node: Node) -> str | None:
    """The name of a node's last step: a rule, a formula, "exact sum (ROUNDING)", or a backend's kernel.

    None if codes only move. A fused node without a backend has its members' methods, "conv: float32, add: ...".
    """
    if node.op == backend.NAME:
        if node.attributes["backend"] is not None:
            return f"{node.attributes['backend']}'s kernel {node.attributes['pattern']}"
        named = [(m, method_of_attributes(m.attributes)) for m in backend.members_of(node.attributes).values()]
        return ", ".join(f"{m.label}: {method}" for m, method in named if method is not None) or None
    return method_of_attributes(node.attributes)


def method_of_attributes(attributes: Mapping[str, Any]) -> str | None:
    """`method_of` for the attributes of a node that is not fused."""
    if "rule" in attributes:
        return str(attributes["rule"])
    if "formula" in attributes:
        return str(attributes["formula"])
    return f"exact sum ({attributes['rounding']})" if "rounding" in attributes else None


def rule_phrase(name: str) -> str:
    """What a rule of requantization does; the name itself if the rule is unknown."""
    if name in RULES:
        return RULES[name]
    family, *parameters = name.split(":")
    if family == "power_of_two" and len(parameters) == 2:
        return f"shifts with the rounding {parameters[0]} and the overflow {parameters[1]}"
    if family == "nemo" and parameters:
        return f"rounds down with a multiplier of {parameters[0]} steps to 1"
    return f"follows {name}"


def phrase(name: str) -> str:
    """What the method called `name` (see `method_of`) does."""
    if name.startswith("exact sum ("):
        return f"adds exactly in 64 bits and {_TIES.get(name[11:-1], 'rounds once')}"
    if name in FORMULAS:
        return FORMULAS[name]
    if "'s kernel " in name:
        return "computes with its kernel " + name.partition("'s kernel ")[2]
    if ": " in name:
        return f"computes {name}"
    return rule_phrase(name.partition("/")[0])
