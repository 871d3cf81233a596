"""Fixed-point rules that one runtime or paper defines for itself: TVM, XNNPACK, TFLite's int16, NVDLA, TOSA, NEMO.

Notation as in `classic`: acc * e ~ acc * M * 2^(s-31), so t = 31 - s is the right shift of the product.
"""

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import host_or_trace, like_inputs, traced, wide
from qjax.numerics.fixed_point import MAX_SHIFT, Multiplier, quantize_multiplier
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.rules.multiplier import INT32_MAX, INT32_MIN, check_int32, fixed_point, saturated, wrapped
from qjax.numerics.rules.registry import Call, Rule, register_family, registered
from qjax.numerics.softfloat import Real

# ------------------------------------------------------------------------------------ TVM


@fixed_point("tvm_tonearest", monotone=True)
def tvm_tonearest(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """Relay's QNN requantize with TONEAREST: (p + (p >= 0 ? 2^(t-1) : 2^(t-1) - 1)) >> t in 64 bits.

    The result equals that of `nearest_away`, because the smaller nudge sends a negative tie down. A result beyond int32
    saturates here, whereas the source casts it to int32 and requires that it fits.

    Source: Relay's FixedPointMultiplyToNearest, which TVM 0.20 removed.
    """
    p = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
    t = np.int64(31) - m.shift.astype(jnp.int64)
    nudge = (np.int64(1) << (t - np.int64(1))) - (p < 0).astype(jnp.int64)
    return saturated((p + nudge) >> t)


@fixed_point("tvm", monotone=True)
def tvm(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """TVM's q_multiply_shift: one rounding with ties up, and 32-bit arithmetic that wraps for powers of two.

    For M != 2^30 it is (acc << l) * M + 2^(30+r) >> (31+r) in 64 bits, cast to int32. This is `single_round`, except
    that a result beyond int32 wraps. M = 2^30 means e = 2^(s-1), for which TVM shifts the int32 itself: it computes acc
    << (s-1), or (acc + 2^(x-1)) >> x with x = 1 - s, whose sum wraps for acc near 2^31.

    TVM leaves two cases open. e = 1 (x = 0) does not compile in TVM, and the result here is acc. e = 2^-32 (x = 32)
    shifts an int32 by its width in TVM, and the result here is 0.

    Source: the default legalization of tir.q_multiply_shift, TVM 0.27.
    """
    # Modulo 2^32 a left shift before the product is one of the rounded result by fewer bits: t in [1, 62].
    p = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
    t = np.int64(31) - m.shift.astype(jnp.int64)
    general = wrapped(right_shift_with_headroom(jnp, p, t, Rounding.NEAREST_UP))

    left = jnp.maximum(m.shift - np.int32(1), np.int32(0))
    right = jnp.clip(np.int32(1) - m.shift, np.int32(0), np.int32(31))
    half = (np.int32(1) << right) >> np.int32(1)
    # For a right shift by 31, 1 << 31 is the least int32. Halving it keeps the sign.
    half = jnp.where(right == 31, np.int32(2**30), half)
    power = jnp.where(m.shift > 1, acc << left, (acc + half) >> right)
    power = jnp.where(m.shift < -30, np.int32(0), power)
    return jnp.where(m.multiplier == 2**30, power, general)


# ------------------------------------------------------------------------------------ XNNPACK


def _multiplier_of_float32(effective_scale: Any) -> Multiplier:
    """The `Multiplier` of e rounded to float32; its last 7 bits are 0."""
    return quantize_multiplier(Real.of(effective_scale).to_float32())


@fixed_point("xnnpack_rndnu", prepare=_multiplier_of_float32, monotone=True)
def xnnpack_rndnu(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """XNNPACK's rndnu, which differs from `ruy` in that the left shift saturates and e is a float32.

    The formula is SRSHL(SQDMULH(SQSHL(acc, l'), M), -r') with r' = max(1, -s) and l' = s + r'. A floor followed by a
    rounding shift is one rounding with ties up, so the result is that of `single_round` where nothing saturates. Only
    values beyond 2^29 saturate.

    Source: xnn_init_qs8_conv_minmax_rndnu_neon_params and its kernels (microparams-init.c), for 2^-32 <= e < 2^8; the
    scalar form is (acc * M + 2^(t-1)) >> t.
    """
    right = jnp.maximum(-m.shift, np.int32(1))
    # acc << 31 fits 64 bits
    shifted = saturated(acc.astype(jnp.int64) << (m.shift + right).astype(jnp.int64))
    high = (shifted.astype(jnp.int64) * m.multiplier.astype(jnp.int64)) >> np.int64(31)
    return right_shift_with_headroom(jnp, high, right.astype(jnp.int64), Rounding.NEAREST_UP).astype(jnp.int32)


# ------------------------------------------------------------------------------------ TFLite, 16-bit activations


def _with_shift_below(effective_scale: Any, rule: str, highest: int) -> Multiplier:
    """The `Multiplier` of e, whose shift is at most `highest`.

    Raises:
      ValueError: a greater one on the host; inside a trace it is the highest.
    """
    m = quantize_multiplier(effective_scale)
    if not traced(m.shift) and np.any(np.asarray(m.shift) > highest):
        raise ValueError(
            f"{rule} takes effective scales below 2^{highest}. Got one of 2^{int(np.max(m.shift)) - 1} or more: "
            "the output's scale is far too small for its input."
        )
    xp = host_or_trace(m.shift)
    return Multiplier(m.multiplier, xp.minimum(m.shift, np.int32(highest)))


def _fifteen_bits(xp: ModuleType, multiplier: Any) -> Any:
    """M / 2^16 rounded, ties up, at most 0x7FFF; int64."""
    return xp.minimum((multiplier.astype(np.int64) + np.int64(2**15)) >> np.int64(16), np.int64(0x7FFF))


def _multiplier_int16x8(effective_scale: Any) -> Multiplier:
    return _with_shift_below(effective_scale, "int16x8", _INT16_SHIFT)


_INT16_SHIFT = 7


@fixed_point("int16x8", prepare=_multiplier_int16x8, highest_shift=_INT16_SHIFT, accumulators=("int32", "int64"))
def int16x8(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """TFLite's rule for int16 activations: a multiplier of 15 bits, and one rounding with ties up.

    The formula is (acc * m' + 2^(14-s)) >> (15-s) with m' = (M + 2^15) >> 16, at most 0x7FFF. acc is int32 or int64,
    and an int64 beyond 48 bits is replaced by the nearest number within them. The result saturates.

    Source: the int64 overload of MultiplyByQuantizedMultiplier, which requires |acc| <= 2^47, s in [-31, 7] and a
    result that fits int32.
    """
    reduced = _fifteen_bits(jnp, m.multiplier)
    x = jnp.minimum(jnp.maximum(acc.astype(jnp.int64), np.int64(-(2**47))), np.int64(2**47))
    t = np.int64(15) - m.shift.astype(jnp.int64)
    return saturated(right_shift_with_headroom(jnp, x * reduced, t, Rounding.NEAREST_UP))


# ------------------------------------------------------------------------------------ NVDLA


_NVDLA_SHIFT = 15


def _multiplier_nvdla(effective_scale: Any) -> Multiplier:
    """The `Multiplier` of e rounded to 15 bits; its last 16 bits are 0."""
    m = _with_shift_below(effective_scale, "nvdla", _NVDLA_SHIFT)
    xp = host_or_trace(m.multiplier)
    with wide(xp):
        scale = _fifteen_bits(xp, m.multiplier).astype(np.int32)
    return Multiplier(scale << np.int32(16), m.shift)


@fixed_point("nvdla", prepare=_multiplier_nvdla, highest_shift=_NVDLA_SHIFT, monotone=True)
def nvdla(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """NVDLA's output converter: a 16-bit scale, and one right shift by up to 63 with ties away from zero.

    The formula is acc * S / 2^(15-s) with S = M / 2^16. The hardware saturates to 17 bits, which codes of 16 bits never
    show. It has no zero point, so use symmetric activations.

    Source: NV_NVDLA_SDP_CORE_c in cmod/hls/sdp/sdp_c.cpp of nvdla/hw, whose IntShiftRightSat is an ac_fixed with
    AC_RND_INF and AC_SAT.
    """
    p = acc.astype(jnp.int64) * (m.multiplier >> np.int32(16)).astype(jnp.int64)
    t = np.int64(15) - m.shift.astype(jnp.int64)
    return saturated(right_shift_with_headroom(jnp, p, t, Rounding.NEAREST_AWAY))


# ------------------------------------------------------------------------------------ TOSA


class TosaScale(NamedTuple):
    """A scale in TOSA's form, multiplier * 2^-shift.

    Attributes:
      multiplier: int32, nonnegative.
      shift: int32 of the same shape, in [2, 62].
    """

    multiplier: Any
    shift: Any


def tosa_scale(effective_scale: Any) -> TosaScale:
    """The multiplier and shift of TOSA's RESCALE for an effective scale.

    `quantize_multiplier` with the 31 moved into the shift. Source: computeMultiplierAndShift of MLIR's TOSA
    dialect, scaleWidth 32, up to scales below 2^-32: there MLIR halves the multiplier until the shift is 62,
    here it is 0; both give 0 for every int32.

    Raises:
      ValueError: on the host, a scale of 2^29 and more; a trace takes the greatest one.
    """
    m = quantize_multiplier(effective_scale)
    if not traced(m.shift) and np.any(np.asarray(m.shift) == MAX_SHIFT):
        raise ValueError("TOSA takes effective scales below 2^29. Got one of 2^29 or more; check s_x * s_w / s_y.")
    xp = host_or_trace(m.shift)
    too_great = m.shift == np.int32(MAX_SHIFT)
    return TosaScale(
        xp.where(too_great, np.int32(INT32_MAX), m.multiplier), xp.maximum(np.int32(31) - m.shift, np.int32(2))
    )


def _apply_scale_32(acc: jax.Array, c: TosaScale, double_round: bool) -> jax.Array:
    p = acc.astype(jnp.int64) * c.multiplier.astype(jnp.int64)
    shift = c.shift.astype(jnp.int64)
    nudge = np.int64(1) << (shift - np.int64(1))
    if double_round:
        more = jnp.where(acc >= 0, np.int64(2**30), np.int64(-(2**30)))
        nudge = nudge + jnp.where(c.shift > 31, more, np.int64(0))
    return saturated((p + nudge) >> shift)


def _check_tosa(c: TosaScale) -> None:
    check_int32(c)
    multiplier, shift = np.asarray(c.multiplier), np.asarray(c.shift)
    if np.any((multiplier < 0) | (shift < 2) | (shift > 62)):
        raise ValueError(
            "a TOSA multiplier must be at least 0 and its shift in [2, 62]. Got multipliers from "
            f"{multiplier.min()} to {multiplier.max()} and shifts from {shift.min()} to {shift.max()}."
        )


_tosa = partial(registered, prepare=tosa_scale, constants=TosaScale, check=_check_tosa, monotone=True)


@_tosa("tosa_single")
def tosa_single(acc: jax.Array, c: TosaScale, call: Call) -> jax.Array:
    """TOSA 1.0 apply_scale_32 with SINGLE_ROUND: (acc * multiplier + 2^(shift-1)) >> shift.

    The specification requires |acc| < 2^(shift-1) and a result that fits int32, whereas here the result saturates.
    """
    return _apply_scale_32(acc, c, double_round=False)


@_tosa("tosa_double")
def tosa_double(acc: jax.Array, c: TosaScale, call: Call) -> jax.Array:
    """TOSA 1.0 apply_scale_32 with DOUBLE_ROUND, which for shift > 31 adds sign(acc) * 2^30 before the shift.

    For a right shift by r >= 1 this is the same function as `double_round`, with gemmlowp's two roundings in one shift.
    With p the product, floor((floor((p + 2^30) / 2^31) + 2^(r-1)) / 2^r) is floor((p + 2^30 + 2^(30+r)) / 2^(31+r)).
    For a negative p, whose second rounding breaks ties downward, the same holds with -2^30. The two rules may differ
    where a scale is 1 or more, because gemmlowp shifts the accumulator left beforehand, in 32 bits.
    """
    return _apply_scale_32(acc, c, double_round=True)


def apply_scale_16(value: ArrayLike, multiplier: ArrayLike, shift: ArrayLike) -> Any:
    """TOSA 1.0 apply_scale_16: (value * multiplier + 2^(shift-1)) >> shift for values of 48 bits.

    Args:
      value: int64, |value| <= 2^47 (as a JAX array where 64-bit types are enabled).
      multiplier: int32, in [0, 2^15).
      shift: int32, in [2, 62]; the three broadcast by numpy's rules.

    Returns:
      int32, saturated where the specification requires the result to fit; numpy for host inputs.

    Raises:
      TypeError: value is not int64.
      ValueError: on the host, an operand out of its range.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.apply_scale_16(np.int64([100, 101]), np.int32(2**14), np.int32(15)))
      [50 51]
    """
    xp = like_inputs(value, multiplier, shift)
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if dtype != "int64":
        raise TypeError(f"value must be an int64 array. Got {dtype}.")
    for name, operand, low, high in (
        ("value", value, -(2**47), 2**47),
        ("multiplier", multiplier, 0, 2**15 - 1),
        ("shift", shift, 2, 62),
    ):
        host = None if traced(operand) else np.asarray(operand)
        if host is not None and host.size and not (low <= host.min() and host.max() <= high):
            raise ValueError(f"{name} must lie in [{low}, {high}]. Got values from {host.min()} to {host.max()}.")
    shape = jnp.broadcast_shapes(np.shape(value), np.shape(multiplier), np.shape(shift))
    with wide(xp):
        v, m, t = (xp.broadcast_to(xp.asarray(o), shape).astype(np.int64) for o in (value, multiplier, shift))
        y = right_shift_with_headroom(xp, v * m, t, Rounding.NEAREST_UP)
        return xp.minimum(xp.maximum(y, np.int64(INT32_MIN)), np.int64(INT32_MAX)).astype(np.int32)


# ------------------------------------------------------------------------------------ NEMO


class ScaledInteger(NamedTuple):
    """A nonnegative real as multiplier * 2^-shift, with the shift chosen by the user rather than by the value.

    Attributes:
      multiplier: int32.
      shift: int32 of the same shape, in [0, 30].
    """

    multiplier: Any
    shift: Any


def nemo(acc: jax.Array, c: ScaledInteger, call: Call) -> jax.Array:
    """NEMO: floor(acc * round(D e) / D) with D a power of two; the name "nemo:D" chooses D.

    The inner rounding is torch's, with ties to even. A result beyond int32 saturates. Source: Conti, "Technical Report:
    NEMO DNN Quantization for Deployment Model", arXiv:2004.05930, requantization by integer multiplication and shift.
    """
    p = acc.astype(jnp.int64) * c.multiplier.astype(jnp.int64)
    return saturated(p >> c.shift.astype(jnp.int64))


def _nemo_rule(name: str, parameters: list[str]) -> Rule:
    valid = [str(2**k) for k in range(31)]
    if len(parameters) != 1 or parameters[0] not in valid:
        raise ValueError(f"rule 'nemo:D' needs one D out of 1, 2, 4, ..., {valid[-1]}. Got {name!r}.")
    shift = int(parameters[0]).bit_length() - 1

    def prepare(effective_scale: Any) -> ScaledInteger:
        e = Real.of(effective_scale)
        scaled = e.scale_by_power_of_two(shift)
        xp = host_or_trace(e.mantissa)
        if xp is np and np.any(e.sign < 0):
            raise ValueError(f"an effective scale must be at least 0. Got {np.min(e.to_float64())}.")
        if xp is np and np.any(np.asarray(scaled.to_float64()) >= 2**31 - 1):
            raise ValueError(
                f"rule {name!r} needs effective scales below {(2**31 - 1) / 2**shift:g}. Got "
                f"{np.max(e.to_float64())}; choose a smaller D."
            )
        multiplier = xp.maximum(scaled.to_int32(), np.int32(0))
        return ScaledInteger(multiplier, xp.zeros_like(multiplier) + np.int32(shift))

    return Rule(name, prepare, ScaledInteger, nemo, check=_check_scaled_integer, monotone=True)


def _check_scaled_integer(c: ScaledInteger) -> None:
    check_int32(c)
    multiplier, shift = np.asarray(c.multiplier), np.asarray(c.shift)
    if np.any((multiplier < 0) | (shift < 0) | (shift > 30)):
        raise ValueError(
            "a NEMO multiplier must be at least 0 and its shift in [0, 30]. Got multipliers from "
            f"{multiplier.min()} to {multiplier.max()} and shifts from {shift.min()} to {shift.max()}."
        )


register_family("nemo", ("nemo:D",), _nemo_rule)
