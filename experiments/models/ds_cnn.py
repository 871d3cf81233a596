"""DS-CNN for keyword spotting (Zhang et al., 2017, "Hello Edge"): the network of MLPerf Tiny."""

import jax
import jax.numpy as jnp
from flax import nnx


class SeparableConv(nnx.Module):
    """Depthwise 3x3 and pointwise, each with bias, batch norm and relu."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(width, width, (3, 3), padding="SAME", feature_group_count=width, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.pointwise = nnx.Conv(width, width, (1, 1), rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm1(self.depthwise(x)))
        return nnx.relu(self.norm2(self.pointwise(x)))


class DSCNN(nnx.Module):
    """Spectrograms (batch, time, frequency) to probabilities of keywords."""

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 12, *, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, width, (10, 4), strides=(2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.blocks = nnx.Sequential(*(SeparableConv(width, rngs=rngs) for _ in range(depth)))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, spectrogram: jax.Array) -> jax.Array:
        x = jnp.expand_dims(spectrogram, -1)
        x = self.dropout(nnx.relu(self.norm(self.stem(x))))
        x = self.dropout(self.blocks(x))
        x = nnx.avg_pool(x, x.shape[1:3])
        return nnx.softmax(self.head(x.reshape(x.shape[0], -1)))


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return DSCNN(8, 1, 5, rngs=rngs), jax.random.normal(rngs.data(), (2, 13, 6))


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return DSCNN(rngs=rngs), jax.random.normal(rngs.data(), (2, 49, 10))
