"""The exact real number behind a code, and the number that a rule's last rounding sees.

It uses Python's integers as numpy objects, which is affordable because few outputs differ between two targets, and only
those are examined here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.float32 import Float32
from qjax.numerics.rules import Float32WithBias, Float64, PowerOfTwo, Rule, ScaledInteger, TosaScale
from qjax.numerics.rules.torch import Fbgemm, Onednn

FLOAT32_CONSTANTS = (Float32, Float32WithBias, Fbgemm, Onednn)
"""The constants of rules that compute in float32."""

_HIGH_WORD = ("double_round", "neon", "tflite_arm_depthwise", "tflite_depthwise_neon")
"""Rules that round the high word of the product, and then round once more."""

Ints = np.ndarray
"""dtype object: Python integers."""


def ints(values: Any) -> Ints:
    """Python integers, elementwise."""
    return np.atleast_1d(np.asarray(values)).astype(object)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """An array of exact rationals num / den, den > 0."""

    num: Ints
    den: Ints

    @classmethod
    def of(cls, x: Any) -> "Ratio":
        """The exact values of a float32 or integer array."""
        x = np.atleast_1d(np.asarray(x))
        if x.dtype.kind != "f":
            return cls(ints(x), ints(np.ones(x.shape, np.int64)))
        mantissa, exponent = np.frexp(x.astype(np.float64))
        return cls.dyadic(ints((mantissa * 2.0**53).astype(np.int64)), exponent.astype(np.int64) - 53)

    @classmethod
    def dyadic(cls, mantissa: Any, exponent: Any) -> "Ratio":
        """mantissa * 2^exponent."""
        # Beyond 2^2000 a number is near no code, so the limit keeps the integers small.
        e = np.clip(np.atleast_1d(np.asarray(exponent, np.int64)), -2000, 2000)
        up, down = ints(np.maximum(e, 0)), ints(np.maximum(-e, 0))
        one = np.full(e.shape, 1, object)
        return cls(ints(mantissa) << up, one << down)

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.num * other.den + other.num * self.den, self.den * other.den)

    def __neg__(self) -> "Ratio":
        return Ratio(-self.num, self.den)

    def __sub__(self, other: "Ratio") -> "Ratio":
        return self + -other

    def __mul__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.num * other.num, self.den * other.den)

    def __truediv__(self, other: "Ratio") -> "Ratio":
        """The quotient by a positive number."""
        return Ratio(self.num * other.den, self.den * other.num)

    def sign(self) -> np.ndarray:
        """int8: -1, 0 or 1."""
        return (self.num > 0).astype(np.int8) - (self.num < 0).astype(np.int8)

    def take(self, index: Any) -> "Ratio":
        """The elements of a flat index or mask."""
        return Ratio(self.num[index], self.den[index])

    def to_float(self) -> np.ndarray:
        """The nearest doubles, ties to even; larger numbers become 2^1023."""
        return np.asarray([_double(n, d) for n, d in np.broadcast(self.num, self.den)])


def _double(num: int, den: int) -> float:
    try:
        return num / den  # Python divides integers with correct rounding
    except OverflowError:
        return 2.0**1023 if num > 0 else -(2.0**1023)


def compare_halves(value: Ratio, codes: ArrayLike) -> np.ndarray:
    """int8: -2 where value < code - 1/2, -1 where it equals that, 0 within, 1 where it equals code + 1/2, 2 above."""
    twice = Ratio(value.num * 2, value.den) - Ratio.of(2 * np.asarray(codes, np.int64))
    low, high = (twice + Ratio.of(np.int64(1))).sign(), (twice - Ratio.of(np.int64(1))).sign()
    return np.where(high > 0, 2, np.where(high == 0, 1, np.where(low < 0, -2, np.where(low == 0, -1, 0))))


@dataclasses.dataclass(frozen=True)
class Reading:
    """The accumulators as a rule sees them.

    exact: acc * e by the rule's own constants, before the zero point. seen: the number that its last rounding sees.
    overflows: boolean; where the result or a step leaves the range in which the rule rounds acc * e.
    """

    exact: Ratio
    seen: Ratio
    overflows: np.ndarray


def scale_of(rule: Rule, constants: Mapping[str, np.ndarray]) -> Ratio | None:
    """The exact effective scale of a rule's constants; None for constants of an unknown type."""
    c = {role: np.atleast_1d(np.asarray(value)).astype(np.int64) for role, value in constants.items()}
    if rule.name == "int16x8":
        return Ratio.dyadic(np.minimum((c["multiplier"] + 2**15) >> 16, 0x7FFF), c["shift"] - 15)
    if rule.constants is Multiplier:
        return Ratio.dyadic(c["multiplier"], c["shift"] - 31)
    if rule.constants is Onednn:
        return Ratio.dyadic(c["mantissa"], c["exponent"]) * Ratio.dyadic(c["share_mantissa"], c["share_exponent"])
    if rule.constants in FLOAT32_CONSTANTS:
        return Ratio.dyadic(c["mantissa"], c["exponent"])
    if rule.constants is Float64:
        return Ratio.dyadic((c["mantissa_high"] << 31) + c["mantissa_low"], c["exponent"])
    if rule.constants is PowerOfTwo:
        return Ratio.dyadic(np.ones_like(c["shift"]), -c["shift"])
    if rule.constants in (TosaScale, ScaledInteger):
        return Ratio.dyadic(c["multiplier"], -c["shift"])
    return None


