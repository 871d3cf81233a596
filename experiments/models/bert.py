"""BERT's encoder (Devlin et al., 2018), post-norm; a batch is a dict of token ids, segment ids and a padding mask."""

import jax
import jax.numpy as jnp
from flax import nnx


class Embeddings(nnx.Module):
    """Words, positions and segments, summed and normalized."""

    def __init__(self, vocabulary: int, length: int, segments: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.segments = nnx.Embed(segments, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])[None, :]
        x = self.words(tokens) + self.positions(positions) + self.segments(segments)
        return self.dropout(self.norm(x))


class SelfAttention(nnx.Module):
    """Query, key and value from one layer each; `jax.nn.dot_product_attention` over the tokens that are not padding."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).reshape(split) for layer in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
        return self.out(y.reshape(batch, length, width))


class Layer(nnx.Module):
    """Attention and a perceptron, each added to its input and then normalized."""

    def __init__(self, width: int, heads: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.attention = SelfAttention(width, heads, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.intermediate = nnx.Linear(width, hidden, rngs=rngs)
        self.output = nnx.Linear(hidden, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        y = jax.nn.gelu(self.intermediate(x), approximate=False)
        return self.norm2(x + self.dropout(self.output(y)))


class Bert(nnx.Module):
    """The defaults are BERT-base. Returns the tokens' vectors and the pooled first one."""

    def __init__(
        self,
        vocabulary: int = 30522,
        length: int = 512,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        hidden: int = 3072,
        segments: int = 2,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.embeddings = Embeddings(vocabulary, length, segments, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, hidden, rngs=rngs) for _ in range(depth)])
        self.pooler = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        mask = batch["attention_mask"] != 0
        x = self.embeddings(batch["input_ids"], batch["token_type_ids"])
        for layer in self.layers:
            x = layer(x, mask)
        return {"last_hidden_state": x, "pooler_output": jnp.tanh(self.pooler(x[:, 0]))}


def _batch(rngs: nnx.Rngs, vocabulary: int, length: int, batch: int = 2) -> dict[str, jax.Array]:
    lengths = jnp.linspace(length // 2, length, batch).astype(jnp.int32)
    places = jnp.arange(length)
    return {
        "input_ids": jax.random.randint(rngs.data(), (batch, length), 0, vocabulary),
        "token_type_ids": (places[None, :] >= length // 2).astype(jnp.int32).repeat(batch, axis=0),
        "attention_mask": (places[None, :] < lengths[:, None]).astype(jnp.int32),
    }


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, dict[str, jax.Array]]:
    return Bert(32, 8, 16, 1, 2, 32, rngs=rngs), _batch(rngs, 32, 8)


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, dict[str, jax.Array]]:
    return Bert(rngs=rngs), _batch(rngs, 30522, 128)
