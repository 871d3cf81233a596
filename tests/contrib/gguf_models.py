"""A small language model and its GGUF file, with a tensor of each block format."""

from pathlib import Path

import gguf
import jax
import numpy as np
from flax import nnx
from gguf import quants

from qjax.contrib.gguf.blocks import pack, unpack
from tests.numerics.test_k_formats import random_bytes

WIDTH, HIDDEN, VOCABULARY = 64, 96, 32
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) % VOCABULARY
TYPES = {"up": "Q4_0", "gate": "Q4_1", "down": "Q5_1", "query": "Q5_0", "embed": "Q8_0"}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = nnx.LinearGeneral(WIDTH, (4, 16), use_bias=False, rngs=rngs)
        self.up, self.gate = (nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        y = y + self.query(y).reshape(y.shape)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Wide(nnx.Module):
    """A product and a tied embedding whose rows are whole blocks of 256."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, 256, rngs=rngs)
        self.up = nnx.Linear(256, 512, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(512, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.embed.attend(x + self.down(nnx.relu(self.up(x))))


WIDE = {"embed/embedding": "token_embd.weight", "up/kernel": "up.weight", "down/kernel": "down.weight"}


def write_wide_file(path: Path, embed: str, up: str, down: str) -> None:
    """Write a file with tensors of these K formats, whose blocks are random."""
    writer = gguf.GGUFWriter(path, "llama")
    shapes = {"token_embd": (embed, VOCABULARY, 256), "up": (up, 512, 256), "down": (down, 256, 512)}
    for seed, (name, (format, rows, columns)) in enumerate(shapes.items()):
        data = random_bytes(format, rows * columns // 512, seed).reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[format.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def names(path: str) -> str:
    if path == "embed/embedding":
        return "token_embd.weight"
    _, layer, part, _ = path.split("/")
    return f"blk.{layer}.{part}.weight"


def shape_of(part: str) -> tuple[int, ...]:
    return {"up": (HIDDEN, WIDTH), "gate": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "query": (WIDTH, WIDTH)}[part]


def write_file(path: Path) -> None:
    """Write the file; the codes of "up" are not those that its own quantizer would choose."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])

    def add(name: str, w: np.ndarray, kind: str) -> None:
        kind_of = gguf.GGMLQuantizationType[kind]
        data = quants.quantize(w.astype(np.float32), kind_of)
        if kind == "Q4_0":  # a search for better scales ends with other codes, too
            codes, scales = unpack(data, "q4_0")
            data = pack((np.maximum(codes, -7), scales), "q4_0")
        writer.add_tensor(name, data, raw_dtype=kind_of)

    add("token_embd.weight", rng.normal(size=(VOCABULARY, WIDTH)), "Q8_0")
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.norm.weight", rng.normal(size=WIDTH).astype(np.float32))
        for part in ("up", "gate", "down", "query"):
            add(f"blk.{layer}.{part}.weight", rng.normal(size=shape_of(part)) / 8, TYPES[part])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
