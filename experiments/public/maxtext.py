"""The language models of MaxText in little: `pip install maxtext`.

Every model is MaxText's own `Transformer`, made from the configuration that MaxText ships for it, with sizes that fit
on a laptop. It is called on a whole text, with the places and the segments of the words, on a mesh of one device.
"""

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.public.models import Public, Source, integers

N, LENGTH, VOCABULARY = 3, 16, 60
_SMALL: dict[str, Any] = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "base_moe_mlp_dim": 32,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": LENGTH,
    "max_prefill_predict_length": LENGTH // 2,
    "per_device_batch_size": N,
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    # experts as products over all of them; "sorted" below sorts the words by expert, as MaxText does by default
    "megablox": False,
    "sparse_matmul": False,
    "enable_dropout": False,
    "enable_checkpointing": False,
    "override_model_config": True,
    "log_config": False,
    "skip_jax_distributed_system": True,
    "run_name": "small",
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SORTED = {"sparse_matmul": True}
_LATENT = {
    **_EXPERTS,
    "base_num_kv_heads": 4,
    "first_num_dense_layers": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama2-7b", {}),
    "Llama 3": ("llama3-8b", {}),
    "Llama 4": ("llama4-17b-16e", {"num_experts": 4, "base_num_decoder_layers": 4}),
    "Mistral": ("mistral-7b", {}),
    "Mixtral": ("mixtral-8x7b", {"num_experts": 4, "base_moe_mlp_dim": 64}),
    "Mixtral, sorted": ("mixtral-8x7b", {"num_experts": 4, "base_moe_mlp_dim": 64, **_SORTED}),
    "Gemma": ("gemma-2b", {"base_num_kv_heads": 1}),
    "Gemma 2": ("gemma2-2b", {}),
    "Gemma 3": ("gemma3-4b", {"base_num_decoder_layers": 6}),
    "Gemma 4, experts": ("gemma4-26b", {**_EXPERTS, "base_num_decoder_layers": 6}),
    "Qwen 2.5": ("qwen2.5-1.5b", {}),
    "Qwen 3": ("qwen3-0.6b", {}),
    "Qwen 3, experts": ("qwen3-30b-a3b", _EXPERTS),
    "GPT-3": ("gpt3-52k", {"base_num_kv_heads": 4}),
    "gpt-oss": ("gpt-oss-20b", _EXPERTS),
    "gpt-oss, sorted": ("gpt-oss-20b", {**_EXPERTS, **_SORTED}),
    "DeepSeek V2": ("deepseek2-16b", {**_LATENT, "shared_experts": 1}),
    "DeepSeek V3": ("deepseek3-tiny", {**_LATENT, "q_lora_rank": 8, "n_routing_groups": -1}),
    "DeepSeek V3, sorted": ("deepseek3-tiny", {**_LATENT, "q_lora_rank": 8, "n_routing_groups": -1, **_SORTED}),
    "Olmo 3": ("olmo3-7b", {"base_num_kv_heads": 4, "base_num_decoder_layers": 4}),
    "Envy": ("envy-test", {}),
    "Qwen 3 Next": (
        "qwen3-next-80b-a3b",
        {
            **_EXPERTS,
            "base_num_decoder_layers": 4,
            "gdn_key_head_dim": 8,
            "gdn_value_head_dim": 8,
            "gdn_num_key_heads": 2,
            "gdn_num_value_heads": 4,
            "gdn_chunk_size": LENGTH,
        },
    ),
}
"""Name -> MaxText's name, and what differs from `_SMALL`."""


class Evaluated(nnx.Module):
    """The model with dropout switched off, which its call does not do by itself."""

    def __init__(self, model: nnx.Module) -> None:
        self.model: Any = model

    def __call__(self, tokens: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        return self.model(tokens, places, segments, enable_dropout=False)


def _built(name: str, sizes: dict[str, Any]) -> Public:
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    modules = ("configs.pyconfig", "models.models", "utils.maxtext_utils")
    pyconfig, models, utils = (importlib.import_module(f"maxtext.{module}") for module in modules)
    base = Path(str(pyconfig.__file__)).with_name("base.yml")
    with tempfile.TemporaryDirectory() as folder:
        options = {**_SMALL, **sizes, "base_output_directory": folder}
        config = pyconfig.initialize([None, str(base)], model_name=name, **options)
    mesh = jax.sharding.Mesh(utils.create_device_mesh(config), config.mesh_axes)
    with mesh:
        model = models.Transformer(config, mesh, None, rngs=nnx.Rngs(params=0, dropout=1))
    places = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (N, LENGTH))
    tokens, segments = integers(N, LENGTH, below=VOCABULARY), jnp.ones((N, LENGTH), jnp.int32)
    batch = "fixed" if "sparse_matmul" in sizes else None
    return Public(Evaluated(model), None, (tokens, places, segments), batch=batch)


def source() -> Source:
    """All of them.

    Raises:
      ModuleNotFoundError: maxtext is not installed.
    """
    if importlib.util.find_spec("maxtext") is None:
        raise ModuleNotFoundError("no maxtext: pip install maxtext")

    def builder(name: str, sizes: dict[str, Any]) -> Callable[[], Public]:
        return lambda: _built(name, sizes)

    return {f"MaxText {title}": builder(*known) for title, known in _MODELS.items()}
