"""The diffusion models of FlaxDiff in little: `pip install --no-deps flaxdiff einops`.

Every model is called with a noisy image, the time of the noise and the embedded words of a text.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.public.models import Public, Source, filled, normal

_TRANSFORMER = {"patch_size": 4, "emb_features": 32, "num_heads": 2}
_CROSS = {"heads": 2, "dtype": jnp.float32, "flash_attention": False, "use_projection": False}
_UNET = {
    "output_channels": 3,
    "emb_features": 32,
    "feature_depths": [16, 32],
    "attention_configs": [None, {**_CROSS, "use_self_and_cross": True}],
    "num_res_blocks": 1,
    "num_middle_res_blocks": 1,
    "norm_groups": 4,
}
_MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "UNet": ("simple_unet", "Unet", 8, _UNET),
    "DiT": ("simple_dit", "SimpleDiT", 16, {**_TRANSFORMER, "num_layers": 2}),
    "DiT, Hilbert curve": ("simple_dit", "SimpleDiT", 16, {**_TRANSFORMER, "num_layers": 2, "use_hilbert": True}),
    "MM-DiT": ("simple_mmdit", "SimpleMMDiT", 16, {**_TRANSFORMER, "num_layers": 2}),
    "U-ViT": ("simple_vit", "UViT", 16, {**_TRANSFORMER, "num_layers": 4}),
    "U-DiT": ("simple_vit", "SimpleUDiT", 16, {**_TRANSFORMER, "num_layers": 4}),
    "S5 and attention": ("ssm_dit", "HybridSSMAttentionDiT", 16, {**_TRANSFORMER, "num_layers": 4}),
}
"""Name -> module, class, size of the image, arguments."""


def _built(module: str, name: str, size: int, arguments: dict[str, Any]) -> Public:
    model = getattr(importlib.import_module(f"flaxdiff.models.{module}"), name)(**arguments)
    sample = (normal(2, size, size, 3), normal(2, seed=1), normal(2, 5, 16, seed=2))
    variables = nn.meta.unbox(model.init(jax.random.key(0), *sample))
    return Public(model, filled(variables), sample)


def source() -> Source:
    """All of them.

    Raises:
      ModuleNotFoundError: flaxdiff is not installed.
    """
    if importlib.util.find_spec("flaxdiff") is None:
        raise ModuleNotFoundError("no flaxdiff: pip install --no-deps flaxdiff einops")

    def builder(*known: Any) -> Callable[[], Public]:
        return lambda: _built(*known)

    return {f"FlaxDiff {title}": builder(*known) for title, known in _MODELS.items()}
