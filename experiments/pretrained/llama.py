"""A plain Flax model of the architecture that GGUF files call "llama", and the text that its tokenizer reads."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax

PARTS = {
    "attention/query": "attn_q",
    "attention/key": "attn_k",
    "attention/value": "attn_v",
    "attention/out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "first": "attn_norm",
    "second": "ffn_norm",
}
"""A module of a block -> what the file calls it."""


def names(path: str) -> str:
    """Path of a parameter -> its tensor in the file."""
    module = path.rsplit("/", 1)[0]
    if module in ("embed", "norm"):
        return {"embed": "token_embd.weight", "norm": "output_norm.weight"}[module]
    _, layer, part = module.split("/", 2)
    return f"blk.{layer}.{PARTS[part]}.weight"


def rotate(x: jax.Array, base: float, start: int = 0) -> jax.Array:
    """Turn neighbouring pairs of a head by their position (RoPE, arXiv 2104.09864). x: (batch, time, heads, width)."""
    width = x.shape[-1]
    position = (start + jnp.arange(x.shape[1])).astype(jnp.float32)
    angle = position[:, None] / (base ** (jnp.arange(0, width, 2) / width))[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


class Attention(nnx.Module):
    """Causal attention in which several queries share a key (arXiv 2305.13245).

    before: the keys and values of a first token that every text has, each (1, 1, keys, width); None for none.
    """

    def __init__(self, width: int, heads: int, keys: int, base: float, rngs: nnx.Rngs) -> None:
        self.heads, self.keys, self.base = heads, keys, base
        own = width // heads
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, keys * own, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, keys * own, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.before: Any = nnx.data(None)

    def keys_and_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of x (batch, time, width): (batch, time, keys, width) each."""
        batch, time, _ = x.shape
        key = rotate(self.key(x).reshape(batch, time, self.keys, -1), self.base, self.start)
        return key, self.value(x).reshape(batch, time, self.keys, -1)

    @property
    def start(self) -> int:
        """The position of the first token of x."""
        return 0 if self.before is None else 1

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        query = rotate(self.query(x).reshape(batch, time, self.heads, -1), self.base, self.start)
        key, value = self.keys_and_values(x)
        if self.before is not None:
            key, value = (
                jnp.concatenate([jnp.broadcast_to(first[...], (batch, *first.shape[1:])), rest], axis=1)
                for first, rest in zip(self.before, (key, value), strict=True)
            )
        seen = jnp.arange(key.shape[1])[None] <= self.start + jnp.arange(time)[:, None]
        mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])
        return self.out(mixed.reshape(batch, time, width))


class Block(nnx.Module):
    """Attention, and a feed-forward layer with SwiGLU (arXiv 2002.05202), each behind an RMSNorm."""

    def __init__(self, width: int, hidden: int, heads: int, keys: int, base: float, eps: float, rngs: nnx.Rngs) -> None:
        self.first, self.second = (nnx.RMSNorm(width, epsilon=eps, rngs=rngs) for _ in range(2))
        self.attention = Attention(width, heads, keys, base, rngs)
        self.gate, self.up = (nnx.Linear(width, hidden, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary); the embedding is the head, too."""

    def __init__(self, metadata: Mapping[str, Any], layers: int | None = None) -> None:
        known = {key.removeprefix("llama."): value for key, value in metadata.items()}
        width, base = known["embedding_length"], known["rope.freq_base"]
        heads, keys = known["attention.head_count"], known["attention.head_count_kv"]
        eps, hidden, rngs = known["attention.layer_norm_rms_epsilon"], known["feed_forward_length"], nnx.Rngs(0)
        self.embed = nnx.Embed(known["vocab_size"], width, rngs=rngs)
        count = known["block_count"] if layers is None else layers
        self.blocks = nnx.List([Block(width, hidden, heads, keys, base, eps, rngs) for _ in range(count)])
        self.norm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loaded(file: Any, layers: int | None = None) -> Llama:
    """The model with the numbers of the file; layers: the first of them, None for all."""
    model = Llama(file.metadata, layers)
    kept = file.metadata["llama.block_count"] if layers is None else layers
    unused = [name for name in file.tensors if name.startswith("blk.") and int(name.split(".")[1]) >= kept]
    qjax.gguf.load(model, file, names, unused=unused)
    return model


def with_first_token(model: Llama, token: int) -> Llama:
    """The same model for texts that begin with this token, which its callers leave out.

    The first token of a text has numbers that are thousands of times those of the others. Here only its keys and values
    are left, which are not large, so that no scale has to reach as far (PrefixQuant, arXiv 2410.05265).
    """
    model = nnx.clone(model)
    x = model.embed(jnp.full((1, 1), token))
    for block in model.blocks:
        before = block.attention.keys_and_values(block.first(x))
        x = block(x)
        block.attention.before = nnx.data(tuple(nnx.Variable(part) for part in before))
    return model


def encode(file: Any, text: str) -> np.ndarray:
    """The tokens of a text, int32, by the byte-level BPE of the file."""
    import tokenizers

    known = file.metadata
    if known["tokenizer.ggml.model"] != "gpt2" or known["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"expected the tokenizer of SmolLM, got {known['tokenizer.ggml.pre']!r}")
    vocabulary = {token: index for index, token in enumerate(known["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in known["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, bytes_of])
    return np.asarray(tokenizer.encode(text).ids, np.int32)
