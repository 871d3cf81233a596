"""A decoder over bytes with a cache of keys and values in which every example has places of its own."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import qjax

Cache = list[dict[str, Any]]
"""For each layer keys and values, [examples, places, heads, features]."""

BYTES = 256


def scatter(cache: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    """Write each token at its own place; a place beyond the cache is not written."""
    return cache.at[jnp.arange(cache.shape[0])[:, None], places].set(new, mode="drop")


def slices(cache: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    """Write neighbouring tokens from the first one's place on."""
    zero = jnp.zeros((), places.dtype)
    return jax.vmap(lambda old, own, place: lax.dynamic_update_slice(old, own, (place, zero, zero)))(
        cache, new, places[:, 0]
    )


WRITES = {"scatter": scatter, "slices": slices}


class Block(nnx.Module):
    """Attention over the cache and a GELU, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs, write: str) -> None:
        self.heads, self.write = heads, write
        self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(
        self, x: jax.Array, places: jax.Array, seen: jax.Array, cache: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        h = self.first(x)
        n, t, width = h.shape
        shape = n, t, self.heads, width // self.heads
        query, key, value = (layer(h).reshape(shape) for layer in (self.query, self.key, self.value))
        write = WRITES[self.write]
        new = {"keys": write(cache["keys"], key, places), "values": write(cache["values"], value, places)}
        root = jnp.asarray(math.sqrt(shape[-1]), x.dtype)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, new["keys"]) / root
        hidden = jnp.asarray(-1e30, x.dtype)
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, hidden), axis=-1)
        x = x + self.out(jnp.einsum("nhqk,nkhd->nqhd", weights, new["values"]).reshape(n, t, width))
        return x + self.down(jax.nn.gelu(self.up(self.second(x)))), new


class Decoder(nnx.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, width: int, layers: int, length: int, write: str = "scatter", seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(BYTES, width, rngs=rngs)
        self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, width // 32, rngs, write) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, BYTES, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, places: jax.Array, seen: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Scores [n, t, bytes] and the next cache.

        tokens, positions (in the text), places (in the cache): [n, t]. seen: bool [n, t, places of the cache].
        """
        h = self.embed(tokens) + jnp.take(self.places[...], positions, axis=0)
        after: Cache = []
        for block, own in zip(self.blocks, cache, strict=True):
            h, new = block(h, places, seen, own)
            after.append(new)
        return self.head(self.norm(h)), after

    def empty(self, examples: int, places: int) -> Cache:
        """A cache without a token."""
        dtype = self.head.kernel[...].dtype
        heads = self.blocks[0].heads
        shape = examples, places, heads, self.places.shape[1] // heads
        return [{name: jnp.zeros(shape, dtype) for name in ("keys", "values")} for _ in self.blocks]


def in_bfloat16(model: Decoder) -> Decoder:
    """A copy whose parameters are rounded to bfloat16, and which computes in it."""
    definition, state = nnx.split(model)
    return nnx.merge(definition, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))


def sample_call(model: Decoder, tokens: int, places: int, examples: int = 2) -> tuple[Any, ...]:
    """A call with that many tokens and places, for `quantize` and `exact`."""
    own = np.broadcast_to(np.arange(tokens, dtype=np.int32), (examples, tokens))
    seen = np.arange(places)[None, None] <= own[:, :, None]
    return own % BYTES, own, own, seen, model.empty(examples, places)


def recipe(length: int) -> qjax.Recipe:
    """Eight bits everywhere, with a table of the positions."""
    return qjax.Recipe(integers=[qjax.integers("positions", 0, length - 1)])
