"""Targets of TVM: the default lowering of q_multiply_shift, and the NEON lowering that was removed with Relay."""

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, Weighted, register

TVM = register(
    Target(
        "tvm",
        "tvm",
        Rounding.NEAREST_UP,
        per_channel=Weighted("single_round"),
        multiply="single_round",
        matmul="single_round",
        rescale="single_round",
        quantize="division",
        # `relax.op.quantize` of TVM 0.27 writes int16 and uint16 with any zero point.
        wide_activations=True,
        wide_zero_points=True,
        description="TVM's q_multiply_shift, default lowering: one rounding, ties up; scales per channel per axis",
    )
)

TVM_NEON = register(
    Target(
        "tvm_neon",
        "neon",
        Rounding.NEAREST_UP,
        multiply="neon",
        matmul="neon",
        rescale="neon",
        quantize="division",
        wide_activations=True,
        wide_zero_points=True,
        description="TVM up to 0.19 on arm_cpu where it vectorised by four: SQRDMULH and SRSHL, two roundings",
    )
)
