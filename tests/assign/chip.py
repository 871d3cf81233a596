"""A model and a vendor's chip: its kernel of a convolution with an addition loses a bit."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qjax import ops
from qjax.export import Backend, Fusion, compose, op, tensor
from qjax.numerics import effective_scale, quantize_multiplier
from tests.layers.round_trip import data

CONV_ADD = op("add", op("conv", tensor("x"), name="conv"), tensor("residual"), name="add")


class Residual(nnx.Module):
    """relu(conv(x) + x), a mean, a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs)
        self.head = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.conv(x) + x).mean(axis=(1, 2)))


IMAGES = data(4, 5, 5, 3)


def halved(inputs: Any, node: ops.Fused) -> jax.Array:
    """The convolution at half of its accumulator's precision, then the addition as it is; clamps by itself."""
    conv, (x, residual) = node["conv"], inputs
    known = {**conv.attributes, "rule": "single_round"}
    doubled = {**conv.constants, "multiplier": node.constants["multiplier"], "shift": node.constants["shift"]}
    codes = ops.get("conv").kernel(known, ops.get("conv").runtime(known, doubled), [x])
    # the last bit of the convolution's codes is lost on this device
    return node["add"].run(codes & jnp.int8(-2), residual)


def scales(match: Any) -> dict[str, Any]:
    """Multiplier and shift made anew, as a vendor would."""
    conv = match["conv"]
    e = effective_scale(conv.inputs[0].quantization.scale, conv.weight_scale, conv.output.quantization.scale)
    return quantize_multiplier(e)._asdict()


def device_of() -> Backend:
    """A backend for convolutions with an addition, and for products as they are."""
    return Backend("test_chip", "tosa", [Fusion("conv_add_relu", CONV_ADD, halved, scales), (op("dot"), compose)])
