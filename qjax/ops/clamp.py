"""relu, relu6, clip, maximum and minimum with a constant: bounds on the codes.

relu: max(q, z)        clip(low, high): min(max(q, code(low)), code(high))
"""

from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Quantized, Role, real, register
from qjax.ops.constant_codes import steps_on
from qjax.ops.epilogue import clamp_codes
from qjax.ops.facts import End, filled_with_constants
from qjax.ops.float_accumulator import Pending


class Fields(TypedDict):
    """For relu the lower bound is 0, and for relu6 the bounds are 0 and 6. Other clamps have constants as bounds."""

    relu: NotRequired[bool]
    relu6: NotRequired[bool]


@register
class Clamp(Elementwise):
    """y = min(max(x, low), high). Rounding is monotone, so clamping floats or codes results in the same codes."""

    name = "clamp"
    fields = Fields
    role = Role.CHAIN
    primitives = ("relu", "relu6", "max", "min", "clamp")
    on_grid = True
    clamps = True
    filling = filled_with_constants

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        if eqn.primitive in ("relu", "relu6"):
            return True
        if eqn.primitive == "clamp":
            return list(constant) == [True, False, True] and all(np.prod(eqn.in_shapes[i]) == 1 for i in (0, 2))
        if sum(constant) != 1:
            return False
        return int(np.prod(eqn.in_shapes[constant.index(True)])) == 1

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (constant.index(False),)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        if eqn.primitive in ("relu", "relu6"):
            return {}
        if eqn.primitive == "clamp":
            return {"low": 0, "high": 2}
        return {"low" if eqn.primitive == "max" else "high": constant.index(True)}

    def hides(self, eqn: Equation) -> Collection[End]:
        # a bound outside of the range shows in the result, which the calibration observes
        one_end: dict[str, Collection[End]] = {"relu": ("low",), "max": ("low",), "min": ("high",)}
        return one_end.get(eqn.primitive, ("low", "high"))

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {eqn.primitive: True} if eqn.primitive in ("relu", "relu6") else {}

    def has_integer_form(self, eqn: Equation) -> bool:
        return True

    def compose(self, attributes: Attributes, constants: Constants, affine: Any) -> Any:
        return affine

    def may_negate(self, attributes: Attributes) -> bool:
        return False

    def bounds(self, attributes: Attributes, constants: Constants) -> tuple[Any, Any]:
        if attributes.get("relu") or attributes.get("relu6"):
            return np.float32(0), np.float32(6) if attributes.get("relu6") else None
        return constants.get("low"), constants.get("high")

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        position = next((i for i, x in enumerate(inputs) if isinstance(x, Quantized)), None)
        if position is None:
            return self._on_accumulator(eqn, inputs)
        x = inputs[position]

        def code(bound: ArrayLike) -> jax.Array:
            return steps_on(jnp.asarray(bound).reshape(()), x)

        if eqn.primitive == "relu":
            return [x.with_codes(jax.nn.relu(x.codes))]
        if eqn.primitive == "relu6":
            return [x.with_codes(lax.clamp(jnp.zeros(()), x.codes, code(np.float32(6))))]
        if eqn.primitive == "clamp":
            return [x.with_codes(lax.clamp(code(inputs[0]), x.codes, code(inputs[2])))]
        bound = jnp.broadcast_to(code(inputs[1 - position]), x.codes.shape)
        return [x.with_codes((lax.max if eqn.primitive == "max" else lax.min)(x.codes, bound))]

    def _on_accumulator(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        """Clamp in float32 whatever the model's dtype, as the runtime clamps between the accumulator and its codes."""
        pending = next((x for x in inputs if isinstance(x, Pending)), None)
        if pending is None:
            return eqn.bind(*(real(x) for x in inputs))
        wide = [x.real32() if isinstance(x, Pending) else jnp.asarray(real(x)).astype(jnp.float32) for x in inputs]
        named = {"relu": jax.nn.relu, "relu6": jax.nn.relu6}.get(eqn.primitive)
        clamped = named(*wide) if named is not None else eqn.bind(*wide)[0]
        return [Pending.of_real(clamped, pending.dtype)]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return clamp_codes(inputs[0], constants)
