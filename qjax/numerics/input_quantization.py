"""How runtimes quantize float inputs; they differ in every part of "round(x / s) + z".

| name | code before clamping | who |
| --- | --- | --- |
| `reciprocal` | rint(x * (1/s)) + z | qjax's default; TFLite's optimised kernels; XNNPACK; torch's fake_quantize |
| `reciprocal_fma` | rint(fma(x, 1/s, z)) | torch.quantize_per_tensor on x86 |
| `reciprocal_inside` | rint(x * (1/s) + z) | torch.quantize_per_channel on x86 |
| `division` | rint(x / s) + z | ONNX QuantizeLinear (ONNX Runtime) |
| `division_away` | round(x / s) + z, ties away from zero | TFLite's reference kernels, TFLite Micro |
| `division_inside` | rint(x / s + z) | StableHLO uniform_quantize |

Every operation is float32. A zero point inside the rounding reverses the direction of ties if it is odd. XLA turns a
division into a multiplication, and a product and a sum into a fused multiply-add, so all but the first are computed in
integers (`numerics.float32`).
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics.rounding import Rounding

InputQuantization = Literal[
    "reciprocal", "reciprocal_fma", "reciprocal_inside", "division", "division_away", "division_inside"
]

INPUT_QUANTIZATIONS: tuple[InputQuantization, ...] = get_args(InputQuantization)


def emulated_steps(x: jax.Array, scale: ArrayLike, zero_point: ArrayLike, name: InputQuantization) -> jax.Array:
    """float32 `code - zero_point` before clamping, for every name but "reciprocal"; NaN stays NaN.

    Args:
      x: float32. scale: float32, zero_point: int32, both broadcastable to x.
      name: one of the table.

    Raises:
      ValueError: another name.
    """
    if name not in INPUT_QUANTIZATIONS or name == "reciprocal":
        raise ValueError(f"expected one of {', '.join(INPUT_QUANTIZATIONS[1:])}. Got {name!r}.")
    value = float32.of_bits(jax.lax.bitcast_convert_type(x, jnp.int32))
    step = float32.of(jnp.broadcast_to(jnp.asarray(scale), x.shape))
    zero = jnp.broadcast_to(jnp.asarray(zero_point), x.shape)
    offset = float32.from_int32(zero)
    inside = name in ("reciprocal_fma", "reciprocal_inside", "division_inside")
    if name.startswith("reciprocal"):
        inverse = float32.divide(float32.of(jnp.ones_like(x)), step)
        fused = name == "reciprocal_fma"
        value = float32.fma(value, inverse, offset) if fused else float32.multiply(value, inverse)
    else:
        value = float32.divide(value, step)
    if name.endswith("_inside"):
        value = float32.add(value, offset)
    rounding = Rounding.NEAREST_AWAY if name == "division_away" else Rounding.NEAREST_EVEN
    rounded = float32.to_int32(value, rounding).astype(jnp.float32)
    # Exact for every code of 16 bits. Only numbers far outside of any range are rounded here.
    steps = rounded - zero.astype(jnp.float32) if inside else rounded
    return jnp.where(jnp.isnan(x), jnp.full_like(x, np.nan), steps)
