"""Training under a budget: bits that are learned (`LearnedBits`), what they cost, and sums that fit an accumulator.

In reading order: `learned_bits`, `dropped_bits`, `narrowed`, `resources`, `pareto`, `a2q`.
"""

from qjax.contrib.learned_bits.a2q import AccumulatorConstraint, accumulator_bound, constrain_accumulators
from qjax.contrib.learned_bits.learned_bits import BitsParam, LearnedBits
from qjax.contrib.learned_bits.pareto import ParetoFront, Point
from qjax.contrib.learned_bits.resources import ebops

__all__ = [
    "AccumulatorConstraint",
    "BitsParam",
    "LearnedBits",
    "ParetoFront",
    "Point",
    "accumulator_bound",
    "constrain_accumulators",
    "ebops",
]
