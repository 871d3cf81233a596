"""A function of two tensors of few values, as a table with an entry for each pair, read from files of other tools.

Files compute some steps between codes in floats, such as a quotient of two dequantized tensors. Whatever these steps
are, the result depends only on the pair of codes, and the reader of the file tabulates it.
"""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.ops.base import Attributes, Constants, Elementwise, Preparation, Prepared, Role, register
from qjax.ops.epilogue import clamp_codes


class Fields(TypedDict):
    """ranges: the first and the last value of each input that the table covers."""

    ranges: list[list[int]]


@register
class PairTable(Elementwise):
    """y = table[x0, x1], element by element; shapes broadcast.

    constants: `table` holds the codes of all pairs in one row, with those of the first value of x0 before those of its
    second.
    """

    name = "pair_table"
    fields = Fields
    role = Role.PRODUCER
    takes_steps = False

    def prepare(self, given: Preparation) -> Prepared:
        # no equation is read as one, and the table comes with the node
        return Prepared({"table": given.constants["table"]})

    def restated(self, given: Preparation) -> Prepared | None:
        # the file states the codes, so they do not depend on the target
        return None

    def arithmetic(self, attributes: Attributes) -> str:
        counts = [high - low + 1 for low, high in attributes["ranges"]]
        return f"a table of {counts[0]} x {counts[1]} codes"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Any) -> jax.Array:
        (first, _), (second, last) = attributes["ranges"]
        rows = inputs[0].astype(jnp.int32) - np.int32(first)
        columns = inputs[1].astype(jnp.int32) - np.int32(second)
        shape = jnp.broadcast_shapes(rows.shape, columns.shape)
        count = np.int32(last - second + 1)
        index = jnp.broadcast_to(rows, shape) * count + jnp.broadcast_to(columns, shape)
        return clamp_codes(jnp.take(jnp.asarray(constants["table"]), index, axis=0, mode="clip"), constants)
