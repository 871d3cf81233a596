"""Embedding lookups: rows of codes selected by an integer input.

y[i] = table[indices[i]]
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Quantized, Role, register
from qjax.ops.facts import no_filling
from qjax.ops.indices import Lookup, fills, outside, wrapped


@register
class Embed(Elementwise):
    """y = table[indices]; the result has the table's quantization parameters (per tensor).

    attributes: see `ops.indices`.
    """

    name = "embed"
    fields = Lookup
    role = Role.GRID
    primitives = ("embed",)
    indexed = "kernel"
    by_row = "embed_rows"
    filling = no_filling

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and constant[1]

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        return 1

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (1,)

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        # a layer is `jnp.take`, which wraps and fills; before other lookups, earlier equations wrap negative indices
        if "integers" in eqn.params:
            return {"fills": False}
        return {"wraps": True, "fills": True} if "layer" in eqn.params else {"fills": fills(eqn.params)}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        # further inputs are the parameters of a table of integers; only its own function uses them
        indices, table, *_ = inputs
        if not isinstance(table, Quantized):
            return eqn.bind(*inputs)
        if "integers" in eqn.params:
            # without codes, the equation computes the function itself
            return [table.with_codes(jnp.take(table.codes, indices, axis=0, mode="clip"))]
        return [table.with_codes(eqn.bind(indices, table.codes)[0])]

    def implied(self, inputs: Sequence[str]) -> str | None:
        return "with `wraps`, an index below zero counts from the end; an index out of range is clipped"

    def refuses(self, eqn: Equation, index: int, value: Any) -> str | None:
        # `misplaced` also counts constant indices
        return None

    def misplaced(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array | None:
        return outside(attributes, inputs[0], constants["kernel"].shape[0])

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        table = jnp.asarray(constants["kernel"])
        return jnp.take(table, wrapped(attributes, inputs[0], table.shape[0]), axis=0, mode="clip")
