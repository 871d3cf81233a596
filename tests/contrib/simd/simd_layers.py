"""Layers of many shapes for emitted C with vectors, side by side in one model."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from qjax.graph.ir import Graph

SHAPE = (9, 7, 36)
"""Of an input: height, width, channels."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution of the first channels of the input; window: its height and width."""

    channels: int
    features: int
    window: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    padding: str = "SAME"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


LAYERS = (
    Layer(1, 16, (3, 3)),
    Layer(3, 20, (3, 3), (2, 2)),
    Layer(3, 5, (2, 3), (1, 2), "VALID"),
    Layer(4, 16),
    Layer(8, 17, (3, 3)),
    Layer(12, 40, (3, 1), (2, 1), "VALID"),
    Layer(36, 36, (3, 3), (1, 1), "SAME", (2, 2)),
    Layer(5, 33, (3, 3), (2, 1), "SAME"),
    Layer(36, 1),
    Layer(16, 16, (3, 3), (1, 1), "SAME", (1, 1), 16),
    Layer(20, 20, (3, 3), (2, 2), "VALID", (1, 1), 20),
    Layer(36, 36, (5, 3), (1, 1), "SAME", (1, 2), 36),
    Layer(36, 4, (7, 5)),
    Layer(36, 18, (3, 3), (2, 2), "SAME", (1, 1), 9),
    Layer(32, 96, (1, 1), (1, 1), "SAME", (1, 1), 2),
    Layer(24, 126, (3, 3), (1, 1), "VALID", (1, 2), 3),
    Layer(16, 160, (9, 7), (1, 1), "VALID", (1, 1), 4),
    Layer(3, 18, (9, 7), (1, 1), "VALID"),
    # these have no form in vectors: few channels, or a number of them in a group that is no multiple of four
    Layer(8, 8, (3, 3), (1, 1), "SAME", (1, 1), 8),
    Layer(36, 36, (3, 3), (1, 1), "SAME", (1, 1), 2),
    Layer(16, 32, (3, 3), (1, 1), "SAME", (1, 1), 16),
)


DEPTHWISE = (
    Layer(64, 64, (3, 3), (1, 1), "SAME", (1, 1), 64),
    Layer(70, 70, (3, 3), (2, 2), "SAME", (1, 1), 70),
    Layer(131, 131, (1, 5), (1, 1), "VALID", (1, 1), 131),
    Layer(192, 192, (3, 2), (1, 2), "SAME", (2, 1), 192),
    Layer(65, 65, (9, 7), (1, 1), "VALID", (1, 1), 65),
)
"""Behind a layer that makes so many channels."""
DENSE = (3, 16, 70)
WHOLE = slice(None)
"""Which layers: all of them."""


def convolution(layer: Layer, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        layer.channels,
        layer.features,
        layer.window,
        layer.strides,
        padding=layer.padding,
        kernel_dilation=layer.dilation,
        feature_group_count=layer.groups,
        bias_init=nnx.initializers.normal(1.0),
        rngs=rngs,
    )


class Many(nnx.Module):
    """One result for each layer, and dense layers of the mean and of every position."""

    def __init__(self, rngs: nnx.Rngs, which: slice = WHOLE) -> None:
        self.chosen = LAYERS[which]
        self.layers = nnx.List(convolution(layer, rngs) for layer in self.chosen)
        self.wider = nnx.List(nnx.Conv(SHAPE[2], layer.channels, (1, 1), rngs=rngs) for layer in DEPTHWISE[which])
        self.depthwise = nnx.List(convolution(layer, rngs) for layer in DEPTHWISE[which])
        self.dense = nnx.List(nnx.Linear(36, features, rngs=rngs) for features in DENSE[which])
        self.wide = nnx.Linear(SHAPE[0] * SHAPE[1] * SHAPE[2], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        found = [layer(x[..., : own.channels]) for layer, own in zip(self.layers, self.chosen, strict=True)]
        found[3] = nnx.relu(found[3])
        found += [own(wider(x)) for wider, own in zip(self.wider, self.depthwise, strict=True)]
        mean = x.mean(axis=(1, 2))
        everywhere = self.dense[len(self.dense) // 2](x)
        return [*found, *(layer(mean) for layer in self.dense), everywhere, self.wide(x.reshape(len(x), -1))]


class Products(nnx.Module):
    """Products of activations: every order of the axes, lengths that are no multiples of 4 and of 16, batches."""

    def __init__(self, rngs: nnx.Rngs, which: slice = WHOLE) -> None:
        self.which = (which.start, which.stop, which.step)
        self.heads = nnx.List([nnx.LinearGeneral(36, (2, width), rngs=rngs) for width in (18, 18, 20, 5)])

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        rows = x[:, 0] * 1.5
        query, key, value, few = (head(x.reshape(len(x), -1, 36)[:, :47] + 0.2) for head in self.heads)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 18**0.5
        found = [
            jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value),
            jnp.einsum("bhqk,bkhd->bhdq", nnx.relu(scores), few),
            jnp.einsum("bqhd,bkhe->bdhe", query, value[:, :1] + 0 * value),
            jnp.einsum("bqhd,bqhe->bhde", query[:, :23], value[:, :23]),
            jnp.einsum("btc,bsc->bst", x[:, 0], rows),
            jnp.einsum("btc,bsc->bts", x[:, 0, :, :33], rows[..., :33]),
            # no form in vectors: few rows, and a result whose last axis is shared
            jnp.einsum("btc,bsc->bts", x[:, 0, :3], rows),
            jnp.einsum("btcd,bscd->btsd", *(a.reshape(len(x), 7, 9, 4) for a in (x[:, 0], rows))),
        ]
        return found[slice(*self.which)]


def graph(target: str, bits: int = 8, *, signed: bool = True, products: bool = False, which: slice = WHOLE) -> Graph:
    """Layers under a target, or all products; bits: of the weights. signed: whether activations are int8."""
    x = jax.random.normal(jax.random.key(0), (4, *SHAPE))
    activations = qjax.QSpec(bits=8, signed=signed, symmetric=False)
    recipe = qjax.Recipe(target=target, weights=qjax.QSpec(bits=bits, axis=-1), activations=activations)
    qmodel = qjax.quantize((Products if products else Many)(nnx.Rngs(0), which), recipe, x)
    qmodel.eval()
    with warnings.catch_warnings():
        # one of the products reads zeros
        warnings.filterwarnings("ignore", ".*a single number")
        return qjax.convert(qmodel, x).ir


def codes(given: Graph, batch: int) -> list[np.ndarray]:
    """Random codes of the input, its least and greatest ones among them."""
    (name,) = given.inputs
    info = np.iinfo(given.tensors[name].dtype)
    rng = np.random.default_rng(0)
    found = rng.integers(info.min, info.max + 1, (batch, *SHAPE))
    found[rng.random(found.shape) < 0.1] = info.min
    found[rng.random(found.shape) < 0.1] = info.max
    return [found.astype(info.dtype)]
