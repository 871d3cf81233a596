"""TFLite's addition: each operand is rescaled to a fine common scale, and the sum is rescaled once.

The common scale has t = 2 max(s_0, s_1) divided into 2^L steps, with L = 20 (15 for int16). The multipliers are those
of s_0 / t, s_1 / t and t / (2^L s_y), computed in double arithmetic:

    a_i = MBQM(x_i << L, m_i);  y = MBQM(a_0 + a_1, m) + z,  MBQM = RDBPOT(SRDHM(x, M), r)   (`double_round`).

`tflite_add` is what the reference kernels and TFLite Micro compute; for SUB the sum is a_0 - a_1.

`tflite_add_neon` is what the optimised kernels compute. Their SUB is the one above, and their ADD uses vectors. In
whole blocks of 16 elements it shifts each operand by L - r_i before the high product, instead of rounding the product a
second time. It narrows the sum to int16 without saturation and adds the zero point in int16, so a sum beyond int16
wraps around to the other end of the codes. The remaining elements (size modulo 16, in row-major order, both operands of
one shape) follow the reference. With int16 codes the blocks neither narrow nor wrap. With uint8 codes the blocks have 8
elements, and shift each high product right by r_i without rounding.

Operands of different shapes use the loops of `tflite_loops`. Codes of 8 bits are processed in blocks within each
stretch; a stretch of one operand with a single element of the other (AddScalarBroadcast) uses the blocks of uint8.
Codes of 16 bits follow the reference.

Sources: reference_ops::Add (AddElementwise), optimized_integer_ops::AddElementwiseInt8 and Int16, add.cc's Prepare.
Compared with ai-edge-litert 2.3.0 and tflite-micro 0.dev20261023, 0 of 700,000 int8 and 0 of 450,000 int16 sums per
kernel differ, with ratios of scales from 2^-30 to 2^9 and with SUB.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import traced
from qjax.numerics.fixed_point import quantize_multiplier, saturating_rounding_doubling_high_mul
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import ONE_WIDTH, Array, Formula, Setting, register
from qjax.ops.formulas.tflite_loops import loop_of
from qjax.ops.formulas.tflite_steps import constant, is_wide, roles, scaled, wrap16


def _left_shift(wide: bool) -> int:
    return 15 if wide else 20


def add_roles(setting: Setting) -> dict[str, Array]:
    """The three multipliers, and the sign of the second operand."""
    first, second = (Real.of(scale) for scale in setting.scales)
    twice = first.maximum(second).scale_by_power_of_two(1)
    left = _left_shift(is_wide({"dtype": setting.dtype}))
    last = quantize_multiplier(twice / Real.of(setting.y_scale).scale_by_power_of_two(left))
    if not traced(last.shift) and np.any(last.shift > 0):
        raise ValueError(
            f"tflite_add: expected an output scale above 2^{1 - left} times the inputs' scales, got scales "
            f"{setting.scales} and {setting.y_scale}: LiteRT aborts there. Calibrate the output."
        )
    return {
        **roles("0", quantize_multiplier(first / twice)),
        **roles("1", quantize_multiplier(second / twice)),
        **roles("", last),
        "sign1": np.asarray(-1 if setting.op == "subtract" else 1, np.int32),
    }


def reference_add(
    operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]
) -> jax.Array:
    """The kernel of `tflite_add`."""
    left = np.int32(_left_shift(is_wide(attributes)))
    first, second = (scaled(x << left, constants, str(i)) for i, x in enumerate(_one_shape(operands)))
    total = first + constant(constants, "sign1") * second
    return scaled(total, constants) + constant(constants, "y_zero_point")


def neon_add(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    """The kernel of `tflite_add_neon`."""
    loop = loop_of(*(x.shape for x in operands))
    wide = is_wide(attributes)
    operands = _one_shape(operands)
    whole = loop.kind == "rows" and loop.axes == operands[0].ndim
    if loop.kind == "portable" or (wide and not whole):
        return reference_add(operands, constants, attributes)
    left = np.int32(_left_shift(wide))
    short = attributes["dtype"] == "uint8" or loop.kind == "scalar"
    vector = _high_shifted if short else _shifted_high
    first, second = (vector(x, left, constants, str(i)) for i, x in enumerate(operands))
    total = scaled(first + second, constants)
    zero_point = constant(constants, "y_zero_point")
    codes = total + zero_point if wide else wrap16(wrap16(total) + zero_point)
    # SUB has no vectorised kernel
    vectors = loop.in_vectors(codes.shape, 8 if short else 16) & (constant(constants, "sign1") > 0)
    return jnp.where(vectors, codes, reference_add(operands, constants, attributes))


def has_vectors(attributes: Mapping[str, Any]) -> bool:
    """Whether the optimised kernel has a vectorised loop, as that of ADD does."""
    return not attributes.get("subtract", False)


def _shifted_high(x: jax.Array, left: Any, constants: Mapping[str, Any], suffix: str) -> jax.Array:
    """SQRDMULH(VSHL(x, left + shift), multiplier): VSHL by a negative number shifts right without rounding."""
    places = left + constant(constants, f"shift{suffix}")
    up, down = jnp.maximum(places, np.int32(0)), jnp.maximum(-places, np.int32(0))
    shifted = (x << jnp.broadcast_to(up, x.shape)) >> jnp.broadcast_to(down, x.shape)
    return saturating_rounding_doubling_high_mul(shifted, constant(constants, f"multiplier{suffix}"))


def _high_shifted(x: jax.Array, left: Any, constants: Mapping[str, Any], suffix: str) -> jax.Array:
    """VSHL(SQRDMULH(x << left, multiplier), shift), the kernel of uint8: the shift right does not round."""
    high = saturating_rounding_doubling_high_mul(x << left, constant(constants, f"multiplier{suffix}"))
    return high >> jnp.broadcast_to(jnp.maximum(-constant(constants, f"shift{suffix}"), np.int32(0)), x.shape)


def _one_shape(operands: Sequence[jax.Array]) -> list[jax.Array]:
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    return [jnp.broadcast_to(x, shape) for x in operands]


tflite_add = register(
    Formula("tflite_add", frozenset({"add", "subtract"}), add_roles, reference_add, widths=ONE_WIDTH, pointwise=True)
)

tflite_add_neon = register(
    Formula(
        "tflite_add_neon",
        frozenset({"add", "subtract"}),
        add_roles,
        neon_add,
        widths=ONE_WIDTH,
        pointwise=lambda attributes, constants: not has_vectors(attributes),
    )
)
