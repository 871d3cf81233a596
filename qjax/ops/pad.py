"""Padding with zeros, or with the lowest value before a max pool."""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.fence import finished_on_cpu
from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import Filling, always
from qjax.ops.grid import GridOp


class Fields(TypedDict):
    """padding: low, high and interior of each axis. lowest: whether to pad with the lowest code and not with zero."""

    padding: list[list[int]]
    lowest: bool


@register
class Pad(GridOp):
    """`lax.pad` with 0.0, which is the zero point among codes, or with -inf, which is the lowest code."""

    name = "pad"
    fields = Fields
    primitives = ("pad",)
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        value = eqn.literals[1]
        return not constant[0] and constant[1] and value is not None and np.ravel(value)[0] in (0.0, -np.inf)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {
            "padding": [[int(n) for n in triple] for triple in eqn.params["padding_config"]],
            "lowest": bool(np.ravel(eqn.literals[1])[0] != 0.0),
        }

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[axis for axis, widths in enumerate(attributes["padding"]) if any(widths)]]

    def filling(self, attributes: Attributes) -> Filling:
        return "lowest" if attributes["lowest"] else "zero"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        value = attributes["qmin"] if attributes["lowest"] else constants["zero_point0"]
        fill = jnp.asarray(value).astype(x.dtype).reshape(())
        return finished_on_cpu(lax.pad(x, fill, [tuple(triple) for triple in attributes["padding"]]))
