"""Whole texts and single tokens of the language models of google-tunix: `python -m experiments.public.decoding`.

Each model is converted twice with its cache as the graph's state: for a text of several tokens, and for one token. The
text at once and the same text token by token must give the same codes: of the logits and of the whole cache. A text
that the one-token graph writes greedily is written again inside one compiled `lax.scan`.
"""

import argparse
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import qjax
from experiments.public import tunix
from experiments.public.models import integers

N, LENGTH, CACHED, VOCABULARY = 2, 6, 8, 40
MODELS = ("Llama 3", "Qwen 2", "Qwen 3", "Gemma", "Gemma 3", "Gemma 4")


@dataclasses.dataclass
class Decoded:
    """One row: nodes of both graphs, codes that were compared, those that differ, and tokens written differently."""

    model: str
    bits: int
    text_nodes: int
    token_nodes: int
    compared: int
    differ: int
    tokens: int
    tokens_differ: int


def call(tokens: jax.Array, start: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, positions and the causal mask over the cache, of a text that begins at `start`."""
    n, length = tokens.shape
    at = start + jnp.arange(length, dtype=jnp.int32)
    mask = jnp.arange(CACHED) <= at[:, None]
    return tokens, jnp.broadcast_to(at, (n, length)), jnp.broadcast_to(mask, (n, length, CACHED))


def with_cache(tokens: jax.Array, start: Any, cache: Any) -> tuple[Any, ...]:
    """The arguments of a call as the models take them."""
    text, at, mask = call(tokens, start)
    return text, at, cache, mask


def decode(name: str, bits: int, target: str) -> Decoded:
    """Everything about one model."""
    model = tunix.built(name)
    model.eval()
    empty = tunix.empty_cache(model, N, CACHED)
    text = integers(N, LENGTH, below=VOCABULARY)
    sample = with_cache(text, 0, empty)
    cache = qjax.Override(activations=qjax.QSpec(bits=bits, symmetric=False))
    recipe = qjax.Recipe(
        target=target, overrides={"input/2/.*": cache}, integers=[qjax.integers("positions", 0, CACHED)]
    )
    qmodel = qjax.quantize(model, recipe, sample)
    texts = [integers(4, LENGTH, below=VOCABULARY, seed=seed) for seed in range(3)]
    qjax.calibrate(qmodel, [with_cache(t, 0, tunix.empty_cache(model, 4, CACHED)) for t in texts])
    qmodel.eval()
    whole = qjax.convert(qmodel, sample, state="cache")
    one = qjax.convert(qmodel, with_cache(text[:, :1], 0, empty), state="cache")

    logits, after = whole.step(whole.state(batch=N), *call(text, 0))
    state, pairs = one.state(batch=N), []
    for place in range(LENGTH):
        found, state = one.step(state, *call(text[:, place : place + 1], place))
        pairs.append((found[:, 0], logits[:, place]))
    pairs += zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
    differ = sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in pairs)
    tokens, wrong = _written(one, text[:, :1])
    sizes = sum(np.size(a) for a, _ in pairs)
    return Decoded(name, bits, len(whole.ir.nodes), len(one.ir.nodes), sizes, differ, tokens, wrong)


def _written(one: qjax.IntegerGraph, first: jax.Array) -> tuple[int, int]:
    """A text written greedily until the cache is full, call by call and in one scan: tokens, and those that differ."""

    def step(carry: Any, place: jax.Array) -> Any:
        tokens, state = carry
        logits, state = one.step(state, *call(tokens, place))
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (tokens, state), tokens

    carry, rows = (first, one.state(batch=N)), []
    for place in range(CACHED):
        carry, tokens = step(carry, jnp.asarray(place, jnp.int32))
        rows.append(np.asarray(tokens))
    _, found = jax.jit(lambda: lax.scan(step, (first, one.state(batch=N)), jnp.arange(CACHED, dtype=jnp.int32)))()
    return np.size(found), int(np.sum(np.asarray(found) != np.stack(rows)))


def main(argv: list[str] | None = None) -> list[Decoded]:
    parser = argparse.ArgumentParser(prog="python -m experiments.public.decoding", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 4], help="of the cache")
    parser.add_argument("--target", default="nearest_even")
    args = parser.parse_args(argv)
    fields = [field.name for field in dataclasses.fields(Decoded)]
    print("| " + " | ".join(fields).replace("_", " ") + " |\n|" + " --- |" * len(fields), flush=True)
    rows: list[Decoded] = []
    for name in args.only:
        for bits in args.bits:
            rows.append(decode(name, bits, args.target))
            print("| " + " | ".join(str(value) for value in dataclasses.astuple(rows[-1])) + " |", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(int(any(row.differ or row.tokens_differ for row in main())))
