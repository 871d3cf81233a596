"""How runtimes turn output codes into floats.

| name | float32 value of a code | who |
| --- | --- | --- |
| `product` | (q - z) * s | qjax's default; TFLite's reference kernels, XNNPACK, TFLite Micro |
| `product_sum` | q * s + (-z * s), each step rounded | TFLite's optimised kernels on x86 |

The second works on blocks of eight elements of the whole tensor, batch included. The last n mod 8 of n elements are
computed by the first, so the result depends on the position of an element.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from qjax.numerics.unfused import unfused

OutputDequantization = Literal["product", "product_sum"]

OUTPUT_DEQUANTIZATIONS: tuple[OutputDequantization, ...] = get_args(OutputDequantization)

_BLOCK = 8


def dequantized(codes: jax.Array, scale: jax.Array, zero_point: jax.Array, name: str) -> jax.Array:
    """float32 values of integer codes.

    Args:
      codes: integers. scale: float32, zero_point: int32, both broadcastable to codes.
      name: one of the table.

    Raises:
      ValueError: another name.
    """
    if name not in OUTPUT_DEQUANTIZATIONS:
        raise ValueError(f"expected one of {', '.join(OUTPUT_DEQUANTIZATIONS)}. Got {name!r}.")
    codes = codes.astype(jnp.int32)
    product = unfused((codes - zero_point).astype(jnp.float32) * scale)
    if name == "product":
        return product
    offset = unfused((-zero_point).astype(jnp.float32) * scale)
    blocks = unfused(codes.astype(jnp.float32) * scale) + offset
    shape = codes.shape
    if math.prod(shape[1:]) % _BLOCK == 0:
        return blocks
    place = jnp.zeros(shape, jnp.int32)
    for axis in range(len(shape)):
        place = place * shape[axis] + lax.broadcasted_iota(jnp.int32, shape, axis)
    return jnp.where(place < math.prod(shape) // _BLOCK * _BLOCK, blocks, product)
