"""What follows an accumulator: affine steps folded into integer constants, one rounding, one clamp.

An accumulator has the value `acc * scale`. The affine steps after it (a bias, batch norm, a multiplication by a scalar)
turn this into `g * acc * scale + b` per channel. Requantization divides by the output's scale. All constants are
computed in `Real`, so that host and jit agree bit for bit.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics._namespace import host_or_trace, traced, wide
from qjax.numerics.calls import named
from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.requantize import requantize
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops.accumulate import signed_offset
from qjax.ops.base import Array, Attributes, Constants
from qjax.ops.channels import weight_to_result
from qjax.ops.formulas import get as get_formula
from qjax.targets import Weighted

BIAS_BITS = 30
"""|bias| <= 2^30 leaves the other half of int32 to the products."""

_SMALLEST_SCALE = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Affine:
    """`g * real + b`, per channel: vectors that broadcast against the result's trailing axes."""

    g: Real
    b: Real

    @classmethod
    def identity(cls) -> "Affine":
        return cls(Real.of(np.float32(1)), Real.of(np.float32(0)))

    def times(self, factor: Real) -> "Affine":
        return Affine(self.g * factor, self.b * factor)

    def plus(self, offset: Real) -> "Affine":
        return Affine(self.g, self.b + offset)


@dataclasses.dataclass(frozen=True)
class Folded:
    """The constants of a weighted producer.

    factor: float32; the weight's codes become `rint(codes * factor)`. It is 1, or -1 where the batch norm's gamma is
    negative (symmetric codes change sign), except in degenerate channels (see `fold_weighted`). weight_scale: float32,
    the scale of those codes. bias: int32 at `x_scale * weight_scale`. requantize: int32 by role, the constants of the
    rule.
    """

    factor: Array
    weight_scale: Array
    bias: Array
    requantize: dict[str, Array]


def fold_weighted(
    x_scale: ArrayLike,
    w_scale: ArrayLike,
    y_scale: ArrayLike,
    affine: Affine,
    weighted: Callable[[bool], Weighted] | None = None,
) -> Folded:
    """Fold the steps after `sum (q_x - z_x) q_w` into the weight's scale, the bias and the multiplier.

    The weight's codes are those of training: `g` only changes their sign and their scale to `|g| * s_w` (as float32,
    the precision in which runtimes store scales). If gamma is almost zero, a channel's bias may not fit into the
    accumulator. Such a channel gets the smallest scale with which `|bias| <= 2^30`; if all channels share one scale,
    all of them get it. Its codes shrink accordingly, and rounding them moves the output by at most `(1 + 2^-8)
    max(2^-31 |b| / s_y, 2^-101 s_x / s_y)` steps per weight and per unit of `|q_x - z_x|`: 2^-22 steps where the bias
    alone is worth 512 of them.
    """
    s_x, s_w = Real.of(x_scale), Real.of(w_scale)
    wanted = s_w * abs(affine.g)
    needed = abs(affine.b) / (s_x * Real.of(np.float32(2.0**BIAS_BITS)))
    per_channel = math.prod(wanted.shape) > 1
    if not per_channel and needed.shape:
        # all channels have one scale, so the largest bias decides
        largest = needed.to_float32()
        needed = Real.of(host_or_trace(largest).max(largest))
    floor = Real.of(np.float32(_SMALLEST_SCALE))
    lowest = needed.maximum(floor)
    degenerate = wanted < lowest
    # slightly larger, so that rounding to float32 cannot push the bias over its limit
    lowest = lowest * Real.of(np.float32(1 + 2.0**-20))
    scale = Real.where(degenerate, lowest, wanted).to_float32()
    shape = tuple(scale.shape)
    xp = host_or_trace(scale)
    negative = xp.broadcast_to(affine.g < Real.of(np.float32(0)), shape)
    ratio = Real.where(degenerate, wanted / Real.of(scale), Real.of(np.float32(1))).to_float32()
    factor = xp.where(negative, -ratio, ratio)
    bias = (affine.b / (s_x * Real.of(scale))).to_int32()
    chosen = Weighted() if weighted is None else weighted(per_channel)
    bias, constants = requantization(x_scale, scale, y_scale, affine.b, bias, chosen, per_channel)

    def full(value: Any) -> Any:
        return xp.broadcast_to(value, np.broadcast_shapes(shape, np.shape(value)))

    return Folded(
        factor.astype(np.float32), scale, full(bias), {role: full(value) for role, value in constants.items()}
    )


