"""Batch normalisation with running statistics: an affine step per channel, folded after quantization.

y = (x - mean) / sqrt(var + epsilon) * scale + bias  =  x * g + b,  with g = scale / sqrt(var + epsilon)
"""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.softfloat import Real
from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Role, real, register
from qjax.ops.epilogue import Affine
from qjax.ops.fields import Natural
from qjax.ops.float_accumulator import Pending


class Fields(TypedDict):
    """epsilon: added to the variance. trailing: the axes after that of the channels.

    updated: in training mode, the names of the results after y; "mean" and "var" are the statistics after the step.
    """

    epsilon: float
    use_running_average: bool
    trailing: Natural
    updated: NotRequired[tuple[str, ...]]


def _folded(x: Pending, named: Mapping[str, Any], attributes: Attributes) -> Pending:
    """x after the affine step with these statistics. named: vectors over the channels, or with the rank of x."""
    tail = (1,) * attributes["trailing"]

    def vector(value: jax.Array) -> jax.Array:
        return value.astype(jnp.float32).reshape((*value.shape, *tail) if value.ndim == 1 else value.shape)

    named = {name: vector(value) for name, value in named.items()}
    k = 1.0 / jnp.sqrt(named["var"] + np.float32(attributes["epsilon"]))
    k = k * named["scale"] if "scale" in named else k
    y = x.plus(-named["mean"]).times(k)
    return y.plus(named["bias"]) if "bias" in named else y


@register
class BatchNorm(Elementwise):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias.

    With batch statistics the op has the same place in the chain, but no integer form, so a model is converted in
    evaluation mode. The fake-quantized forward evaluates it in floats and adds the change that rounding the shipped
    bias will cause.
    """

    name = "batch_norm"
    fields = Fields
    role = Role.CHAIN
    primitives = ("batch_norm",)
    clamps = False

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0]

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {name: i for i, name in enumerate(eqn.params["layer"].operands) if i > 0}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x = inputs[0]
        attributes = self.attributes(eqn)
        if not isinstance(x, Pending):
            return eqn.bind(*(real(x) for x in inputs))
        named = {name: inputs[i] for name, i in self.chain_constants(eqn, ()).items()}
        if attributes["use_running_average"]:
            return [_folded(x, named, attributes)]
        y, *updated = eqn.bind(*(real(x) for x in inputs))
        named |= dict(zip(attributes["updated"], updated, strict=True))
        shift = lax.stop_gradient(_folded(x, named, attributes).rounding_of_offset())
        shifted = y.astype(jnp.float32) + jnp.broadcast_to(shift, y.shape)
        return [shifted.astype(y.dtype), *updated]

    def chain_axes(self, eqn: Equation, constant: Sequence[bool]) -> set[int]:
        return {len(eqn.out_shapes[0]) - 1 - dict(eqn.params["layer"].attributes)["trailing"]}

    def has_integer_form(self, eqn: Equation) -> bool:
        # in training mode the layer also returns the statistics of the batch
        return len(eqn.out_shapes) == 1

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return dict(eqn.params["layer"].attributes)

    def compose(self, attributes: Attributes, constants: Constants, affine: Affine) -> Affine:
        if not attributes["use_running_average"]:
            raise ValueError(
                "Batch normalisation with the statistics of the batch has no integer form. "
                "Convert in evaluation mode: call model.eval() first."
            )
        tail = (1,) * attributes["trailing"]

        def vector(name: str) -> Real:
            array = constants[name]
            return Real.of(array.reshape((*array.shape, *tail)))

        k = Real.of(np.float32(1)) / (vector("var") + Real.of(np.float32(attributes["epsilon"]))).sqrt()
        if "scale" in constants:
            k = k * vector("scale")
        out = affine.plus(-vector("mean")).times(k)
        return out.plus(vector("bias")) if "bias" in constants else out
