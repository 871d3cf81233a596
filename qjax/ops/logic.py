"""Arithmetic of plain integers and booleans, which are not codes: masks, positions, counts."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Bounds, Constants, Equation, Op, Role, Shape, Site, register
from qjax.ops.facts import ChoosesNoPlace, always
from qjax.ops.fields import Natural

_ELEMENTWISE: dict[str, Callable[..., jax.Array]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "div": lax.div,
    "rem": lax.rem,
    "clamp": lambda low, x, high: lax.min(lax.max(x, low), high),
}
_DIVISIONS = ("div", "rem")
_REDUCTIONS = ("reduce_and", "reduce_or", "reduce_sum", "reduce_max", "reduce_min")
_CONVERT = "convert_element_type"


class Fields(TypedDict):
    """function: the name of the primitive. axes: of a reduction."""

    function: str
    axes: NotRequired[list[Natural]]


@register
class Logic(ChoosesNoPlace, Op):
    """Functions of int32 (modulo 2^32, as JAX computes them) and bool: elementwise, over axes, and between the two.

    Divisions truncate towards zero. The divisor must be a constant other than 0 and -1, because runtimes differ there.

    attributes: function is the name of the primitive, and axes are those of a reduction.
    """

    name = "logic"
    fields = Fields
    role = Role.INTEGER
    primitives = (*_ELEMENTWISE, *_REDUCTIONS, _CONVERT)
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        kinds = [np.dtype(dtype) for dtype in (*eqn.in_dtypes, *eqn.out_dtypes)]
        if all(constant) or any(kind.kind not in "biu" for kind in kinds):
            return False
        if eqn.primitive in _DIVISIONS and (eqn.literals[1] is None or np.isin(eqn.literals[1], (0, -1)).any()):
            return False
        if eqn.primitive == _CONVERT and np.bool_ not in kinds:
            return False  # a cast between integers does not change the numbers
        # integers of fewer bits wrap at another bound than int32
        return all(kind.name in ("bool", "int32") for kind in kinds) or eqn.primitive == _CONVERT

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(range(len(constant)))

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        axes = {"axes": [int(axis) for axis in eqn.params["axes"]]} if eqn.primitive in _REDUCTIONS else {}
        return {"function": eqn.primitive, **axes}

    def accumulator(self, site: Site) -> Bounds | None:
        # plain integers, which wrap in the float model too
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes.get("axes", ())] * len(inputs)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        function = attributes["function"]
        if function == _CONVERT:
            return _converted(inputs[0], attributes["dtype"])
        if function in _REDUCTIONS:
            return _reduced(function, inputs[0], tuple(attributes["axes"]))
        shape = jnp.broadcast_shapes(*(x.shape for x in inputs))
        return _ELEMENTWISE[function](*(jnp.broadcast_to(x, shape) for x in inputs))


def _converted(x: jax.Array, dtype: str) -> jax.Array:
    if dtype == "bool" and x.dtype != jnp.bool_:
        return x != jnp.zeros((), x.dtype)
    return x.astype(dtype)


def _reduced(function: str, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    if function == "reduce_sum":
        return jnp.sum(x, axis=axes, dtype=jnp.int32)
    if x.dtype == jnp.bool_:
        # as integers, because every runtime has a minimum and a maximum
        whole = jnp.min if function in ("reduce_and", "reduce_min") else jnp.max
        return whole(x.astype(jnp.int32), axis=axes) != np.int32(0)
    if function in ("reduce_max", "reduce_min"):
        return (jnp.max if function == "reduce_max" else jnp.min)(x, axis=axes)
    raise ValueError(f"logic: {function} has a kernel for booleans only, not for integers.")
