"""Steps that the formulas of ONNX Runtime share: float32 constants as int32 roles, and from a float32 to codes."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.ops.formulas.base import Array

_FAR = np.int32(2**30)
"""Beyond any code; a zero point added to it stays within int32."""


def roles(**numbers: Float32) -> dict[str, Array]:
    """Each number as two int32 roles, name_mantissa and name_exponent."""
    return {f"{name}_{field}": value for name, x in numbers.items() for field, value in x._asdict().items()}


def number(constants: Mapping[str, Any], name: str) -> Float32:
    """The number that `roles` took apart."""
    return Float32(jnp.asarray(constants[f"{name}_mantissa"]), jnp.asarray(constants[f"{name}_exponent"]))


def whole(constants: Mapping[str, Any], name: str) -> Float32:
    """An int32 constant (a zero point, a count) as float32."""
    return float32.from_int32(jnp.asarray(constants[name]))


def dequantize(codes: jax.Array, scale: Float32) -> Float32:
    """float32(code - zero point) * scale: DequantizeLinear, given centred codes."""
    return float32.multiply(float32.from_int32(codes), scale)


def quantize(x: Float32, constants: Mapping[str, Any]) -> jax.Array:
    """rint(x / y_scale) + y_zero_point, a true division: QuantizeLinear, which clamps before it converts."""
    return round_outside(float32.divide(x, number(constants, "y_scale")), constants)


def round_outside(x: Float32, constants: Mapping[str, Any]) -> jax.Array:
    """rint(x) + y_zero_point: the zero point is added to the integer."""
    return jnp.clip(float32.to_int32(x), -_FAR, _FAR) + jnp.asarray(constants["y_zero_point"])


def round_inside(x: Float32, constants: Mapping[str, Any]) -> jax.Array:
    """rint(x + y_zero_point): the zero point is added in float32, so ties round by the parity of the code."""
    return convert(float32.add(x, whole(constants, "y_zero_point")))


def convert(x: Float32, overflow: Literal["saturate", "indefinite"] = "indefinite") -> jax.Array:
    """rint(x) by CVTPS2DQ without a clamp before it: what leaves int32, on either side, becomes -2^31."""
    return float32.to_int32(x, overflow=overflow)
