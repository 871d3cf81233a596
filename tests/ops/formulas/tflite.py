"""TFLite's kernels transcribed from C++ into Python's integers and doubles, one element at a time."""

import math
from fractions import Fraction

import numpy as np

from tests.ops.formulas.onnx import Grids

f32 = np.float32
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
Multiplier = tuple[int, int]


def wrapped(x: int, bits: int = 32) -> int:
    half = 1 << (bits - 1)
    return (x + half) % (2 * half) - half


def high_product(a: int, b: int) -> int:
    """gemmlowp::SaturatingRoundingDoublingHighMul."""
    if a == b == INT32_MIN:
        return INT32_MAX
    nudged = a * b + (1 << 30 if a * b >= 0 else 1 - (1 << 30))
    return abs(nudged) // 2**31 * (1 if nudged >= 0 else -1)


def divided_away(x: int, places: int) -> int:
    """gemmlowp::RoundingDivideByPOT."""
    mask = (1 << places) - 1
    return (x >> places) + ((x & mask) > (mask >> 1) + (x < 0))


def divided_up(x: int, places: int) -> int:
    """VRSHL by a negative number."""
    return (x + (1 << places >> 1)) >> places


def multiplier(scale: float) -> Multiplier:
    """tflite::QuantizeMultiplier."""
    q, shift = math.frexp(scale)
    m = math.floor(Fraction(q) * 2**31 + Fraction(1, 2))
    if m == 2**31:
        m, shift = m // 2, shift + 1
    return (0, 0) if shift < -31 else (m, shift)


def scaled(x: int, m: Multiplier) -> int:
    """tflite::MultiplyByQuantizedMultiplier."""
    return divided_away(high_product(wrapped(x << max(m[1], 0)), m[0]), max(-m[1], 0))


def scaled_vector(x: int, m: Multiplier) -> int:
    """tflite::MultiplyByQuantizedMultiplier4Rows."""
    return divided_up(high_product(wrapped(x << max(m[1], 0)), m[0]), max(-m[1], 0))


def add_multipliers(g: Grids, left: int) -> tuple[Multiplier, Multiplier, Multiplier]:
    twice = float(2 * max(g.scales))
    last = twice / float(f32(1 << left) * g.y_scale)
    return multiplier(float(g.scales[0]) / twice), multiplier(float(g.scales[1]) / twice), multiplier(last)


def add(a: int, b: int, sign: int, g: Grids, left: int) -> int:
    first, second, last = add_multipliers(g, left)
    return scaled(scaled(a << left, first) + sign * scaled(b << left, second), last) + g.y_zero_point


def shifted(x: int, places: int) -> int:
    return wrapped(x << places) if places >= 0 else x >> -places


def add_vector(a: int, b: int, g: Grids, left: int) -> int:
    first, second, last = add_multipliers(g, left)
    if g.dtype == "uint8":
        # optimized_ops::AddElementwise
        total = (high_product(a << left, first[0]) >> -first[1]) + (high_product(b << left, second[0]) >> -second[1])
    else:
        total = high_product(shifted(a, left + first[1]), first[0]) + high_product(
            shifted(b, left + second[1]), second[0]
        )
    y = divided_away(high_product(total, last[0]), -last[1])
    return y + g.y_zero_point if g.dtype == "int16" else wrapped(wrapped(y, 16) + g.y_zero_point, 16)


def multiply_scale(g: Grids) -> np.float32:
    return g.scales[0] * g.scales[1] / g.y_scale


def multiply(a: int, b: int, g: Grids) -> int:
    return scaled(a * b, multiplier(float(multiply_scale(g)))) + g.y_zero_point


def multiply_vector(a: int, b: int, g: Grids) -> int:
    product = scaled(a * b, multiplier(float(multiply_scale(g))))
    return wrapped(min(max(product, -(2**15)), 2**15 - 1) + g.y_zero_point, 16)


def mean(total: int, count: int, g: Grids) -> int:
    """reference_ops::QuantizedMeanOrSum; total: of centred codes."""
    m, s = multiplier(float(g.scales[0]) / float(g.y_scale))
    shift = min(count.bit_length() - 1, 32, 31 + s)
    return scaled(total, ((m << shift) // count, s - shift)) + g.y_zero_point


def mean_constants(count: int, g: Grids) -> tuple[Multiplier, int]:
    offset = f32(g.zero_points[0]) * g.scales[0] / g.y_scale
    offset = offset + f32(0.5) if offset > 0 else offset - f32(0.5)
    return multiplier(float(g.scales[0] / (f32(count) * g.y_scale))), g.y_zero_point - int(offset)


def mean_optimized(total: int, count: int, in_vector: bool, g: Grids) -> int:
    """optimized_integer_ops::Mean; total: of the codes as they are."""
    m, offset = mean_constants(count, g)
    return (scaled_vector if in_vector else scaled)(total, m) + offset


def average(total: int, count: int) -> int:
    """reference_integer_ops::AveragePool; total: of the codes as they are."""
    return math.trunc(Fraction(total + count // 2 if total > 0 else total - count // 2, count))


def xnnpack_add(a: int, b: int, sign: int, g: Grids) -> int:
    ratios = [s / g.y_scale for s in g.scales]
    shift = 21 - math.frexp(float(max(ratios)))[1]
    # Python's round is to the nearest, ties to even
    first, second = (round(Fraction(float(r)) * 2**shift) for r in ratios)
    return ((a * first + sign * b * second + (1 << (shift - 1))) >> shift) + g.y_zero_point


def xnnpack_rescale(a: int, g: Grids) -> int:
    factor = round(Fraction(float(f32(256) * (g.scales[0] / g.y_scale))))
    return ((a * factor + 128) >> 8) + g.y_zero_point


def xnnpack_multiply(a: int, b: int, g: Grids) -> int:
    return int(np.rint(f32(a * b) * multiply_scale(g))) + g.y_zero_point


def xnnpack_mean(total: int, count: int, g: Grids) -> int:
    """The total is of the codes as they are."""
    scale = (g.scales[0] / g.y_scale) * (f32(1) / f32(count))
    offset = f32(g.y_zero_point) - f32(count * g.zero_points[0]) * scale
    return int(np.rint(f32(total) * scale + offset))
