"""The target of ExecuTorch's XNNPACK delegate, for models from its quantizer."""

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, Weighted, register

EXECUTORCH_XNNPACK = register(
    Target(
        "executorch_xnnpack",
        Weighted("float32", "f32"),
        Rounding.NEAREST_EVEN,
        add="xnnpack_add",
        subtract="xnnpack_add",
        multiply="xnnpack_multiply",
        # The partitioner keeps products of two activations in float32.
        matmul="float32/f32",
        rescale="executorch_rescale",
        mean="xnnpack_mean",
        quantize="reciprocal",
        softmax="float32",
        tables="xnnpack",
        lstm=None,
        svdf=None,
        mixed_widths=False,
        wide_weights=False,
        description="ExecuTorch's XNNPACK delegate on x86: one rounding of a float32 product, ties to even",
    )
)
