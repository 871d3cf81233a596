"""The language models of google-tunix in little: `pip install --no-deps google-tunix jaxtyping wadler-lindig einops`.

Every model is called with tokens, positions and a causal mask, as tunix's trainers and samplers call it: on a whole
text ("prefill"), and on one token with a cache of the tokens before it ("step").
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.public.models import Public, Source, integers, normal, positions

N, LENGTH, CACHED, VOCABULARY = 3, 6, 8, 40
_SIZES = {"num_layers": 2, "embed_dim": 16, "hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
_ROPE = {"rope_theta": 10_000, "norm_eps": 1e-6, "vocab_size": VOCABULARY}


def _package(name: str) -> None:
    """A package whose `__init__` is not run: those of tunix import its trainers, and with them much else."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"no {name}: pip install --no-deps google-tunix jaxtyping wadler-lindig einops")
    bare = ModuleType(name)
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = bare


def _module(name: str) -> Any:
    for package in ("tunix", "tunix.generate", "tunix.models", f"tunix.models.{name}"):
        _package(package)
    return importlib.import_module(f"tunix.models.{name}.model")


def _weighted(model: nnx.Module) -> nnx.Module:
    """The model with random numbers in the place of matrices that begin as zeros."""
    for index, (_, param) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        value = param[...]
        if value.ndim > 1 and not bool(jnp.any(value)):
            param[...] = (normal(*value.shape, seed=index) / value.shape[0] ** 0.5).astype(value.dtype)
    return model


def _llama3() -> nnx.Module:
    module = _module("llama3")
    return module.Llama3(module.ModelConfig(**_SIZES, **_ROPE, weight_tying=True), rngs=nnx.Rngs(0))


def _qwen2() -> nnx.Module:
    module = _module("qwen2")
    return module.Qwen2(module.ModelConfig(**_SIZES, **_ROPE), rngs=nnx.Rngs(0))


def _qwen3(**options: Any) -> nnx.Module:
    module = _module("qwen3")
    return module.Qwen3(module.ModelConfig(**_SIZES, **_ROPE, use_tied_embedding=True, **options), rngs=nnx.Rngs(0))


def _gemma() -> nnx.Module:
    module = _module("gemma")
    kinds = (module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL)
    config = module.ModelConfig(
        **_SIZES,
        num_embed=VOCABULARY,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=kinds,
        sliding_window_size=4,
    )
    return module.Gemma(config, rngs=nnx.Rngs(0))


def _gemma3() -> nnx.Module:
    module = _module("gemma3")
    config = module.ModelConfig(**_SIZES, num_embed=VOCABULARY, sliding_window_size=4, param_dtype=jnp.float32)
    return module.Gemma3(config, rngs=nnx.Rngs(0))


def _gemma4() -> nnx.Module:
    module = _module("gemma4")
    config = module.ModelConfig(**_SIZES, num_embed=VOCABULARY, sliding_window_size=4, global_key_size=8)
    return module.Gemma4(config, rngs=nnx.Rngs(0))


def _causal(length: int, of: int) -> jax.Array:
    """The last `length` tokens of `of`, each of which sees those up to itself."""
    mask = jnp.arange(of) <= jnp.arange(of - length, of)[:, None]
    return jnp.broadcast_to(mask, (N, length, of))


def _prefill(model: nnx.Module) -> Public:
    tokens = integers(N, LENGTH, below=VOCABULARY)
    return Public(_weighted(model), None, (tokens, positions(N, LENGTH), None, _causal(LENGTH, LENGTH)))


def _step(model: nnx.Module) -> Public:
    """One token behind `CACHED - 2` others: what a sampler computes over and over. The model itself fills the cache."""
    done, net = CACHED - 2, _weighted(model)
    net.eval()
    text = integers(N, done, below=VOCABULARY, seed=1)
    mask = jnp.broadcast_to(jnp.arange(CACHED) <= jnp.arange(done)[:, None], (N, done, CACHED))
    call: Any = net
    _, cache = call(text, positions(N, done), empty_cache(net, N, CACHED), mask)
    mask = jnp.broadcast_to(jnp.arange(CACHED) <= done, (N, 1, CACHED))
    tokens = integers(N, 1, below=VOCABULARY)
    return Public(net, None, (tokens, jnp.full((N, 1), done, jnp.int32), cache, mask))


_MODELS = {
    "Llama 3": _llama3,
    "Qwen 2": _qwen2,
    "Qwen 3": _qwen3,
    "Qwen 3, bfloat16": lambda: _qwen3(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16),
    "Qwen 3, experts": lambda: _qwen3(num_experts=4, num_experts_per_tok=2),
    "Gemma": _gemma,
    "Gemma 3": _gemma3,
    "Gemma 4": _gemma4,
}


def built(name: str) -> nnx.Module:
    """One of the models, with random weights."""
    return _weighted(_MODELS[name]())


def empty_cache(model: nnx.Module, n: int, length: int) -> dict[str, Any]:
    """A cache of zeros for `n` texts of at most `length` tokens, in the dtype of the weights.

    Gemma 4 says itself how much its layers with a sliding window keep.
    """
    dtype = jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype
    shape = (n, length, _SIZES["num_kv_heads"], _SIZES["head_dim"])
    layer = {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype), "end_index": jnp.zeros((n,), jnp.int32)}
    layers: Any = getattr(model, "layers", None)
    own = [getattr(getattr(each, "attn", None), "init_cache", None) for each in layers]
    made = [dict(layer) if make is None else make(n, length, dtype) for make in own]
    return {f"layer_{i}": jax.tree.map(jnp.asarray, cache) for i, cache in enumerate(made)}


def source() -> Source:
    """All of them.

    Raises:
      ModuleNotFoundError: tunix is not installed.
    """
    _module("llama3")
    found: Source = {}
    for name, build in _MODELS.items():
        found[f"tunix {name}, prefill"] = lambda build=build: _prefill(build())
        found[f"tunix {name}, step"] = lambda build=build: _step(build())
    return found