def bias_of(rule: Rule, constants: Mapping[str, np.ndarray]) -> Ratio | None:
    """The exact bias within a rule that `takes_bias`, in steps of the accumulator; None for any other rule."""

    def part(name: str) -> Ratio:
        return Ratio.dyadic(*(np.asarray(constants[f"{name}_{word}"], np.int64) for word in ("mantissa", "exponent")))

    if rule.constants is Float32WithBias:
        return part("bias")
    if rule.constants is Fbgemm:
        return part("addend") * part("step")
    if rule.constants is Onednn:
        scale = Ratio.dyadic(constants["mantissa"], constants["exponent"])
        # If the scale underflowed to 0, every result is the zero point.
        return part("addend") / Ratio(np.where(scale.num > 0, scale.num, 1), scale.den)
    return None


def read_rule(
    rule: Rule, constants: Mapping[str, np.ndarray], acc: np.ndarray, zero_point: np.ndarray, codes: tuple[int, int]
) -> Reading | None:
    """acc: flat integers; constants and zero_point: arrays of the same size; codes: (qmin, qmax).

    None for a rule with constants of an unknown type.
    """
    scale = scale_of(rule, constants)
    if scale is None:
        return None
    a = np.asarray(acc, np.int64)
    total = Ratio.of(a)
    bias = bias_of(rule, constants)
    if bias is not None:
        total = total + bias
    exact = total * scale
    seen = _last_rounding_input(rule, constants, a, zero_point, exact)
    limit = Ratio.of(np.int64(2**31))
    overflows = np.zeros(a.shape, bool)
    for value in (exact, seen):
        overflows |= ((value - limit).sign() >= 0) | ((value + limit).sign() < 0)
    if rule.name == "tvm":
        # A factor that is a power of two is implemented as a rounding shift of 32 bits, whose sum may wrap.
        right = np.clip(1 - np.asarray(constants["shift"], np.int64), 0, 32)
        power = np.asarray(constants["multiplier"]) == 2**30
        overflows |= power & (a + ((1 << right) >> 1) >= 2**31)
    left = _left_shift(rule, constants)
    if left is not None:
        shifted = ints(a) << ints(left)
        overflows = overflows | (shifted >= 2**31) | (shifted < -(2**31))
    if rule.name.startswith("power_of_two:") and not rule.name.endswith(":SAT"):
        code = exact + Ratio.of(zero_point)
        inside = (compare_halves(code, np.full(a.shape, codes[1])) < 1) & (
            compare_halves(code, np.full(a.shape, codes[0])) > -1
        )
        overflows = overflows | ~inside
    return Reading(exact, seen, overflows)


