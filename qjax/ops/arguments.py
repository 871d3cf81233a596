"""The index of the largest or smallest element: argmax, argmin, top_k. Codes are ordered like their float values."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NotRequired

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Bounds, Constants, Equation, Op, Quantized, Role, Shape, Site, real, register
from qjax.ops.facts import End, always, hides_low, no_filling
from qjax.ops.fields import Axis, Natural
from qjax.ops.grid import GridOp


def first_greatest(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The greatest element along an axis and the first index that holds it, int32; the axis remains, with size 1."""
    greatest = jnp.max(x, axis=axis, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    holds = x == jnp.broadcast_to(greatest, x.shape)
    beyond = jnp.full(x.shape, x.shape[axis], jnp.int32)
    return greatest, jnp.min(lax.select(holds, places, beyond), axis=axis, keepdims=True)


class ArgumentFields(Axis):
    """function: which element is sought along `axis`."""

    function: Literal["argmax", "argmin"]


@register
class Argument(Op):
    """`lax.argmax` and `lax.argmin` along one axis; of equal elements the first one counts.

    attributes: function, axis.
    """

    name = "argument"
    fields = ArgumentFields
    role = Role.INTEGER
    primitives = ("argmax", "argmin")
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and len(eqn.params["axes"]) == 1

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"function": eqn.primitive, "axis": int(eqn.params["axes"][0])}

    def hides(self, eqn: Equation) -> Collection[End]:
        return ("low",) if eqn.primitive == "argmax" else ("high",)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        return eqn.bind(x.codes if isinstance(x, Quantized) else real(x))

    def accumulator(self, site: Site) -> Bounds | None:
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, axis = inputs[0].astype(jnp.int32), attributes["axis"]
        if attributes["function"] == "argmin":
            # reverses the order; unlike -x it works for every int32 (-2^31 has no negative)
            x = ~x
        return jnp.squeeze(first_greatest(x, axis)[1], axis)


class TopKFields(Axis):
    """k: how many elements of `axis`. index: which result, 0 for the elements and 1 for their indices."""

    k: Natural
    index: NotRequired[Natural]


@register
class TopK(GridOp):
    """`lax.top_k`: node 0 holds the k largest elements in order, node 1 their indices (int32). Ties keep their order.

    attributes: k is how many elements are taken along axis.
    """

    name = "top_k"
    fields = TopKFields
    primitives = ("top_k",)
    keeps_batch = always
    filling = no_filling
    hides = hides_low

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and jnp.issubdtype(eqn.in_dtypes[0], jnp.floating)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        axis = eqn.params.get("axis", -1)
        return {"k": int(eqn.params["k"]), "axis": int(axis) % len(eqn.in_shapes[0])}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(real(x))
        # compare codes, not floats: JAX orders 0.0 before -0.0, and both are the same code
        _, places = eqn.bind(lax.stop_gradient(x.codes).astype(jnp.int32))
        values = jnp.take_along_axis(x.codes, places, axis=self.attributes(eqn)["axis"], mode="clip")
        return [x.with_codes(values), places]

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, axis = inputs[0].astype(jnp.int32), attributes["axis"]
        places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        found: list[jax.Array] = []
        for _ in range(attributes["k"]):
            pair = first_greatest(x, axis)
            found.append(pair[attributes["index"]])
            taken = places == jnp.broadcast_to(pair[1], x.shape)
            # lower than every code, so it is not found again
            x = lax.select(taken, jnp.full(x.shape, np.int32(-(2**31)), jnp.int32), x)
        return jnp.concatenate(found, axis=axis).astype(attributes["dtype"])
