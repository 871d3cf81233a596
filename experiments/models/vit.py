"""Vision Transformer (Dosovitskiy et al., 2020), pre-norm, with a class token and learned positions."""

import jax
import jax.numpy as jnp
from flax import nnx


class Mlp(nnx.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(width, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.fc2(self.dropout(nnx.gelu(self.fc1(x)))))


class EncoderBlock(nnx.Module):
    """Self-attention and a perceptron, each behind its norm and in front of a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=heads, in_features=width, dropout_rate=dropout, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = Mlp(width, hidden, dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    """The defaults are ViT-B/16."""

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        hidden: int = 3072,
        classes: int = 1000,
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        patches = (size // patch) ** 2
        self.embed = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, patches + 1, width)))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([EncoderBlock(width, heads, hidden, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        batch, height, breadth, width = x.shape
        x = x.reshape(batch, height * breadth, width)
        cls = jnp.tile(self.cls[...], (batch, 1, 1))
        x = jnp.concatenate([cls, x], axis=1) + self.positions
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    model = VisionTransformer(8, 4, 16, 1, 2, 32, 10, rngs=rngs)
    return model, jax.random.normal(rngs.data(), (2, 8, 8, 3))


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return VisionTransformer(rngs=rngs), jax.random.normal(rngs.data(), (2, 224, 224, 3))