def _left_shift(rule: Rule, constants: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """By how many bits a rule shifts the accumulator in 32 bits before it multiplies."""
    if rule.name in _HIGH_WORD:
        return np.maximum(constants["shift"], 0)
    if rule.name in ("ruy", "tflite_arm_gemm", "xnnpack_rndnu"):
        return constants["shift"] + np.maximum(-constants["shift"], 1)
    return None


def _last_rounding_input(
    rule: Rule, constants: Mapping[str, np.ndarray], acc: np.ndarray, zero_point: np.ndarray, exact: Ratio
) -> Ratio:
    if rule.name in _HIGH_WORD:
        shift = np.asarray(constants["shift"], np.int64)
        left, right = ints(np.maximum(shift, 0)), np.maximum(-shift, 0)
        high = ((ints(acc) << left) * ints(constants["multiplier"]) + 2**30) >> 31
        return Ratio.dyadic(high, -right)
    if rule.name == "tflite_arm_depthwise_3x3":
        # The same rule, with the left shift after the product instead of before it.
        high = (ints(acc) * ints(constants["multiplier"]) + 2**30) >> 31
        return Ratio.dyadic(high, np.asarray(constants["shift"], np.int64))
    if rule.name == "tosa_double":
        shift = np.asarray(constants["shift"], np.int64)
        nudge = np.where(shift > 31, np.where(acc >= 0, 1, -1), 0)
        return exact + Ratio.dyadic(nudge, 30 - shift)
    if rule.constants in FLOAT32_CONSTANTS:
        return _seen_in_float32(rule, constants, acc, zero_point)
    if rule.constants is Float64:
        return Ratio.of(exact.to_float())
    return exact


def _seen_in_float32(rule: Rule, constants: Mapping[str, np.ndarray], acc: np.ndarray, zero_point: np.ndarray) -> Ratio:
    def part(name: str = "") -> Float32:
        return Float32(*(np.asarray(constants[f"{name}{word}"], np.int32) for word in ("mantissa", "exponent")))

    acc = acc.astype(np.int32)
    zero = np.asarray(zero_point, np.int32)
    point = float32.from_int32(zero)
    value = float32.from_int32(acc)
    match rule.name:
        case "float32_zero_point_fma":
            value = float32.fma(value, part(), point)
        case "float32_zero_point_inside":
            value = float32.add(float32.multiply(value, part()), point)
        case "float32_bias":
            value = float32.multiply(float32.add(value, part("bias_")), part())
        case "torch_fbgemm":
            value = float32.multiply(float32.fma(part("addend_"), part("step_"), value), part())
        case "torch_qnnpack":
            value = float32.multiply(float32.from_int32(acc + float32.to_int32(part("bias_"))), part())
        case "torch_onednn" | "torch_onednn_conv":
            steps = float32.multiply(float32.add(float32.multiply(value, part()), part("addend_")), part("share_"))
            value = float32.add(steps, point)
        case "openvino":
            bias = float32.add(float32.multiply(part("addend_"), part("share_")), point)
            value = float32.add(float32.multiply(value, part()), bias)
        case _:
            value = float32.multiply(value, part())
    seen = Ratio.dyadic(value.mantissa, value.exponent)
    return seen - Ratio.of(zero) if rule.finishes else seen


def sum_value(accumulators: Sequence[np.ndarray], factors: Sequence[Ratio]) -> Ratio:
    """The exact sum of acc_i * factor_i."""
    total = Ratio.of(np.asarray(accumulators[0], np.int64)) * factors[0]
    for acc, factor in zip(accumulators[1:], factors[1:], strict=True):
        total = total + Ratio.of(np.asarray(acc, np.int64)) * factor
    return total
