"""A decoder as in LLaMA (Touvron et al., 2023): causal attention, rotary positions, RMS norm, SwiGLU.

The attention is written by hand. The head is the embedding table itself where `tied` is set.
"""

import jax
import jax.numpy as jnp
from flax import nnx


def rotary(x: jax.Array, base: float = 10000.0) -> jax.Array:
    """Turn pairs of features by an angle that grows with the position; x: (batch, length, heads, features)."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class CausalAttention(nnx.Module):
    """Each token attends to itself and those before it."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (y.reshape(b, t, self.heads, d // self.heads) for y in (q, k, v))
        q, k = rotary(q), rotary(k)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d // self.heads)
        mask = jnp.tril(jnp.ones((t, t), dtype=bool))
        scores = jnp.where(mask, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(y.reshape(b, t, d))


class SwiGLU(nnx.Module):
    """A gated perceptron."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = CausalAttention(width, heads, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = SwiGLU(width, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Token ids to logits of the next token; the defaults are the size of GPT-2 small."""

    def __init__(
        self,
        vocabulary: int = 50257,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        hidden: int = 2048,
        tied: bool = True,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, hidden, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.tied = tied
        if not tied:
            self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.tied else self.head(x)


def _small(rngs: nnx.Rngs, tied: bool) -> tuple[nnx.Module, jax.Array]:
    return Decoder(32, 16, 1, 2, 32, tied, rngs=rngs), jax.random.randint(rngs.data(), (2, 6), 0, 32)


def small_tied(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return _small(rngs, True)


def tied(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Decoder(rngs=rngs), jax.random.randint(rngs.data(), (2, 64), 0, 50257)


def small_untied(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return _small(rngs, False)


def untied(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Decoder(tied=False, rngs=rngs), jax.random.randint(rngs.data(), (2, 64), 0, 50257)


small, full = small_tied, tied
