"""How texts lie in the batches of a sampler and of a trainer, and their log-probabilities there.

A trainer reads whole texts: alone, padded, or several in a row. A sampler reads one token of each slot of its batch per
step; a schedule says which text each slot holds in each step. Slots are refilled while others go on, and a slot
continues in its cache where the text before it has ended, modulo the length of the cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import qjax

Read = Callable[..., tuple[jax.Array, Any]]
"""(tokens, positions, places, seen, cache) -> (scores, the next cache), as `decoder.Decoder`."""
Score = Callable[[jax.Array, jax.Array], jax.Array]
"""(scores [..., bytes], tokens) -> log-probabilities."""


def float_score(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """JAX's own log-softmax, as trainers and samplers compute it."""
    logs = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class Texts:
    """tokens: int32 [texts, length]. lengths: of each text; what follows in its row is no part of it."""

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def scored(self) -> np.ndarray:
        """bool [texts, length - 1]: the places whose next token belongs to the text."""
        return np.arange(self.tokens.shape[1] - 1)[None] < self.lengths[:, None] - 1

    def part(self, first: int, last: int) -> "Texts":
        return Texts(self.tokens[first:last], self.lengths[first:last])


# ---------------------------------------------------------------------------- the trainer


@dataclasses.dataclass(frozen=True)
class Layout:
    """A batch of rows. owner: the text of each place, or -1; positions: in that text. All arrays are [rows, width]."""

    tokens: np.ndarray
    owner: np.ndarray
    positions: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """bool [rows, width, width]: a token sees itself and what comes before it in its text."""
        own = (self.owner[:, :, None] == self.owner[:, None]) & (self.owner[:, :, None] >= 0)
        earlier = np.tri(self.owner.shape[1], dtype=bool)
        return (own & earlier) | np.eye(self.owner.shape[1], dtype=bool)


def laid_out(texts: Texts, width: int, per_row: int = 1, shift: int = 0) -> Layout:
    """Texts in rows of some width, several in a row behind each other; shift: places before the first one."""
    count = -(-len(texts.tokens) // per_row)
    tokens, positions = np.zeros((count, width), np.int32), np.zeros((count, width), np.int32)
    owner = np.full((count, width), -1, np.int32)
    for number, (own, length) in enumerate(zip(texts.tokens, texts.lengths, strict=True)):
        row, turn = divmod(number, per_row)
        first = shift if turn == 0 else int((owner[row] >= 0).sum()) + shift
        here = slice(first, first + length)
        tokens[row, here], owner[row, here], positions[row, here] = own[:length], number, np.arange(length)
    return Layout(tokens, owner, positions)


def whole(
    read: Read,
    score: Score,
    empty: Callable[[int, int], Any],
    tokens: Any,
    positions: Any,
    seen: Any,
    following: Any,
) -> jax.Array:
    """The log-probabilities of the following tokens, [rows, width], from one call with an empty cache."""
    n, width = tokens.shape
    places = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (n, width))
    scores, _ = read(tokens, positions, places, seen, empty(n, width))
    return score(scores, following)


def scored(
    compute: Callable[..., jax.Array], texts: Texts, layout: Layout, batch: int, place: Any = None
) -> np.ndarray:
    """The log-probabilities of the texts, [texts, length - 1], from batches of rows. place: puts arrays on devices."""
    length = texts.tokens.shape[1]
    found = np.full((len(texts.tokens), length - 1), np.nan, np.float32)
    for first in range(0, len(layout.tokens), batch):
        rows = slice(first, first + batch)
        tokens, owner, positions = layout.tokens[rows], layout.owner[rows], layout.positions[rows]
        following = np.concatenate([tokens[:, 1:], np.zeros((len(tokens), 1), np.int32)], axis=1)
        given = tokens, positions, Layout(tokens, owner, positions).seen, following
        logs = np.asarray(compute(*(given if place is None else map(place, given))))
        inside = owner >= 0
        own, at = owner[inside], positions[inside]
        last = at + 1 < texts.lengths[own]
        found[own[last], at[last]] = logs[inside][last]
    return found


# ---------------------------------------------------------------------------- the sampler


@dataclasses.dataclass(frozen=True)
class Schedule:
    """text, index: int32 [steps, slots], the text that a slot reads in a step (or one beyond the last), and where."""

    text: np.ndarray
    index: np.ndarray


def schedule(texts: Texts, slots: int, delay: int = 0) -> Schedule:
    """Every slot takes the next text as soon as its own has ended; slot s begins `delay * s` steps late."""
    count = len(texts.tokens)
    at: list[list[tuple[int, int]]] = [[(count, 0)] * (delay * slot) for slot in range(slots)]
    for number, length in enumerate(texts.lengths):
        slot = min(at, key=len)
        slot += [(number, index) for index in range(length - 1)]
    steps = max(map(len, at))
    full = np.asarray([slot + [(count, 0)] * (steps - len(slot)) for slot in at], np.int32)
    return Schedule(full[:, :, 0].T, full[:, :, 1].T)


@functools.partial(jax.jit, static_argnames=("read", "score", "places", "draw"))
def sampled(
    model: Any,
    cache: Any,
    tokens: jax.Array,
    prompts: jax.Array,
    text: jax.Array,
    index: jax.Array,
    key: jax.Array,
    *,
    read: Callable[..., tuple[jax.Array, Any]],
    score: Score,
    places: int,
    draw: bool,
) -> tuple[jax.Array, jax.Array]:
    """The tokens and their log-probabilities, [texts, length] and [texts, length - 1], step by step.

    model: the first argument of `read`. tokens: of all texts. prompts: how many tokens of each are given; the others
    are drawn if `draw`. text, index: a schedule. places: of the cache.
    """
    count, length = tokens.shape

    def step(carry: Any, given: Any) -> Any:
        cache, tokens, logs, place = carry
        text, index = given
        own = jnp.minimum(text, count - 1)
        current = tokens[own, index][:, None]
        ago = (place[:, None] - jnp.arange(places, dtype=jnp.int32)[None]) % places
        scores, cache = read(
            model, current, index[:, None], place[:, None] % places, (ago <= index[:, None])[:, None], cache
        )
        following = tokens[own, index + 1]
        if draw:
            keys = jax.vmap(lambda t, i: jax.random.fold_in(jax.random.fold_in(key, t), i))(text, index)
            drawn = qjax.sample(scores[:, 0], keys)
            following = jnp.where(index + 1 < prompts[own], following, drawn)
            tokens = tokens.at[text, index + 1].set(following, mode="drop")
        logs = logs.at[text, index].set(score(scores[:, 0], following), mode="drop")
        return (cache, tokens, logs, (place + 1) % places), None

    logs = jnp.full((count, length - 1), jnp.nan, jnp.float32)
    start = jnp.zeros(text.shape[1], jnp.int32)
    (_, tokens, logs, _), _ = lax.scan(step, (cache, tokens, logs, start), (text, index))
    return tokens, logs
