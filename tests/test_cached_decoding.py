"""A decoder with a cache of keys and values: prefill and single steps are the same integers, and so is generation."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax

N, SIZE, WIDTH, TOKENS = 2, 7, 8, 12
LENGTH = SIZE - 1


class Decoder(nnx.Module):
    """One layer with rotary positions; its cache is an argument and a result."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def rotate(self, x, positions):
        angles = positions[..., None].astype(jnp.float32) / jnp.asarray([1.0, 10.0, 100.0, 1000.0])[None, None]
        a, b = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def __call__(self, tokens, positions, cache):
        x = self.embed(tokens)
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        start = positions[0, 0]
        keys = lax.dynamic_update_slice(cache["keys"], self.rotate(k, positions), (0, start, 0))
        values = lax.dynamic_update_slice(cache["values"], v, (0, start, 0))
        scores = jnp.einsum("btd,bsd->bts", self.rotate(q, positions), keys) / np.float32(WIDTH**0.5)
        seen = jnp.arange(SIZE)[None, None] <= positions[..., None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        x = x + self.out(weights @ values)
        return self.embed.attend(x), {"keys": keys, "values": values}


def empty(n=N):
    return {name: jnp.zeros((n, SIZE, WIDTH)) for name in ("keys", "values")}


def call(tokens, start):
    n, length = tokens.shape
    return tokens, jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (n, length))


def text(n=N, length=LENGTH, seed=0):
    return jax.random.randint(jax.random.key(seed), (n, length), 0, TOKENS, jnp.int32)


@functools.cache
def converted():
    """The graphs of a whole text and of one token, of the same quantized model."""
    sample = (*call(text(), 0), empty())
    recipe = qjax.Recipe(integers=[qjax.integers("positions", 0, SIZE)])
    qmodel = qjax.quantize(Decoder(), recipe, sample)
    qjax.calibrate(qmodel, [(*call(text(8, seed=seed), 0), empty(8)) for seed in range(3)])
    qmodel.eval()
    one = (*call(text(length=1), 2), empty())
    return qmodel, qjax.convert(qmodel, sample, state="cache"), qjax.convert(qmodel, one, state=("cache", 1))


@pytest.mark.slow
def test_prefill_and_single_steps_give_the_same_codes():
    _, whole, one = converted()
    tokens = text(5, seed=7)
    logits, cache = whole(*call(tokens, 0), empty(5))
    state = empty(5)
    for place in range(LENGTH):
        found, state = one(*call(tokens[:, place : place + 1], place), state)
        np.testing.assert_array_equal(found[:, 0], logits[:, place])
    for name in cache:
        np.testing.assert_array_equal(state[name], cache[name])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_generation_is_the_exact_forward():
    """Greedy, token by token: the graph beside `exact`, whose cache goes through floats too."""
    qmodel, _, one = converted()
    sample = (*call(text(length=1), 2), empty())
    forward = nnx.jit(qjax.exact(qmodel, sample))
    sides = {"graph": one, "exact": functools.partial(forward, qmodel)}
    written = {}
    for name, step in sides.items():
        tokens, state, row = text(3, 1, seed=9), empty(3), []
        for place in range(SIZE):
            logits, state = step(*call(tokens, place), state)
            tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            row.append(np.asarray(tokens))
        written[name] = np.concatenate(row, axis=1)
    np.testing.assert_array_equal(written["graph"], written["exact"])
    assert len(np.unique(written["graph"])) > 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_drawing_from_the_most_likely_tokens_is_one_loop():
    """With given noise, call by call and inside one compiled scan."""
    _, _, one = converted()
    noise = jax.random.gumbel(jax.random.key(3), (SIZE, 3, 1, 4))

    def step(carry, given):
        place, noise = given
        tokens, state = carry
        logits, state = one.step(state, tokens, jnp.full_like(tokens, place))
        best, indices = lax.top_k(logits, 4)
        chosen = jnp.argmax(best + noise, axis=-1)[..., None]
        tokens = jnp.take_along_axis(indices, chosen, axis=-1)[..., 0]
        return (tokens, state), tokens

    first, places = (text(3, 1, seed=9), one.state(batch=3)), jnp.arange(SIZE, dtype=jnp.int32)
    (_, state), written = jax.jit(lambda: lax.scan(step, first, (places, noise)))()
    carry = first
    for place in range(SIZE):
        carry, tokens = step(carry, (places[place], noise[place]))
        np.testing.assert_array_equal(tokens, written[place])
    jax.tree.map(np.testing.assert_array_equal, carry[1], state)
    assert len(np.unique(written)) > 2


def test_positions_beyond_the_cache_are_refused():
    _, _, one = converted()
    with pytest.raises(ValueError, match=f"expected integers from 0 to {SIZE - 1}, got {SIZE} to {SIZE}"):
        one(*call(text(length=1), SIZE), empty())
