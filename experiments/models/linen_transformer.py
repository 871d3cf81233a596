"""A small transformer encoder in Flax Linen: its layers are one `nn.scan` over `nn.remat`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class Layer(nn.Module):
    """Pre-norm self-attention and perceptron. The shape of a scan's body: carry in, (carry, None) out."""

    heads: int
    hidden: int
    dropout: float = 0.1
    deterministic: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads, deterministic=self.deterministic)(y, y)
        x = x + nn.Dropout(self.dropout, deterministic=self.deterministic)(y)
        y = nn.LayerNorm()(x)
        y = nn.Dense(self.hidden)(y)
        y = nn.gelu(y)
        y = nn.Dense(x.shape[-1])(y)
        return x + nn.Dropout(self.dropout, deterministic=self.deterministic)(y), None


class Encoder(nn.Module):
    """Token ids to class scores."""

    vocabulary: int = 8192
    length: int = 128
    width: int = 256
    heads: int = 8
    hidden: int = 1024
    layers: int = 6
    classes: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))
        x = x + positions[None, : tokens.shape[1]]
        stack = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = stack(self.heads, self.hidden, deterministic=not train, name="layers")(x, None)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(self.classes, name="head")(jnp.mean(x, axis=1))


def _build(model: Encoder, batch: int, rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    tokens = jax.random.randint(rngs.data(), (batch, model.length), 0, model.vocabulary)
    variables = model.init(rngs.params(), tokens)
    return model, variables, tokens


def small(rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    return _build(Encoder(32, 6, 16, 2, 32, 2), 2, rngs)


def full(rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    return _build(Encoder(), 2, rngs)
