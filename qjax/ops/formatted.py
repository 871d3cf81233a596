"""Products with a weight in one of the formats of `numerics.weight_formats`; the activation stays float.

y = x @ dequantize(codes, scales)
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.qspec import dividing_group
from qjax.numerics.weight_formats import WeightFormat, decode, encode, encode_stored
from qjax.ops.base import Equation
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight as rows: first the axes that remain in the product's result, then one axis for all that it sums over.

    shape: of the weight. kept: its axes that remain.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Equation, weight: int) -> "Layout":
        """The layout of operand `weight` of a dot or a convolution."""
        op = Conv() if eqn.primitive == "conv_general_dilated" else Dot()
        return cls(tuple(eqn.in_shapes[weight]), tuple(op.weight_axes(eqn, weight)))

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.kept, *(axis for axis in range(len(self.shape)) if axis not in self.kept))

    @property
    def summed(self) -> int:
        """How many weights one sum reads."""
        return math.prod(self.shape) // max(math.prod(self.shape[axis] for axis in self.kept), 1)

    def rows(self, w: jax.Array) -> jax.Array:
        """The weight in the shape (kept..., summed)."""
        return jnp.transpose(w, self._order).reshape(*(self.shape[axis] for axis in self.kept), self.summed)

    def back(self, rows: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        ordered = rows.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(ordered, [int(axis) for axis in np.argsort(self._order)])


def with_fitting_groups(setting: WeightFormat, eqn: Equation, weight: int) -> WeightFormat:
    """The setting with groups that divide the weights that a product sums over; see `QSpec`."""
    if setting.blocks is not None:
        return setting
    summed = Layout.of(eqn, weight).summed
    size = setting.group and (dividing_group(setting.group, summed) or summed)
    return setting if size == setting.group else dataclasses.replace(setting, group_size=size)


@dataclasses.dataclass(frozen=True, eq=False)
class FormattedProduct:
    """One `dot_general` or `conv_general_dilated` of an activation and a weight. weight: the index of its operand.

    Raises:
      ValueError: groups that do not divide the number of weights in a sum.
    """

    eqn: Equation
    weight: int
    setting: WeightFormat

    def __post_init__(self) -> None:
        jax.eval_shape(self.weight_parts, jax.ShapeDtypeStruct(self.layout.shape, jnp.float32))

    @property
    def kept(self) -> tuple[int, ...]:
        """The weight's axes that are axes of the result."""
        return self.layout.kept

    @property
    def layout(self) -> Layout:
        """How the weight becomes rows."""
        return Layout.of(self.eqn, self.weight)

    def weight_parts(self, w: jax.Array) -> list[jax.Array]:
        """What depends on the weight alone: its codes, their scales and, if any, their minimums, in rows."""
        return encode(self.layout.rows(lax.stop_gradient(w).astype(jnp.float32)), self.setting)

    def stored_parts(self, w: jax.Array) -> list[jax.Array]:
        """The codes and what a packed weight stores beside them; see `weight_formats.encode_stored`."""
        return encode_stored(self.layout.rows(lax.stop_gradient(w).astype(jnp.float32)), self.setting)

    def __call__(self, x: jax.Array, w: jax.Array, *parts: jax.Array) -> list[jax.Array]:
        """The product of x and the dequantized weight. The gradient passes straight through to w."""
        return self.multiplied(x, _dequantized(self, w, *parts))

    def multiplied(self, x: jax.Array, w: jax.Array) -> list[jax.Array]:
        """The float product of the model."""
        return self.eqn.bind(*((x, w) if self.weight == 1 else (w, x)))

    def dequantized(self, *parts: jax.Array) -> jax.Array:
        """The weight that codes, scales and minimums represent."""
        return self.layout.back(decode(parts, self.setting)).astype(self.eqn.in_dtypes[self.weight])


def _value(product: FormattedProduct, w: jax.Array, *parts: jax.Array) -> jax.Array:
    return product.dequantized(*parts)


_dequantized = jax.custom_jvp(_value, nondiff_argnums=(0,))


@_dequantized.defjvp
def _(product: FormattedProduct, primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    return _value(product, *primals), tangents[0]
