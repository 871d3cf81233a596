"""Sorting along an axis. Codes are ordered like their float values, so sorting the codes sorts the tensor."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import always, no_filling
from qjax.ops.fields import Axis
from qjax.ops.grid import GridOp


@register
class Sort(GridOp):
    """`lax.sort` of one tensor along one axis, ascending. Sorting several tensors by one of them is not supported.

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
        """Sort by rank: an element's position is the number of elements before it. Equal codes stay in order."""
        x = jnp.moveaxis(inputs[0].astype(jnp.int32), attributes["axis"], -1)
        square = (*x.shape, x.shape[-1])
        places, others = (lax.broadcasted_iota(jnp.int32, square, len(square) - 1 - back) for back in (1, 0))
        own, other = jnp.broadcast_to(x[..., :, None], square), jnp.broadcast_to(x[..., None, :], square)
        before = (other < own) | ((other == own) & (others < places))
        rank = jnp.sum(before.astype(jnp.int32), axis=-1, keepdims=True, dtype=jnp.int32)
        # The second of the two axes now counts the positions of the result.
        chosen = lax.select(jnp.broadcast_to(rank, square) == others, own, jnp.zeros(square, jnp.int32))
        found = jnp.sum(chosen, axis=-2, dtype=jnp.int32)
        return jnp.moveaxis(found, -1, attributes["axis"]).astype(attributes["dtype"])
