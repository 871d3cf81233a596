"""Targets of PyTorch's quantized operators on x86, one per engine.

Averages are those of channels-last tensors, which PyTorch's quantized convolutions return, and a mean over height and
width is adaptive_avg_pool2d(1). FBGEMM and oneDNN take uint8 activations. Their products are exact with VNNI, or with
activations of 7 bits, and saturate to int16 in pairs otherwise.
"""

from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.targets.base import Target, Weighted, register

TORCH_FBGEMM = register(
    Target(
        "torch_fbgemm",
        Weighted("torch_fbgemm", "f32"),
        add="torch_add",
        multiply="torch_multiply",
        rescale="torch_rescale",
        mean="torch_adaptive_mean",
        average_pool="torch_average_pool",
        same_grid=frozenset({"mean", "average_pool"}),
        quantize="reciprocal_fma",
        mixed_widths=False,
        wide_weights=False,
        description="PyTorch's engine fbgemm, and x86 without VNNI: a float32 bias, one rounding of a float32 product",
    )
)

TORCH_FBGEMM_AVX2 = register(
    TORCH_FBGEMM.replace(
        name="torch_fbgemm_avx2",
        accumulator=Accumulator(pairs=True),
        description="the same on a CPU without VNNI: products of uint8 and int8 saturate to int16 in pairs",
    )
)

TORCH_ONEDNN = register(
    TORCH_FBGEMM.replace(
        name="torch_onednn",
        requantize=Weighted("torch_onednn_conv", "f32"),
        dot=Weighted("torch_onednn", "f32"),
        description="PyTorch's engine onednn, x86's convolutions with VNNI: float32 bias, scale and zero point",
    )
)

TORCH_ONEDNN_AVX2 = register(
    TORCH_ONEDNN.replace(
        name="torch_onednn_avx2",
        accumulator=Accumulator(pairs=True, unit="tap", padding="skip"),
        depthwise_accumulator=EXACT,
        description="the same on a CPU without VNNI: products of uint8 and int8 saturate to int16 in pairs",
    )
)

TORCH_QNNPACK = register(
    TORCH_FBGEMM.replace(
        name="torch_qnnpack",
        requantize=Weighted("torch_qnnpack", "f32"),
        add="torch_qnnpack_add",
        mean="torch_qnnpack_average",
        average_pool="torch_qnnpack_average",
        description="PyTorch's engine qnnpack on x86: an int32 bias, one rounding of a float32 product",
    )
)
