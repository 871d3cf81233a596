"""Targets of FPGAs: scales that are powers of two, and the fixed-point types of high-level synthesis."""

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, register

FPGA = register(
    Target(
        "fpga",
        "power_of_two:RND_CONV:SAT",
        Rounding.NEAREST_EVEN,
        multiply="power_of_two:RND_CONV:SAT",
        matmul="power_of_two:RND_CONV:SAT",
        rescale="power_of_two:RND_CONV:SAT",
        mean=None,
        wide_activations=True,
        description="one shift, ap_fixed<RND_CONV, SAT>; for models whose scales are powers of two (method='tqt')",
    )
)
