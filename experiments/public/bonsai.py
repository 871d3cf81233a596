"""Models of jax-ml/bonsai in little, from a checkout of github.com/jax-ml/bonsai: `--bonsai FOLDER`.

They are called with their own arguments. Qwen 3 keeps its cache in modules that its caller passes in. Here the arrays
of these modules are an argument and a result.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.public.models import Public, Source, integers, normal

N, LENGTH, CACHED, VOCABULARY = 3, 6, 8, 40


def _module(folder: Path, name: str) -> Any:
    if not (folder / "bonsai" / "models" / name).exists():
        raise FileNotFoundError(f"no {folder}/bonsai/models/{name}: --bonsai takes a checkout of jax-ml/bonsai")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"bonsai.models.{name}.modeling")
    finally:
        sys.path.remove(str(folder))


class WithCache(nnx.Module):
    """Qwen 3 with the arrays of its caches as an argument and a result."""

    def __init__(self, module: Any, config: Any) -> None:
        self.module, self.config = module, config
        self.net = module.Qwen3(config, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array, state: Any, segments: jax.Array) -> tuple[jax.Array, Any]:
        layers = range(self.config.num_layers)
        cache = [self.module.LayerCache(self.config, tokens.shape[0], CACHED, jnp.float32) for _ in layers]
        for held, values in zip(cache, state, strict=True):
            for name, value in values.items():
                getattr(held, name).set_value(value)
        logits = self.net(tokens, cache=cache, segment_ids=segments)
        return logits, [{name: getattr(held, name)[...] for name in _PARTS} for held in cache]


_PARTS = ("k_cache", "v_cache", "start_ind", "cur_ind")


def _qwen3(folder: Path, length: int, done: int) -> Public:
    module = _module(folder, "qwen3")
    config = module.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        emb_dim=16,
        mlp_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        rope_scaling_factor=1,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    shape = (N, CACHED, 2, 8)
    state = [
        {
            "k_cache": normal(*shape, seed=layer) if done else jnp.zeros(shape),
            "v_cache": normal(*shape, seed=layer + 5) if done else jnp.zeros(shape),
            "start_ind": jnp.full((N,), 0 if done else -1, jnp.int32),
            "cur_ind": jnp.asarray(done, jnp.int32),
        }
        for layer in range(2)
    ]
    tokens = integers(N, length, below=VOCABULARY)
    return Public(WithCache(module, config), None, (tokens, state, jnp.ones((N, length), jnp.int32)))


def _mamba2(folder: Path, cached: bool) -> Public:
    module = _module(folder, "mamba2")
    config = module.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=8, head_dim=8, chunk_size=4, num_hidden_layers=2
    )
    net = module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    if not cached:
        return Public(net, None, (integers(N, LENGTH, below=VOCABULARY),))
    cache = module.create_empty_cache(config, N)
    leaves, tree = jax.tree.flatten(cache)
    filled = [normal(*leaf.shape, seed=seed) / 4 for seed, leaf in enumerate(leaves)]
    return Public(net, None, (integers(N, 1, below=VOCABULARY), None, jax.tree.unflatten(tree, filled)))


def _unet(folder: Path) -> Public:
    module = _module(folder, "unet")
    net = module.UNet(module.ModelConfig(features=(2, 4, 8, 16, 32)), rngs=nnx.Rngs(0))
    return Public(net, None, (normal(N, 32, 32, 1),))


def _whisper(folder: Path) -> Public:
    module = _module(folder, "whisper")
    sizes = {
        "d_model": 16,
        "num_mel_bins": 8,
        "max_source_positions": 6,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "dropout": 0.0,
    }
    known = {field.name: sizes.get(field.name) for field in dataclasses.fields(module.ModelConfig)}
    return Public(module.WhisperEncoder(module.ModelConfig(**known), rngs=nnx.Rngs(0)), None, (normal(N, 12, 8),))


_MODELS: dict[str, Callable[[Path], Public]] = {
    "Qwen 3, text": lambda folder: _qwen3(folder, LENGTH, 0),
    "Qwen 3, step": lambda folder: _qwen3(folder, 1, CACHED - 2),
    "Mamba 2, text": lambda folder: _mamba2(folder, cached=False),
    "Mamba 2, step": lambda folder: _mamba2(folder, cached=True),
    "U-Net": _unet,
    "Whisper, encoder": _whisper,
}


def source(folder: Path) -> Source:
    """All of them."""
    return {f"bonsai {name}": (lambda build=build: build(folder)) for name, build in _MODELS.items()}
