"""Sorting along an axis, and the order that sorts it. Codes have the order of their float values."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Bounds, Constants, Equation, Op, Quantized, Role, Shape, Site, real, register
from qjax.ops.facts import ChoosesNoPlace, always, no_filling
from qjax.ops.fields import Axis
from qjax.ops.grid import GridOp


@register
class Sort(GridOp):
    """`lax.sort` of one tensor along one axis, ascending. Several tensors take their order from `Argsort`.

    attributes: axis.
    """

    name = "sort"
    fields = Axis
    primitives = ("sort",)
    keeps_batch = always
    filling = no_filling

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return len(eqn.in_shapes) == 1 and not constant[0] and jnp.issubdtype(eqn.in_dtypes[0], jnp.floating)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axis": int(eqn.params["dimension"]) % len(eqn.in_shapes[0])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x = inputs[0].astype(jnp.int32)
        return _sorted(x, attributes["axis"]).astype(attributes["dtype"])


@register
class Argsort(ChoosesNoPlace, Op):
    """`jnp.argsort`: the indices that sort the elements, which are codes or integers, in ascending order.

    Equal elements keep their order. The only attribute is axis.
    """

    name = "argsort"
    fields = Axis
    role = Role.INTEGER
    primitives = ("argsort",)
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and (self._codes(eqn) or np.dtype(eqn.in_dtypes[0]) == np.int32)

    def _codes(self, eqn: Equation) -> bool:
        return jnp.issubdtype(eqn.in_dtypes[0], jnp.floating)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,) if self._codes(eqn) else ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return () if self._codes(eqn) else (0,)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axis": eqn.params["axis"]}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        # compare codes, not floats: JAX orders -0.0 before 0.0, and both are the same code
        return eqn.bind(lax.stop_gradient(x.codes).astype(jnp.int32) if isinstance(x, Quantized) else real(x))

    def accumulator(self, site: Site) -> Bounds | None:
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return _sorted(inputs[0].astype(jnp.int32), attributes["axis"], places=True)


def _sorted(x: jax.Array, axis: int, *, places: bool = False) -> jax.Array:
    """int32 numbers in ascending order along an axis, or the places where they were.

    An element's place is its rank, the number of elements that come before it. Equal elements keep their order.
    """
    x = jnp.moveaxis(x, axis, -1)
    square = (*x.shape, x.shape[-1])
    first, others = (lax.broadcasted_iota(jnp.int32, square, len(square) - 1 - back) for back in (1, 0))
    own, other = jnp.broadcast_to(x[..., :, None], square), jnp.broadcast_to(x[..., None, :], square)
    before = (other < own) | ((other == own) & (others < first))
    rank = jnp.sum(before.astype(jnp.int32), axis=-1, keepdims=True, dtype=jnp.int32)
    # The second of the two axes now counts the places of the result.
    moved = first if places else own
    chosen = lax.select(jnp.broadcast_to(rank, square) == others, moved, jnp.zeros(square, jnp.int32))
    return jnp.moveaxis(jnp.sum(chosen, axis=-2, dtype=jnp.int32), -1, axis)
