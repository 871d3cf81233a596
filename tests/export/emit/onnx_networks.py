"""Networks for the ONNX emitters, converted and calibrated on a few random images or sequences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from tests.layers.round_trip import data


class Images(nnx.Module):
    """Residual, depthwise, grouped and dilated convolutions, pools, a concatenation, a flattening head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.grouped = nnx.Conv(8, 8, (3, 3), feature_group_count=2, kernel_dilation=2, rngs=rngs)
        self.plain = nnx.Conv(8, 8, (1, 1), use_bias=False, rngs=rngs)
        self.hidden = nnx.Linear(16 * 16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        y = nnx.relu6(x + self.plain(nnx.relu(self.grouped(self.depthwise(x)))))
        window = (1, 2, 2, 1)
        means = jax.lax.reduce_window(x, np.float32(0), jax.lax.add, window, window, "VALID") / np.float32(4)
        x = jnp.concatenate([nnx.max_pool(y, (2, 2), (2, 2)), means], -1)
        z = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(z * jnp.mean(x, (1, 2)))


class Shortcut(nnx.Module):
    """A residual block whose shortcut has no weights: every second pixel, and channels of zeros."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.conv = nnx.Conv(4, 8, (3, 3), strides=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        return nnx.relu(self.conv(x) + jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (2, 2))))


class Small(nnx.Module):
    """A convolution and a dense layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 6, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 6, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv(x))
        return self.head(x.reshape(x.shape[0], -1))


class Sequences(nnx.Module):
    """Attention without softmax: products of activations, several contracted axes, a subtraction."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(8, 16, rngs=rngs)
        self.query = nnx.LinearGeneral(16, (2, 8), rngs=rngs)
        self.key = nnx.LinearGeneral(16, (2, 8), rngs=rngs)
        self.value = nnx.LinearGeneral(16, (2, 8), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        scores = nnx.relu(jnp.einsum("bqhd,bkhd->bhqk", self.query(x), self.key(x)))
        y = self.out(jnp.einsum("bhqk,bkhd->bqhd", scores, self.value(x))) + x
        return jnp.mean(y - x, 1)


class Attention(nnx.Module):
    """Attention as `jax.nn` has it, with a factor that is no power of two, and softmax as the result."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.heads = nnx.List([nnx.LinearGeneral(8, (2, 6), rngs=rngs) for _ in range(3)])
        self.out = nnx.LinearGeneral((2, 6), 5, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (layer(x) for layer in self.heads)
        return jax.nn.softmax(self.out(jax.nn.dot_product_attention(query, key, value)))


IMAGES, SEQUENCES = data(4, 8, 8, 3), data(4, 6, 8)
UNSIGNED = qjax.QSpec(bits=8, signed=False, symmetric=False)


def converted(model: nnx.Module, sample: jax.Array, **recipe: Any) -> qjax.IntegerGraph:
    """The network under a recipe."""
    qmodel = qjax.quantize(model, qjax.Recipe(**recipe), sample)
    qjax.calibrate(qmodel, [sample])
    qmodel.eval()
    return qjax.convert(qmodel, sample)
