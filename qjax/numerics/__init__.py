"""Exact arithmetic of quantized networks: rounding, multipliers, requantization, fake quantization.

    codes -> quantize -> sum of products (int32) -> requantize, by a named rule -> codes -> dequantize

The package imports jax and numpy only.
"""

from qjax.numerics import float32
from qjax.numerics.accumulator import Accumulator
from qjax.numerics.affine import choose_qparams, dequantize, quantize
from qjax.numerics.fake_quant import fake_quant, fake_quant_codes, lsq_gradient_scale
from qjax.numerics.fixed_point import (
    Multiplier,
    effective_scale,
    quantize_multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from qjax.numerics.learned_scale import learned_scale, log2_scale_of, pact_scale, power_of_two_scale
from qjax.numerics.narrow_sums import pair_sum_events
from qjax.numerics.qparams import QParams
from qjax.numerics.qspec import QSpec
from qjax.numerics.reciprocal_root import integer_rsqrt, integer_sqrt
from qjax.numerics.requantize import requantize
from qjax.numerics.rounding import Rounding, round_float, rounding_right_shift
from qjax.numerics.rules import Call, Rule, apply_scale_16, get_rule, register_family, register_rule, rule_names
from qjax.numerics.softfloat import Real

__all__ = [
    "Accumulator",
    "Call",
    "Multiplier",
    "QParams",
    "QSpec",
    "Real",
    "Rounding",
    "Rule",
    "apply_scale_16",
    "choose_qparams",
    "dequantize",
    "effective_scale",
    "fake_quant",
    "fake_quant_codes",
    "float32",
    "get_rule",
    "integer_rsqrt",
    "integer_sqrt",
    "learned_scale",
    "log2_scale_of",
    "lsq_gradient_scale",
    "pact_scale",
    "pair_sum_events",
    "power_of_two_scale",
    "quantize",
    "quantize_multiplier",
    "register_family",
    "register_rule",
    "requantize",
    "round_float",
    "rounding_divide_by_power_of_two",
    "rounding_right_shift",
    "rule_names",
    "saturating_rounding_doubling_high_mul",
]
