"""Targets that stand for a rounding rule rather than a runtime."""

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, register

NEAREST_EVEN = register(
    Target(
        "nearest_even",
        wide_activations=True,
        wide_zero_points=True,
        description="one exact rounding everywhere, ties to even",
    )
)
SINGLE_ROUND = register(
    Target(
        "single_round",
        "single_round",
        Rounding.NEAREST_UP,
        wide_activations=True,
        wide_zero_points=True,
        description="one exact rounding everywhere, ties up",
    )
)
DOUBLE_ROUND = register(
    Target(
        "double_round",
        "double_round",
        Rounding.NEAREST_AWAY,
        wide_activations=True,
        wide_zero_points=True,
        description="gemmlowp's two roundings behind products, one rounding with ties away from zero elsewhere",
    )
)
