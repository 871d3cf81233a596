"""`lax.ragged_dot` with weights: rows that are sorted by their expert, and one matrix for each expert.

Training multiplies the codes by `lax.ragged_dot` itself. Every expert has scales of its own, one for each output
channel, and a row takes those of its expert. A graph has no such node: `lower.experts` writes the products of all rows
with all experts and chooses among their codes, which are the same.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import accumulate, products
from qjax.ops.base import Attributes, Bounds, Equation, Op, Quantized, Role, Shape, Site, real, register
from qjax.ops.exact_float import matmul_codes
from qjax.ops.facts import ChoosesNoPlace, always, no_formula
from qjax.ops.fields import NoFields
from qjax.ops.float_accumulator import Pending


@register
class RaggedDot(ChoosesNoPlace, Op):
    """y[r] = x[r] w[expert of r], for x of (rows, k) and w of (experts, k, n); 0 for rows without an expert.

    inputs: x, w, the sizes of the groups of rows, and what `rewrites.expert_routing` made of these: the expert of each
    row (rows, 1), and whether it has one.
    """

    name = "ragged_dot"
    fields = NoFields
    role = Role.PRODUCER
    primitives = ("ragged_dot",)
    keeps_batch = always
    takes_steps = False
    operation = no_formula

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and constant[1]

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (2, 3, 4)

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        return 1

    def weight_axes(self, eqn: Equation, index: int) -> tuple[int, ...]:
        return (0, 2)

    def channels(self, eqn: Equation, index: int) -> list[list[int]]:
        return [[1, 2]]

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0] * inputs[1]]

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, w, *routes = inputs
        if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
            return eqn.bind(real(x), real(w), *routes)
        sizes, expert, member = map(jnp.asarray, routes)
        experts, _, features = w.shape

        def of_experts(numbers: jax.Array, expert: jax.Array) -> jax.Array:
            """(experts, 1, features) -> (rows, features)."""
            return jnp.take(numbers.reshape(experts, features), expert[:, 0], axis=0, mode="clip")

        def product(a: jax.Array, b: jax.Array, kind: Any, precision: Any, sizes: jax.Array, *_: Any) -> jax.Array:
            return products.ragged_dot(a, b, kind, precision, sizes)

        def integers(a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any, *routes: jax.Array) -> jax.Array:
            sizes, expert, member = routes
            if zero_b is not None:
                b = b.astype(jnp.int32) - zero_b
                a, zero_a = a.astype(jnp.int32) - (np.int32(0) if zero_a is None else zero_a), None
            acc = products.ragged_dot(a, b, jnp.int32, products.FULL, sizes)
            if zero_a is None:
                return acc
            # sum (a - z) b = sum a b - z sum b
            acc = acc - zero_a * of_experts(accumulate.sums(b, [1]), expert)
            return jnp.where(jnp.broadcast_to(member, acc.shape), acc, jnp.zeros_like(acc))

        own = sizes, expert, member
        acc = matmul_codes(x, w, ((1,), (1,)), product, eqn, integers, apart=([[0, 0]], ()), groups=own)
        scale = of_experts(jnp.broadcast_to(w.scale, (experts, 1, features)), expert) * x.scale.reshape(())
        return [Pending.start(acc, lax.stop_gradient(scale), eqn.out_dtypes[0])]

    def accumulator(self, site: Site) -> Bounds | None:
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[0, 1], [0], [0], [0]]
