"""Comparisons of codes with codes, of codes with a constant, and of integers. The result is boolean.

x > c    ->    q > threshold,  with a threshold among the integers, so no float is compared
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Operand, Quantized, Role, real, register
from qjax.ops.constant_codes import threshold
from qjax.ops.facts import ChoosesNoPlace

_SWAPPED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}
_FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "gt": lax.gt,
    "lt": lax.lt,
    "ge": lax.ge,
    "le": lax.le,
    "eq": lax.eq,
    "ne": lax.ne,
}
_ROLES = ("left", "right")


class Fields(TypedDict):
    """function: the relation between left and right."""

    function: Literal["gt", "lt", "ge", "le", "eq", "ne"]


@register
class Compare(ChoosesNoPlace, Elementwise):
    """x > y and the other relations: tensors on one grid compare as their codes do.

    attributes: function is one of gt, lt, ge, le, eq, ne. constants: left or right, int32, replaces an operand that is
    a real constant by its threshold among the codes; see `constant_codes.threshold`.
    """

    name = "compare"
    fields = Fields
    role = Role.INTEGER
    primitives = tuple(_FUNCTIONS)

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not all(constant)

    def _reals(self, eqn: Equation) -> bool:
        return jnp.issubdtype(eqn.in_dtypes[0], jnp.floating)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(i for i in (0, 1) if not constant[i]) if self._reals(eqn) else ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return () if self._reals(eqn) else (0, 1)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {_ROLES[i]: i for i in (0, 1) if constant[i]} if self._reals(eqn) else {}

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"function": eqn.primitive}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        known = [i for i, x in enumerate(inputs) if isinstance(x, Quantized)]
        if not known:
            return eqn.bind(*(real(x) for x in inputs))
        x = inputs[known[0]]
        if len(known) == 2:
            return [_compare(eqn.primitive, *(x.codes for x in inputs))]
        value = real(inputs[1 - known[0]])
        way = eqn.primitive if known[0] == 0 else _SWAPPED[eqn.primitive]
        bound = threshold(way, value, lax.stop_gradient(x.scale)).astype(jnp.float32)
        return [_compare(way, x.codes, jnp.asarray(bound))]

    def in_codes(self, attributes: Attributes, constants: Constants, operand: Operand) -> Constants:
        found: dict[str, Any] = {}
        for role, value in constants.items():
            way = attributes["function"] if role == "right" else _SWAPPED[attributes["function"]]
            steps = threshold(way, value, operand.scale)
            xp = np if isinstance(steps, np.ndarray) and isinstance(operand.zero_point, np.ndarray) else jnp
            found[role] = (steps + xp.asarray(operand.zero_point).reshape(())).astype(np.int32)
        return found

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        operands = iter(inputs)
        pair = [constants[role] if role in constants else next(operands) for role in _ROLES]
        if any(role in constants for role in _ROLES):
            pair = [jnp.asarray(x).astype(jnp.int32) for x in pair]
        return _compare(attributes["function"], *pair)


def _compare(function: str, x: jax.Array, y: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return _FUNCTIONS[function](jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape))
