"""A constant for every example of the batch, such as the initial state of a loop."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypedDict

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Role, Shape, register
from qjax.ops.facts import Follows, filled_with_constants
from qjax.ops.fields import Natural


class Fields(TypedDict):
    """shape: of the result, with None for the batch. times: how many rows of that axis each example has."""

    shape: list[Natural | None]
    times: Natural


@register
class Fill(Elementwise):
    """Repeats the codes of a constant along the batch; the input is read only for the size of its batch.

    constants: value holds the codes, with size 1 along the batch. attributes: shape is that of the result, with None
    for the batch; times is the number of rows of that axis for each example (row of the input). The conversion inserts
    these nodes, and no equation is read as one.
    """

    name = "fill"
    fields = Fields
    role = Role.GRID
    primitives: ClassVar[tuple[str, ...]] = ()
    free: ClassVar[Mapping[str, Follows]] = {"shape": "sizes"}
    per_example = "value"
    filling = filled_with_constants
    sizes_only = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return False

    def at_batch(self, attributes: Attributes, output: Shape, size: int) -> Attributes:
        pairs = zip(output, attributes["shape"], strict=True)
        rows = [n for n, kept in pairs if kept is None and n is not None]
        if len(rows) > 1:
            raise ValueError("has two axes that follow the size of the batch")
        return {**attributes, "times": rows[0] // size} if rows else attributes

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        rows = x.shape[0] * attributes["times"] if x.ndim else 1
        shape = [rows if size is None else size for size in attributes["shape"]]
        return jnp.broadcast_to(jnp.asarray(constants["value"]).astype(attributes["dtype"]), shape)
