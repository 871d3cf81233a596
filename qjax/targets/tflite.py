"""Targets of TensorFlow Lite: LiteRT's three sets of kernels, and TFLite Micro.

The same .tflite file produces different codes with each of them, and with the optimised ones on ARM and on x86.
"""

from typing import Any

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, Weighted, register

_COMPOSED = frozenset({"dot", "normalize", "softmax"})
"""For LiteRT only, because TFLite Micro has no kernel that looks up the table of reciprocal roots."""

_EVERYWHERE: dict[str, Any] = {
    "average_pool": "tflite_average_pool",
    "same_grid": frozenset({"average_pool"}),
    "svdf": "tflite",
    "squared_difference": "tflite",
    "unit_grids": True,
    "mixed_widths": False,
    "wide_weights": False,
    "wide_activations": True,
}
"""What all of them share."""
_LITERT: dict[str, Any] = {
    **_EVERYWHERE,
    "wide": Weighted("int16x8"),
    "wide_dot": Weighted("float64_away"),
    "quantize": "reciprocal",
    "softmax": "float32",
    "lstm": "tflite",
    "composed": _COMPOSED,
}
"""What LiteRT's kernels for CPUs share."""

TFLITE_MICRO = register(
    Target(
        "tflite_micro",
        "double_round",
        Rounding.NEAREST_AWAY,
        add="tflite_add",
        subtract="tflite_add",
        multiply="double_round",
        matmul="tflite_micro_matmul",
        rescale="double_round",
        mean="tflite_mean",
        quantize="division_away",
        wide="int16x8",
        tables="gemmlowp",
        softmax="gemmlowp",
        resize="tflite",
        lstm="tflite_micro",
        **_EVERYWHERE,
        description="TFLite Micro, portable kernels: gemmlowp's two roundings",
    )
)

TFLITE_REFERENCE = register(
    TFLITE_MICRO.replace(
        name="tflite_reference",
        matmul="tflite_matmul",
        lstm="tflite",
        dot=Weighted("float64_away"),
        wide_dot=Weighted("float64_away"),
        tables="tflite",
        multiply="tflite_multiply",
        dynamic="tflite",
        composed=_COMPOSED,
        description="LiteRT's reference kernels (BUILTIN_REF): FULLY_CONNECTED in doubles, the others gemmlowp's",
    )
)

TFLITE_OPTIMIZED_X86 = register(
    Target(
        "tflite_optimized_x86",
        "neon",
        Rounding.NEAREST_UP,
        dot=Weighted("neon", "f32"),
        dot_per_channel=Weighted("neon", "f64"),
        depthwise=Weighted("tflite_depthwise_neon"),
        add="tflite_add_neon",
        subtract="tflite_add",
        multiply="tflite_multiply_neon",
        # BATCH_MATMUL uses the reference rounding.
        matmul="tflite_matmul",
        rescale="tflite_rescale_neon",
        mean="tflite_mean_neon",
        dequantize="product_sum",
        tables="tflite",
        resize="tflite_optimized",
        dynamic="tflite",
        **_LITERT,
        description="LiteRT's optimised kernels on x86, without delegates: two roundings, ties up",
    )
)

TFLITE_OPTIMIZED_ARM = register(
    TFLITE_OPTIMIZED_X86.replace(
        name="tflite_optimized_arm",
        # These two were not measured on ARM, where the compiler may fuse the multiply and the add.
        dequantize="product",
        dynamic="onnx",
        requantize=Weighted("tflite_arm_gemm"),
        dot=Weighted("tflite_arm_gemm", "f32"),
        dot_per_channel=Weighted("tflite_arm_gemm", "f64"),
        depthwise=Weighted("tflite_arm_depthwise"),
        softmax="uint16",
        resize="tflite_arm",
        lstm=None,
        svdf=None,
        description="LiteRT's optimised kernels on AArch64: ruy's single rounding, NEON's two for a batch of one",
    )
)

TFLITE_XNNPACK = register(
    Target(
        "tflite_xnnpack",
        Weighted("float32", "f32"),
        Rounding.NEAREST_EVEN,
        add="xnnpack_add",
        subtract="xnnpack_add",
        multiply="xnnpack_multiply",
        matmul="xnnpack_matmul",
        rescale="xnnpack_rescale",
        mean="xnnpack_mean",
        tables="xnnpack",
        resize="xnnpack",
        dynamic="xnnpack",
        **_LITERT,
        description="LiteRT's default, XNNPACK, on x86: one rounding of a float32 product, ties to even",
    )
)

TFLITE_XNNPACK_ARM = register(
    TFLITE_XNNPACK.replace(
        name="tflite_xnnpack_arm",
        # The TFLite formula was not measured on ARM.
        dynamic="onnx",
        multiply="xnnpack_multiply_arm",
        mean="xnnpack_mean_arm",
        softmax="uint16",
        resize="xnnpack_arm",
        lstm=None,
        svdf=None,
        description="LiteRT's default, XNNPACK, on AArch64: MUL rounds ties up, MEAN adds in a fused step",
    )
)
