"""The accumulator of a product in the training forward, before its quantizer.

A runtime adds the bias as an integer, in steps of the accumulator's scale, and the training forward must do the same.
The constant affine steps after a product of codes are therefore collected here, and the offset is rounded once, when
the value is read:

    acc * scale, then * g, then + b    ->    acc, scale g, offset b    ->    (acc + round(b / (scale g))) * scale g
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from qjax.numerics.calls import traced_once
from qjax.numerics.quotient import quotient
from qjax.numerics.unfused import unfused
from qjax.ops.averages import Average
from qjax.ops.base import Deferred

_LARGEST_BIAS = np.float32(2.0**30)
_TINY = np.finfo(np.float32).tiny


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending(Deferred):
    """The real tensor `acc * scale + offset`.

    acc: float32. scale, offset: float32 of acc's rank, broadcastable to it. dtype: that of the tensor in the user's
    model. rounded: whether the runtime adds the offset on the accumulator's grid (products with weights do; sums and
    products of activations add it in 64 bits, see `epilogue.fold_sum`). scaled: whether the scale contains a factor of
    the model, which may be 0. average: describes a sum of codes that is an average, or may still become one.
    """

    acc: jax.Array
    scale: jax.Array
    offset: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True}, default=jnp.float32)
    rounded: bool = dataclasses.field(metadata={"static": True}, default=True)
    scaled: bool = dataclasses.field(metadata={"static": True}, default=False)
    average: Average | None = None

    @classmethod
    def start(cls, acc: jax.Array, scale: jax.Array, dtype: DTypeLike, *, rounded: bool = True) -> "Pending":
        """An accumulator without affine steps so far."""
        scale = jnp.broadcast_to(scale, (1,) * acc.ndim) if scale.ndim == 0 else scale
        return cls(acc, scale, jnp.zeros((1,) * acc.ndim, jnp.float32), dtype, rounded)

    @classmethod
    def of_real(cls, x: jax.Array, dtype: DTypeLike) -> "Pending":
        """A float32 tensor without affine steps so far."""
        return cls.start(x, jnp.ones((), jnp.float32), dtype, rounded=False)

    def times(self, factor: ArrayLike) -> "Pending":
        """Multiply by a constant that broadcasts."""
        average = self.average and self.average.divided("mul", factor)
        return self._scaled(self._vector(factor), average)

    def over(self, divisor: ArrayLike) -> "Pending":
        """Divide by a constant that broadcasts."""
        average = self.average and self.average.divided("div", divisor)
        return self._scaled(self._vector(1.0 / divisor), average)

    def plus(self, offset: ArrayLike) -> "Pending":
        """Add a constant that broadcasts."""
        return dataclasses.replace(self, offset=self.offset + self._vector(offset), average=None)

    def transposed(self, permutation: Any) -> "Pending":
        """The same accumulator with its axes in another order."""
        acc, scale, offset = (jnp.transpose(a, permutation) for a in (self.acc, self.scale, self.offset))
        return dataclasses.replace(self, acc=acc, scale=scale, offset=offset, average=None)

    def _scaled(self, factor: jax.Array, average: Average | None) -> "Pending":
        scale, offset = self.scale * factor, self.offset * factor
        return dataclasses.replace(self, scale=scale, offset=offset, scaled=True, average=average)

    def real32(self) -> jax.Array:
        """The real tensor in float32, with the offset rounded to the accumulator's grid if the runtime does so."""
        return _real32(self.rounded, self.scaled, self.acc, self.scale, self.offset)

    def rounding_of_offset(self) -> jax.Array:
        """What rounding the offset to the accumulator's grid adds to the real tensor; float32, broadcastable to acc."""
        if not self.rounded:
            return jnp.zeros((1,) * self.acc.ndim, jnp.float32)
        offset, scale = jnp.broadcast_arrays(self.offset, self.scale)
        steps, rest = _in_steps(offset, scale)
        return steps * scale + rest - offset

    def _vector(self, value: Any) -> jax.Array:
        value = jnp.asarray(value).astype(jnp.float32)
        return value.reshape((1,) * (self.acc.ndim - value.ndim) + value.shape)


@traced_once(0, 1)
def _real32(on_grid: bool, scaled: bool, acc: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    return _affine(on_grid, scaled, acc, scale, offset)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _affine(on_grid: bool, scaled: bool, acc: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """`acc * scale + offset`, or `(acc + round(offset / scale)) * scale`; the derivative of both is that of the first.

    An offset beyond int32 on that grid (for example, because gamma is zero) is not rounded, because the conversion
    chooses a finer grid there (`epilogue.fold_weighted`). A scan keeps the broadcasts in its body, see
    `values._scaled`.
    """
    shape = acc.shape
    if not on_grid:
        return unfused(acc * jnp.broadcast_to(scale, shape)) + jnp.broadcast_to(offset, shape)
    steps, rest = _in_steps(offset, scale)
    bias, rest = jnp.broadcast_to(steps, shape), jnp.broadcast_to(rest, shape)
    return unfused((acc + bias) * jnp.broadcast_to(scale, shape)) + rest


def _jvp(on_grid: bool, scaled: bool, primals: Any, tangents: Any) -> Any:
    (acc, scale, _), (d_acc, d_scale, d_offset) = primals, tangents
    moving = [not isinstance(d, SymbolicZero) for d in tangents]
    parts: list[jax.Array] = []
    if moving[0] and moving[2] and on_grid and not scaled:
        # The backward then sums the array that the product reads as well, and makes no second array for the bias.
        parts += [(d_acc + d_offset / jnp.maximum(scale, _TINY)) * scale]
    else:
        parts += [d_acc * scale] if moving[0] else []
        parts += [jnp.broadcast_to(d_offset, acc.shape)] if moving[2] else []
    parts += [acc * d_scale] if moving[1] else []
    return _affine(on_grid, scaled, *primals), functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(acc)


_affine.defjvp(_jvp, symbolic_zeros=True)


def _in_steps(offset: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The offset in whole steps of `scale`, and the remainder, which is all of it if the steps exceed int32."""
    regular = jnp.abs(offset) <= jnp.abs(scale) * _LARGEST_BIAS
    regular = jnp.logical_and(regular, scale != 0)
    steps = jnp.round(quotient(*jnp.broadcast_arrays(offset, jnp.where(regular, scale, jnp.ones_like(scale)))))
    return jnp.where(regular, steps, jnp.zeros_like(steps)), jnp.where(regular, jnp.zeros_like(offset), offset)
