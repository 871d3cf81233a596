"""The decoder of `experiments.language` with a key-value cache as an argument and a result."""

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

PLACES = qjax.integers("positions", 0, 4096)
NAMES = "input/2/.*"
RECIPES = {
    "W8A8, float cache": qjax.Recipe(
        overrides={"attention": qjax.FLOAT, "model/blocks/.*/(key|value)": qjax.FLOAT}, integers=[PLACES]
    ),
    "W8A8, int8 cache": qjax.Recipe(integers=[PLACES]),
    "W8A8, int4 cache": qjax.Recipe(
        overrides={NAMES: qjax.Override(activations=qjax.QSpec(bits=4, symmetric=False))}, integers=[PLACES]
    ),
}
"""Setting -> recipe. With a float cache all that writes or reads it is float."""


class Attention(nnx.Module):
    """The products with keys and values: a module, so that a recipe can name it."""

    def __call__(self, query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, keys) / np.float32(math.sqrt(query.shape[-1]))
        seen = jnp.arange(keys.shape[1])[None, None, None] <= positions[:, None, :, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, np.float32(-1e30)), axis=-1)
        return jnp.einsum("nhqk,nkhd->nqhd", weights, values)


class Cached(nnx.Module):
    """A decoder of `experiments.language`, whose parameters it shares."""

    def __init__(self, model: Any) -> None:
        self.model, self.attention = model, Attention()

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        model = self.model
        h = model.embed(tokens) + jnp.take(model.places[...], positions, axis=0)
        after: Cache = []
        for block, own in zip(model.blocks, cache, strict=True):
            h, new = self._block(block, h, positions, own)
            after.append(new)
        return model.head(model.norm(h)), after

    def _block(
        self, block: Any, x: jax.Array, positions: jax.Array, cache: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        h = block.first(x)
        n, t, width = h.shape
        query, key, value = (
            layer(h).reshape(n, t, block.heads, width // block.heads) for layer in (block.query, block.key, block.value)
        )
        start = (0, positions[0, 0], 0, 0)
        new = {name: lax.dynamic_update_slice(cache[name], y, start) for name, y in (("keys", key), ("values", value))}
        x = x + block.out(self.attention(query, new["keys"], new["values"], positions).reshape(n, t, width))
        return x + block.down(jax.nn.gelu(block.up(block.second(x)))), new


def arguments(model: Cached, tokens: Any) -> tuple[Any, Any, Cache]:
    """A text from its beginning and an empty cache, which has a place more than the longest text."""
    (n, t), blocks, (places, width) = tokens.shape, model.model.blocks, model.model.places.shape
    shape = n, places + 1, blocks[0].heads, width // blocks[0].heads
    cache = [{name: np.zeros(shape, np.float32) for name in ("keys", "values")} for _ in blocks]
    return tokens, np.broadcast_to(np.arange(t, dtype=np.int32), (n, t)), cache


def stepwise(graph: qjax.IntegerGraph, tokens: np.ndarray) -> np.ndarray:
    """The scores of a text, token by token: [examples, tokens, scores]."""

    def step(state: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        token, place = given
        scores, state = graph.step(state, token[:, None], jnp.full_like(token[:, None], place))
        return state, scores[:, 0]

    n, t = tokens.shape
    places = jnp.arange(t, dtype=jnp.int32)
    run = jax.jit(lambda state, columns: lax.scan(step, state, (columns, places))[1])
    return np.asarray(run(graph.state(batch=n), tokens.T)).swapaxes(0, 1)
