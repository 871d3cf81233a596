"""Targets of ONNX Runtime on the CPU."""

from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, Weighted, register

ONNXRUNTIME = register(
    Target(
        "onnxruntime",
        Weighted("float32", "f32"),
        Rounding.NEAREST_EVEN,
        add="onnx_add",
        subtract="onnx_float_add",
        multiply="onnx_multiply",
        matmul="float32/f32",
        scaled_matmul=True,
        rescale="onnx_rescale",
        mean="onnx_global_average",
        average_pool="onnx_average_pool",
        quantize="division",
        softmax="onnx",
        wide_activations=True,
        wide_zero_points=True,
        description="ONNX Runtime's CPU provider on x86: QLinear operators, one rounding of a float32 product",
    )
)

ONNXRUNTIME_AVX2 = register(
    ONNXRUNTIME.replace(
        name="onnxruntime_avx2",
        accumulator=Accumulator(pairs=True),
        depthwise_accumulator=EXACT,
        description="the same on an x86 CPU without VNNI: products of uint8 and int8 saturate to int16 in pairs",
    )
)
