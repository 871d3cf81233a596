"""Finds the dense layers and convolutions of a quantized model, each as a function without bias and activation.

Learned rounding, GPTQ and bias correction need a layer's product without bias, batch norm and activation, and the
parameter that shifts the product's channels.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qjax.model.call import Call
from qjax.ops.facts import ProductFacts
from qjax.tracing import Equation, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """One dense layer or convolution whose weight is an unchanged parameter.

    name: of the weight's quantizer. equation: the product. weight: the operand index of the weight; the other is data.
    channels: (axis of the output, axis of the weight) for the axes that both have. shift: the name of the parameter
    that is added to each output channel, or of the running mean that is subtracted; None if there is neither. adds:
    which of the two.
    """

    name: str
    equation: Equation
    weight: int
    channels: tuple[tuple[int, int], ...]
    shift: str | None
    adds: bool

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The product of float tensors."""
        return self.equation.bind(*((w, x) if self.weight == 0 else (x, w)))[0]

    def summed(self, y: jax.Array) -> jax.Array:
        """An output summed over all axes but channels, laid out to broadcast against the weight."""
        pairs = sorted(self.channels)
        kept = jnp.sum(y, axis=tuple(axis for axis in range(y.ndim) if axis not in dict(pairs)))
        order = sorted(range(len(pairs)), key=lambda i: pairs[i][1])
        axes = {axis for _, axis in pairs}
        shape = self.equation.in_shapes[self.weight]
        return kept.transpose(order).reshape([size if axis in axes else 1 for axis, size in enumerate(shape)])

    def means(self, y: jax.Array) -> jax.Array:
        """[channels]: the mean over all other axes, for an output with one axis of channels."""
        ((channel, _),) = self.channels
        return jnp.mean(y, axis=tuple(axis for axis in range(y.ndim) if axis != channel))


def find_products(call: Call, names: tuple[str, ...]) -> tuple[list[Product], dict[str, str]]:
    """The products, and for other weights the reason why they have none."""
    traced, annotation = call.traced, call.annotation
    program = traced.program
    own = zip(program.inputs, traced.names, traced.constant, strict=True)
    path_of = {value: name for value, name, is_state in own if is_state}
    found: dict[str, list[Product]] = {name: [] for name in names}
    reasons: dict[str, str] = {}
    for eqn in program.walk():
        reading = annotation.ops.get(eqn)
        for index in range(len(eqn.inputs)):
            place = annotation.weights.get((eqn, index))
            if place is None or place.name not in found:
                continue
            if reading is None or not isinstance(reading[0], ProductFacts):
                reasons[place.name] = f"it is read by {eqn.primitive!r}, neither a dense layer nor a convolution"
            elif eqn not in program.equations:
                reasons[place.name] = "it is read inside of a rematerialised or repeated part"
            else:
                channels = tuple((a, b) for a, b in reading[0].channels(eqn, index))
                shift, adds = _shift(program.equations, eqn, channels, path_of)
                found[place.name].append(Product(place.name, eqn, index, channels, shift, adds))
    for name, uses in found.items():
        if len(uses) > 1:
            reasons[name] = f"{len(uses)} layers read it"
    return [uses[0] for name, uses in found.items() if name not in reasons and uses], reasons


def _shift(
    equations: tuple[Equation, ...], eqn: Equation, channels: tuple[tuple[int, int], ...], path_of: dict[Value, str]
) -> tuple[str | None, bool]:
    """The parameter that shifts each channel after a product, and whether it is a bias, which is added."""
    (value,), rank = eqn.outputs, len(eqn.out_shapes[0])
    if len(channels) != 1 or channels[0][0] != rank - 1:
        return None, True
    made = {output: e for e in equations for output in e.outputs}
    readers = [e for e in equations if value in e.inputs]
    if len(readers) != 1:
        return None, True
    step = readers[0]
    if step.primitive == "add":
        other = step.inputs[1 - step.inputs.index(value)]
        while other in made and made[other].primitive in ("reshape", "broadcast_in_dim"):
            other = made[other].inputs[0]
        return (path_of.get(other) if other.shape == (value.shape[-1],) else None), True
    if step.primitive == "batch_norm" and step.inputs[0] is value:
        layer = step.params["layer"]
        if dict(layer.attributes)["trailing"] == 0:
            return path_of.get(step.inputs[layer.operands.index("mean")]), False
    return None, True
