"""Layers whose codes and weights take two or three values, of many shapes, side by side in one model."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import qjax
from qjax.graph.ir import Graph

SHAPE = (4, 5, 130)
"""Of an input: height, width, channels."""


def _straight_through(hard: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def function(x: jax.Array) -> jax.Array:
        soft = jnp.clip(x, -1.0, 1.0)
        return soft + lax.stop_gradient(hard(x) - soft)

    return function


binary = _straight_through(lambda x: jnp.where(x >= 0.0, 1.0, -1.0))
ternary = _straight_through(lambda x: jnp.where(x > 0.3, 1.0, jnp.where(x < -0.3, -1.0, 0.0)))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution of the first channels of the input; without a window a dense layer. bits: whether it has a form."""

    channels: int
    features: int
    window: tuple[int, ...] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: str = "SAME"
    dilation: tuple[int, int] = (1, 1)
    codes: Callable[[jax.Array], jax.Array] = binary
    weights: Callable[[jax.Array], jax.Array] = binary
    bits: bool = True


LAYERS = (
    Layer(4, 8),
    Layer(7, 9, (3, 2), (2, 1), "VALID"),
    Layer(32, 40, strides=(2, 2)),
    Layer(63, 16, (2, 3), dilation=(2, 1)),
    Layer(64, 67),
    Layer(100, 24, (1, 3), (1, 2)),
    Layer(128, 72, (1, 1)),
    Layer(130, 12, (3, 3), padding="VALID"),
    Layer(64, 16, codes=ternary),
    Layer(20, 16, weights=ternary),
    Layer(40, 10, ()),
    Layer(130, 90, ()),
    Layer(90, 17, (), codes=ternary),
    # few products, few features, and too many pairs of planes
    Layer(3, 16, bits=False),
    Layer(64, 4, bits=False),
    Layer(40, 16, codes=ternary, weights=ternary, bits=False),
)


class Many(nnx.Module):
    """One result for each layer."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers
        rng = np.random.default_rng(0)

        def uniform(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.asarray(rng.uniform(-1.0, 1.0, shape), jnp.float32))

        self.kernels = nnx.List(uniform(*own.window, own.channels, own.features) for own in layers)
        self.biases = nnx.List(uniform(1, 1, 1, own.features) for own in layers)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        for own, kernel, bias in zip(self.layers, self.kernels, self.biases, strict=True):
            codes, weights = own.codes(x[..., : own.channels]), own.weights(kernel[...])
            if own.window:
                y = lax.conv_general_dilated(
                    codes,
                    weights,
                    own.strides,
                    own.padding,
                    rhs_dilation=own.dilation,
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
            else:
                y = jnp.dot(codes, weights)
            found.append(y + bias[...])
        return found


def graph(target: str, layers: tuple[Layer, ...] = LAYERS, *, signed: bool = True) -> Graph:
    """Layers under a target; signed: whether activations are int8."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, *SHAPE)), jnp.float32)
    recipe = qjax.Recipe(target=target, activations=qjax.QSpec(bits=8, signed=signed, symmetric=False))
    qmodel = qjax.quantize(Many(layers), recipe, x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    return qjax.convert(qmodel, x).ir


def codes(given: Graph, batch: int) -> list[np.ndarray]:
    """Random codes of the input."""
    (name,) = given.inputs
    info = np.iinfo(given.tensors[name].dtype)
    found = np.random.default_rng(0).integers(info.min, info.max + 1, (batch, *SHAPE))
    return [found.astype(info.dtype)]