def requantization(
    x_scale: Any, w_scale: Any, y_scale: Any, b: Real, bias: Any, weighted: Weighted, per_channel: bool
) -> tuple[Any, dict[str, Array]]:
    """What the accumulator starts from, and the constants of the rule that finishes it, by role.

    Args:
      w_scale: float32, the scales of the weight's codes, as a vector of the result. per_channel: whether they differ.
      b: the bias as a real number. bias: int32, the same in steps of the accumulator; the accumulator starts from 0
        instead if the rule adds the bias itself.
    """
    rule = get_rule(weighted.rule)
    effective = effective_scale(x_scale, w_scale, y_scale, form=weighted.scale)
    if rule.of_scales is not None:
        constants = rule.of_scales(x_scale, w_scale, y_scale, b, per_channel)
    elif rule.takes_bias:
        # the runtime divides its float bias by the accumulator's scale, each step in float32
        step = (Real.of(x_scale) * Real.of(w_scale)).to_float32()
        constants = rule.prepare(effective, float32.divide(float32.of(b), float32.of(step)))
    else:
        constants = rule.prepare(effective)
    if rule.takes_bias:
        bias = host_or_trace(bias).zeros_like(bias)
    return bias, dict(constants._asdict())


def scale_codes(codes: Any, factor: Any) -> Any:
    """`rint(codes * factor)` in the dtype of the codes; |factor| <= 1. A factor of 1 does not change the codes."""
    xp = host_or_trace(codes, factor)
    if not traced(factor) and np.all(np.equal(factor, 1)):
        return xp.asarray(codes)  # without copying a model's weights
    product = xp.asarray(codes).astype(np.float32) * xp.broadcast_to(xp.asarray(factor), codes.shape)
    return xp.rint(product).astype(codes.dtype)


def fold_zero_point(attributes: Attributes, constants: Constants, summed: Sequence[int]) -> Constants:
    """Move the input's zero point into the bias: sum (q - z) w + b = sum q w + (b - z sum w), modulo 2^32.

    summed: the weight's axes that the accumulator sums over.
    """
    kernel = constants["kernel"]
    xp = host_or_trace(kernel, *constants.values())
    zero_point = xp.asarray(constants["zero_point0"]) - np.int32(signed_offset(attributes["input_dtypes"][0]))
    with np.errstate(over="ignore"):
        sums = xp.sum(xp.asarray(kernel), axis=tuple(summed), dtype=np.int32, keepdims=True)
        correction = weight_to_result(sums, attributes["channels"], attributes["rank"])
        shape = np.broadcast_shapes(np.shape(constants["bias"]), correction.shape)
        bias = xp.broadcast_to(xp.asarray(constants["bias"]), shape)
        bias = bias - xp.broadcast_to(correction, shape) * xp.broadcast_to(zero_point, shape)
    return {**constants, "bias": bias}


def finish_weighted(acc: jax.Array, constants: Constants, attributes: Attributes) -> jax.Array:
    """int32 accumulator -> codes: bias, requantization, zero point, clamp, cast."""
    bias = jnp.asarray(constants["bias"])
    acc = acc + jnp.broadcast_to(bias, acc.shape)
    rule = get_rule(attributes["rule"])
    codes = requantize(
        acc,
        rule.constants(**{role: constants[role] for role in rule.fields}),
        rule=rule.name,
        zero_point=constants["y_zero_point"],
        qmin=attributes["qmin"],
        qmax=attributes["qmax"],
    )
    return clamp_codes(codes, constants).astype(attributes["dtype"])


def clamp_codes(codes: jax.Array, constants: Constants) -> jax.Array:
    """Apply the bounds of a fused relu or clip to the codes, if there are any."""
    if "clamp_min" in constants:
        codes = jnp.maximum(codes, jnp.asarray(constants["clamp_min"]).astype(codes.dtype))
    if "clamp_max" in constants:
        codes = jnp.minimum(codes, jnp.asarray(constants["clamp_max"]).astype(codes.dtype))
    return codes


# ---------------------------------------------------------------------------- sums of scaled integers

_FACTOR_BITS = 30
_MAX_SHIFT = 44
_OFFSET_LIMIT = np.nextafter(np.float32(2.0**62), np.float32(0))
"""A greater offset is cut to this limit, which the clamp to the codes' range then hides.

With |sum of products| < 2^61 there remain at least (2^62 - 2^38 - 2^61) / 2^44 > 2^16 steps of its own sign.
"""


NARROW_MAX_SHIFT = 52
"""The same for codes of 8 bits: (2^62 - 2^61) / 2^52 = 2^9 steps still hide that an offset was cut."""


