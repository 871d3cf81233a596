"""The values that operations read and return in the training forward: codes with their scale, or floats."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.calls import traced_once
from qjax.numerics.qparams import QParams
from qjax.numerics.unfused import unfused


class Deferred:
    """A value of the training forward that is not an array yet."""

    dtype: Any

    def real32(self) -> jax.Array:
        """The real tensor in float32, which a quantizer reads."""
        raise NotImplementedError

    def real(self) -> jax.Array:
        """The real tensor in the model's dtype, which everything else reads."""
        return self.real32().astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Deferred):
    """A quantized tensor of the training forward: its float value is `codes * scale`.

    codes: float array of integers, the zero point already subtracted (so 0.0 is the code 0). scale: float32,
    broadcastable to `codes`. By convention `codes` carries its gradient (see `numerics.fake_quant.fake_quant_codes`),
    so consumers never differentiate through it. qparams: scale and zero point as the quantizer defines them, with the
    `QSpec`. dtype: the dtype of the real tensor in the user's model.
    """

    codes: jax.Array
    scale: jax.Array
    qparams: QParams
    dtype: Any = dataclasses.field(metadata={"static": True}, default=jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def real32(self) -> jax.Array:
        """The fake-quantized real tensor."""
        return _reals(self.codes, jax.lax.stop_gradient(self.scale))

    def with_codes(self, codes: jax.Array) -> "Quantized":
        """Other codes on the same grid; only for a scale that does not depend on the position."""
        return dataclasses.replace(self, codes=codes, scale=jnp.reshape(self.scale, (1,) * codes.ndim))


@traced_once()
def _reals(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return _scaled(codes, scale)


@jax.custom_jvp
def _scaled(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """`codes * scale`, rounded before it is read; its derivative is that of the product with a constant scale.

    JAX sees no broadcast inside of it. A scan under differentiation would move a broadcast out of its body, and every
    step would then read an array of the tensor's size instead of one number.
    """
    return unfused(codes * jnp.broadcast_to(scale, codes.shape))


@_scaled.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    codes, scale = primals
    return _scaled(codes, scale), tangents[0] * jnp.broadcast_to(scale, codes.shape)


def real(value: Any) -> Any:
    """The float tensor of a value of the training forward."""
    return value.real() if isinstance(value, Deferred) else value
