"""The values that operations read and return in the training forward: codes with their scale, or floats."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.calls import traced_once
from qjax.numerics.qparams import QParams
from qjax.numerics.unfused import unfused, unfused_in_training
from qjax.ops.recomputed import is_recomputed


class Deferred:
    """A value of the training forward that is not an array yet."""

    dtype: Any

    def real32(self) -> jax.Array:
        """The real tensor in float32: what a quantizer reads."""
        raise NotImplementedError

    def real(self) -> jax.Array:
        """The real tensor in the model's dtype: what everything else reads."""
        return self.real32().astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Deferred):
    """A quantized tensor of the training forward: its float value is `codes * scale`.

    codes: float array of integers, the zero point already subtracted (so 0.0 is the code 0).
    scale: float32, broadcastable to `codes`. By convention its gradient is carried by `codes`
      (see `numerics.fake_quant.fake_quant_codes`), so consumers never differentiate through it.
    qparams: scale and zero point as the quantizer states them, with the `QSpec`.
    dtype: the dtype of the real tensor in the user's model.
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
        return _reals(compares_again(), self.codes, jax.lax.stop_gradient(self.scale))

    def with_codes(self, codes: jax.Array) -> "Quantized":
        """The same grid under other codes; only for a scale that does not depend on the position."""
        return dataclasses.replace(self, codes=codes, scale=jnp.reshape(self.scale, (1,) * codes.ndim))


@traced_once(0)
def _reals(compared: bool, codes: jax.Array, scale: jax.Array) -> jax.Array:
    return rounded(compared, codes * jnp.broadcast_to(scale, codes.shape))


def rounded(compared: bool, product: jax.Array) -> jax.Array:
    """A product that is rounded before it is read. compared: from `compares_again`."""
    return unfused(product) if compared else unfused_in_training(product)


def compares_again() -> bool:
    """Whether the derivative of a rounded product is the maximum's own, which compares all numbers again.

    In a loop over time on the CPU: an LSTM's training step took half as long again without, because XLA then computes
    the product anew for each of its readers. Elsewhere it costs time and memory.
    """
    return is_recomputed() and jax.default_backend() == "cpu"


def real(value: Any) -> Any:
    """The float tensor of a value of the training forward."""
    return value.real() if isinstance(value, Deferred) else value
