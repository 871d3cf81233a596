"""A small model of each kind, with the arithmetic that it leads to: what is lowered for every setting and platform."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from qjax import QSpec, Recipe
from tests.layers.round_trip import data


class Dense(nnx.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        self.a, self.b = nnx.Linear(24, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.a(x)))


class Convolutional(nnx.Module):
    """A convolution, a depthwise one with a residual, pooling and a head."""

    def __init__(self) -> None:
        self.a = nnx.Conv(3, 20, (3, 3), rngs=nnx.Rngs(0))
        self.b = nnx.Conv(20, 20, (3, 3), feature_group_count=20, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(20, 4, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.a(x))
        x = nnx.max_pool(x + self.b(x), (2, 2), (2, 2))
        return self.head(x.mean((1, 2)))


class Attention(nnx.Module):
    """Self-attention behind a layer norm."""

    def __init__(self) -> None:
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(self.norm(x))


class Recurrent(nnx.Module):
    """An LSTM over time."""

    def __init__(self) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 5, rngs=nnx.Rngs(0)))

    def __call__(self, x: jax.Array) -> Any:
        return self.rnn(x)


_WIDE = Recipe(weights=QSpec(bits=12, axis=-1), activations=QSpec(bits=12))
_SPLIT = Recipe(weights=QSpec(bits=4, group_size=8, group_axis=0), activations=QSpec(bits=8))

KINDS: dict[str, tuple[Callable[[], nnx.Module], tuple[int, ...], Recipe]] = {
    "dense": (Dense, (4, 24), Recipe()),
    "convolutional": (Convolutional, (2, 8, 8, 3), Recipe()),
    "attention": (Attention, (2, 5, 8), Recipe()),
    "recurrent": (Recurrent, (2, 4, 6), Recipe()),
    "dense of 12 bits": (Dense, (4, 24), _WIDE),
    "dense in groups": (Dense, (4, 24), _SPLIT),
    "convolutional of 12 bits": (Convolutional, (2, 8, 8, 3), _WIDE),
    "attention of 12 bits": (Attention, (2, 5, 8), _WIDE),
}
"""Name -> (the model, the shape of its input, the recipe)."""


def made(kind: str) -> tuple[nnx.Module, Any, Recipe]:
    """A model, a sample and a recipe."""
    model, shape, recipe = KINDS[kind]
    return model(), data(*shape), recipe
