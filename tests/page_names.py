"""What the fragments of the documentation take for granted: a model, data and a recipe, by page."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from flax import nnx

import qjax
from experiments.models import CNN, ResNet
from qjax import targets
from qjax.export import register_backend
from tests import test_cached_decoding as decoding
from tests.contrib import gguf_models
from tests.contrib.float_models.onnx_nets import cnn
from tests.contrib.gguf_models import write_file


class Block(nnx.Module):
    """A residual block with a batch norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mlp = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.relu(self.norm(self.mlp(x)))


class Net(nnx.Module):
    """Two dense layers around two blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(6, 8, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.fc1(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def common(model: nnx.Module, x: jax.Array, **recipe: Any) -> dict[str, Any]:
    """The names that most pages use."""
    made = qjax.Recipe(**recipe)
    qmodel = qjax.quantize(model, made, x)
    qmodel.eval()
    return {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "nnx": nnx,
        "optax": optax,
        "dataclasses": dataclasses,
        "qjax": qjax,
        "model": model,
        "recipe": made,
        "x": x,
        "sample": x,
        "images": x,
        "inputs": x,
        "batches": [x],
        "labels": jnp.arange(len(x)) % 3,
        "qmodel": qmodel,
        "graph": qjax.convert(qmodel, x),
    }


def dense() -> dict[str, Any]:
    return common(Net(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (16, 6)))


def residual() -> dict[str, Any]:
    names = common(ResNet(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8, 8, 1)))
    a, b = (names["graph"].retarget(name) for name in ("tflite_micro", "tflite_xnnpack"))
    return {**names, "a": a, "b": b}


def measured() -> dict[str, Any]:
    def loss(output: jax.Array, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(output, batch[1]).mean()

    def metric(output: jax.Array, batch: Any) -> jax.Array:
        return (output.argmax(-1) == batch[1]).mean()

    return {**dense(), "loss": loss, "metric": metric}


def training() -> dict[str, Any]:
    def loss(qmodel: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(qmodel(x), labels).mean()

    four_bits = qjax.QSpec(bits=4, axis=-1)
    names = common(Net(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (16, 6)), weights=four_bits)
    return {**names, "loss": loss}


def device() -> dict[str, Any]:
    return common(CNN(4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8, 8, 1)))


def backend() -> dict[str, Any]:
    """A device whose kernels are the members' own."""
    from qjax.export import Backend, Fusion, compose, op, tensor

    names = residual()
    whole = op("conv", tensor("x"))
    made = Backend("page_chip", targets.get("single_round"), [Fusion("mac", whole, compose)])
    register_backend(made)
    return {**names, "is_supported": lambda node: True, "device": made}


class Masked(nnx.Module):
    """A decoder that takes a mask of tokens, too."""

    def __init__(self) -> None:
        self.decoder = decoding.Decoder()

    def __call__(self, tokens: Any, positions: Any, cache: Any, mask: Any) -> Any:
        logits, cache = self.decoder(tokens, positions, cache)
        return jnp.where(mask[..., None], logits, 0.0), cache


class Cached(nnx.Module):
    def __init__(self) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
        self.attention.init_cache((2, 5, 8))

    def __call__(self, x: Any) -> Any:
        return self.attention(x)


def decoder() -> dict[str, Any]:
    text, positions = decoding.call(decoding.text(length=4), 0)
    cache = decoding.empty()
    step = {"tokens": text[:, 1:2], "positions": positions[:, 1:2], "cache": cache, "mask": jnp.ones((2, 1), bool)}
    whole = {"text": text, "positions_of_text": positions, "empty_cache": cache, "mask_of_text": jnp.ones((2, 4), bool)}
    net = Cached()
    x = jax.random.normal(jax.random.key(0), (2, 1, 8))
    names = {"qjax": qjax, "nnx": nnx, "model": Masked(), "batches": [tuple(step.values())], "net": net, "x": x}
    loop = {"jax": jax, "jnp": jnp, "lax": jax.lax, "first": step["tokens"], "mask_of": lambda place: step["mask"]}
    drawn = {"k": 2, "temperature": 0.7, "noise": jax.random.gumbel(jax.random.key(1), (2, 1, 2))}
    return {**names, **step, **whole, **loop, **drawn}


def sampler() -> dict[str, Any]:
    """Whole texts, as long as their cache, and one token of each."""
    texts, positions = decoding.call(decoding.text(length=decoding.SIZE), 0)
    recipe = qjax.Recipe(integers=[qjax.integers("positions", 0, decoding.SIZE)])
    names = {"jax": jax, "jnp": jnp, "nnx": nnx, "qjax": qjax, "model": decoding.Decoder(), "recipe": recipe}
    empty = decoding.empty()
    calls = {"texts": texts, "positions": positions, "tokens": texts[:, :1], "starts": positions[:, :1]}
    return {**names, **calls, "empty": empty, "batches": [(texts, positions, empty)]}


def gguf_file() -> dict[str, Any]:
    """A file of a small model, in the folder of the page."""
    write_file(Path("model.gguf"))
    return {"qjax": qjax, "model": gguf_models.Net(), "tokens": gguf_models.TOKENS}


def float_file() -> dict[str, Any]:
    """A file of a small network, in the folder of the page."""
    onnx.save(cnn(), "model.onnx")
    return {"qjax": qjax, "x": np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)}


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/accuracy.md": dense,
    "docs/backends.md": backend,
    "docs/compare.md": residual,
    "docs/dynamic.md": dense,
    "docs/float-models.md": float_file,
    "docs/gguf.md": gguf_file,
    "docs/integers.md": lambda: {"qjax": qjax},
    "docs/language-models.md": decoder,
    "docs/own-training.md": dense,
    "docs/precision.md": measured,
    "docs/profiles.md": device,
    "docs/sampler-trainer.md": sampler,
    "docs/targets.md": residual,
    "docs/training.md": training,
}
"""Page -> what makes the names that its blocks use and do not define."""