def fold_sum(
    scales: Sequence[Any], y_scale: ArrayLike, affine: Affine, max_shift: int = _MAX_SHIFT
) -> dict[str, Array]:
    """Constants for `y = (g * sum_i s_i acc_i + b) / s_y = (sum_i acc_i m_i + offset) / 2^shift`.

    The factors m_i share one shift per channel, chosen so that the largest has 30 bits. Products and offset are added
    in int64 and rounded once, so a residual addition rounds once and not once per operand. The shift is at most 44: a
    ratio below 2^-14 has fewer bits, and is exact to `2^-45` steps per unit of an accumulator.

    Returns:
      int32 arrays: shift, factor0, factor1, ..., and the offset as offset_high * 2^31 + offset_low.

    Raises:
      ValueError: a ratio of 2^29 or more, on the host (under a trace the factor saturates).
    """
    s_y = Real.of(y_scale)
    ratios = [Real.of(s) * affine.g / s_y for s in scales]
    largest = abs(ratios[0])
    for ratio in ratios[1:]:
        largest = largest.maximum(abs(ratio))
    offset = affine.b / s_y
    xp = host_or_trace(largest.mantissa, offset.mantissa)
    with wide(xp):
        # largest = mantissa * 2^exponent with a 53-bit mantissa: below 2^(exponent + 53)
        exponent = xp.where(largest.is_zero, 0, largest.exponent + 53)
        if xp is np and np.any(exponent >= _FACTOR_BITS):
            raise ValueError(
                f"fold_sum: one input step is {np.max(largest.to_float64()):.3g} output steps; expected less than "
                "2^29: the output's scale is far too small for its input."
            )
        shift = xp.clip(_FACTOR_BITS - exponent, 1, max_shift).astype(np.int32)
        limit = Real.of(_OFFSET_LIMIT)
        bounded = offset.scale_by_power_of_two(shift).minimum(limit).maximum(-limit)
        constants: dict[str, Array] = {"shift": shift, **_split(bounded)}
    for i, ratio in enumerate(ratios):
        constants[f"factor{i}"] = ratio.scale_by_power_of_two(shift).to_int32()
    return constants


def _split(value: Real) -> dict[str, Array]:
    """A real below 2^62, rounded to an integer, in two int32 words: high * 2^31 + low."""
    integer = value.to_int64()
    return {
        "offset_high": (integer >> 31).astype(np.int32),
        "offset_low": (integer & (2**31 - 1)).astype(np.int32),
    }


def greatest_shift(qmin: int | None, qmax: int | None) -> int:
    """`fold_sum`'s max_shift for one accumulator of up to 30 bits that becomes codes of this range."""
    narrow = qmin is not None and qmax is not None and qmax - qmin < 256
    return NARROW_MAX_SHIFT if narrow else _MAX_SHIFT


def finish_sum(accumulators: Sequence[jax.Array], constants: Constants, attributes: Attributes) -> jax.Array:
    """int32 accumulators -> codes under `fold_sum`'s constants."""
    factors = [f"factor{i}" for i in range(len(accumulators))]
    bounds = [role for role in ("clamp_min", "clamp_max") if role in constants]
    roles = ("shift", "offset_high", "offset_low", *factors, "y_zero_point", *bounds)
    ends = attributes["qmin"], attributes["qmax"], attributes["dtype"]
    return finished_sum(
        tuple(accumulators), tuple(constants[role] for role in roles), roles, attributes["rounding"], ends
    )


@named(2, 3, 4)
def finished_sum(
    accumulators: Sequence[jax.Array],
    values: Sequence[Any],
    roles: Sequence[str],
    rounding: str,
    ends: tuple[int, int, str],
) -> jax.Array:
    """`finish_sum` for constants in the order of their roles. ends: the lowest code, the highest, and their dtype."""
    constants, (qmin, qmax, dtype) = dict(zip(roles, values, strict=True)), ends
    shape = jnp.broadcast_shapes(*(acc.shape for acc in accumulators))
    with jax.enable_x64(True):

        def wide_(name: str) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(constants[name]).astype(jnp.int64), shape)

        total = (wide_("offset_high") << 31) + wide_("offset_low")
        for i, acc in enumerate(accumulators):
            total = total + jnp.broadcast_to(acc, shape).astype(jnp.int64) * wide_(f"factor{i}")
        rounded = right_shift_with_headroom(jnp, total, wide_("shift"), Rounding(rounding))
        codes = rounded + wide_("y_zero_point")
        codes = jnp.clip(codes, np.int64(qmin), np.int64(qmax))
        return clamp_codes(codes.astype(jnp.int32), constants).astype(dtype)


# ---------------------------------------------------------------------------- formulas of runtimes


def finish(
    operands: Sequence[jax.Array],
    constants: Constants,
    attributes: Attributes,
    accumulators: Callable[[], Sequence[jax.Array]] | None = None,
) -> jax.Array:
    """Codes -> codes of an operation without weights: the node's formula, or the exact sum if it names none.

    operands: what a formula reads, see `formulas.Formula`. accumulators: what the exact sum adds, if it differs.
    """
    if "formula" not in attributes:
        return finish_sum(operands if accumulators is None else accumulators(), constants, attributes)
    codes = get_formula(attributes["formula"]).kernel(operands, constants, attributes)
    low, high = np.int32(attributes["qmin"]), np.int32(attributes["qmax"])
    codes = jnp.minimum(jnp.maximum(codes, low), high)
    return clamp_codes(codes, constants).astype(attributes["dtype"])
