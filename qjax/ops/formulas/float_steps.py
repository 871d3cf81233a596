"""Steps shared by formulas that compute in float32: constants as int32 arrays, and rounding a float32 to a code."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import float32
from qjax.numerics._namespace import host_or_trace
from qjax.numerics.float32 import Float32, Overflow
from qjax.ops.formulas.base import Array

_FAR = np.int32(2**30)
"""Beyond any code, but small enough that adding a zero point stays within int32."""


def roles(**numbers: Float32) -> dict[str, Array]:
    """Each number as two int32 roles, name_mantissa and name_exponent."""
    return {f"{name}_{field}": value for name, x in numbers.items() for field, value in x._asdict().items()}


def number(constants: Mapping[str, Any], name: str) -> Float32:
    """The number that `roles` split."""
    return Float32(jnp.asarray(constants[f"{name}_mantissa"]), jnp.asarray(constants[f"{name}_exponent"]))


def integer(value: Any) -> Array:
    """A zero point or a count as int32: a NumPy number on the host, a JAX array in a trace."""
    return host_or_trace(value).asarray(value).astype(np.int32)


def whole(constants: Mapping[str, Any], name: str) -> Float32:
    """An int32 constant (a zero point, a count) as float32."""
    return float32.from_int32(jnp.asarray(constants[name]))


def dequantize(codes: jax.Array, scale: Float32) -> Float32:
    """float32(code - zero point) * scale, given centred codes, as DequantizeLinear computes it."""
    return float32.multiply(float32.from_int32(codes), scale)


def round_outside(x: Float32, constants: Mapping[str, Any], overflow: Overflow = "saturate") -> jax.Array:
    """rint(x) + y_zero_point: the zero point is added to the integer."""
    return jnp.clip(float32.to_int32(x, overflow=overflow), -_FAR, _FAR) + jnp.asarray(constants["y_zero_point"])


def round_inside(x: Float32, constants: Mapping[str, Any], overflow: Overflow = "saturate") -> jax.Array:
    """rint(x + y_zero_point): the zero point is added in float32, so ties round by the parity of the code.

    overflow: "indefinite" is CVTPS2DQ without a clamp before it, which turns numbers beyond int32 into -2^31.
    """
    return float32.to_int32(float32.add(x, whole(constants, "y_zero_point")), overflow=overflow)
