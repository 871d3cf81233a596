"""Models of Scenic in little, from a checkout of github.com/google-research/scenic: `--scenic FOLDER`.

Scenic needs `pip install clu ml_collections immutabledict tensorflow tensorboard ott-jax==0.2.6`. Its models are Linen
modules; each is made with small sizes and called in evaluation mode.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.public.models import Public, Source, filled, integers, normal

N, CLASSES, WORDS, VOCABULARY = 2, 7, 12, 40


@dataclasses.dataclass(frozen=True)
class _Model:
    """module: below scenic.projects. arguments: dicts become `ml_collections.ConfigDict`s. call: keyword arguments."""

    module: str
    name: str
    arguments: Mapping[str, Any]
    sample: Callable[[], tuple[Any, ...]]
    call: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"train": False})


class OwnArguments(nn.Module):
    """A module that writes into its argument, a dict, called with a copy of it."""

    inner: nn.Module

    def __call__(self, x: dict[str, jax.Array], train: bool) -> Any:
        return self.inner(dict(x), train=train)


def _normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (normal(N, *shape),)


def _image_and_text() -> tuple[Any, ...]:
    return normal(N, 32, 32, 3), integers(N, 6, below=VOCABULARY)


def _image_and_points() -> tuple[Any, ...]:
    return 50 * normal(N, 64, 64, 3) + 120, 20 * jnp.abs(normal(N, 3, 2, 2)), integers(N, 3, 2, below=2)


def _words() -> tuple[Any, ...]:
    ids, places = integers(N, WORDS, below=VOCABULARY), integers(N, 3, below=WORDS)
    mask = jnp.ones((N, WORDS), jnp.int32)
    return ({"input_word_ids": ids, "input_type_ids": 0 * ids, "input_mask": mask, "masked_lm_positions": places},)


_IMAGE, _LARGER, _VIDEO = _normal(16, 16, 3), _normal(32, 32, 3), _normal(4, 8, 8, 3)
_BLOCKS = {"mlp_dim": 32, "num_layers": 2, "num_heads": 2}
_VIT = {**_BLOCKS, "num_classes": CLASSES, "hidden_size": 16, "patches": {"size": (4, 4)}}
_MIXER = {"num_classes": CLASSES, "patch_size": (4, 4), "hidden_size": 16, "num_layers": 2}
_MIXER |= {"channels_mlp_dim": 32, "sequence_mlp_dim": 24}
_TIME = {"method": "3d_conv", "kernel_init_method": "central_frame_initializer"}
_VIVIT = {**_VIT, "patches": {"size": (4, 4, 2)}, "temporal_encoding_config": _TIME}
_FACTORIZED = {"attention_order": "time_space", "attention_kernel_init_method": "xavier"}
_SPACE_TIME = {f"{axis}_{key}": value for axis in ("spatial", "temporal") for key, value in _BLOCKS.items()}
_VIEW = {"num_heads": 2, "num_layers": 1}
_VIEWS = [
    {**_VIEW, "hidden_size": 8, "patches": {"size": (4, 4, 4)}, "mlp_dim": 16},
    {**_VIEW, "hidden_size": 16, "patches": {"size": (4, 4, 2)}, "mlp_dim": 32},
]
_MTV = {
    "view_configs": _VIEWS,
    "temporal_encoding_config": _TIME,
    "global_encoder_config": {**_VIEW, "mlp_dim": 32, "hidden_size": 16, "merge_axis": "channel"},
    "input_token_temporal_dims": [1, 2],
    "num_classes": CLASSES,
    "classifier": "token",
}
_FUSED = {"fusion_layers": (0,), "fuse_in_descending_order": True}
_XVIT = {
    "num_outputs": CLASSES,
    "mlp_dim": 32,
    "num_layers": 2,
    "attention_configs": {"num_heads": 2},
    "patches": {"size": (4, 4)},
    "hidden_size": 16,
    "transformer_encoder_configs": {"type": "global"},
}
_OMNI = {"grid_size": None, "attention_configs": {"num_heads": 2}, "attention_fn": "performer"}
_OMNI |= {"skip_standard": False, "partition": 1, "pool": "max"}
_HALTING = {"act_max_steps": 4, "act_epsilon": 0.01, "act_type": "basic", "act_level": "per_example"}
_HALTING |= {"act_halting_bias_init": 1.0, "act_loss_weight": 0.01}
_CLIP = {"vocab_size": VOCABULARY, "embed_dim": 16, "text_features": 16, "text_num_layers": 2, "text_num_heads": 2}
_CLIP |= {"vision_head_dim": 8}
_SAM = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "window_block_indexes": (0,)}
_BERT = {
    "stem_config": {"hidden_size": 16, "embedding_width": 16, "max_position_embeddings": WORDS, "dropout_rate": 0.0},
    "encoder_config": {**_BLOCKS, "dropout_rate": 0.0, "attention_dropout_rate": 0.0, "pre_norm": False},
    "head_config": {"type": "pretraining", "hidden_size": 16},
}
_BERT["stem_config"] |= {"vocab_size": VOCABULARY, "type_vocab_size": 2}
_DETR = {f"transformer_{key}": 2 for key in ("num_heads", "num_encoder_layers", "num_decoder_layers")}
_DETR |= {"num_classes": 5, "hidden_dim": 32, "num_queries": 8, "transformer_qkv_dim": 32, "transformer_mlp_dim": 32}
_DETR |= {"backbone_num_filters": 8, "backbone_num_layers": 50}
_DEFORMABLE = {"num_classes": 5, "embed_dim": 32, "enc_embed_dim": 32, "num_heads": 2, "num_queries": 6}
_DEFORMABLE |= {"num_enc_layers": 1, "num_dec_layers": 2, "num_feature_levels": 3, "num_enc_points": 2}
_DEFORMABLE |= {"num_dec_points": 2, "transformer_ffn_dim": 32, "backbone_num_filters": 8, "backbone_num_layers": 50}
_DEFORMABLE |= {"dropout": 0.0, "compiler_config": {"train_remat": False, "attention_batching_mode": "auto"}}
_TURING = {"process_size": 4, "memory_size": 6, "num_layers": 1}
_TAPE = {"type": "patch", "patches": {"size": (4, 4)}, "num_tokens": 4, "tokenlearner_loc": 1, "use_tokenfuse": False}
_AXES = {"num_outputs": CLASSES, "num_layers": 5, "axial_attention_configs": {"num_heads": 2}}
_UNIVERSAL = "baselines.universal_transformer.uvit.uvit"
_MODELS: dict[str, _Model] = {
    "ResNet": _Model("baselines.resnet", "ResNet", {"num_outputs": CLASSES, "num_filters": 8, "num_layers": 5}, _IMAGE),
    "BiT ResNet": _Model(
        "baselines.bit_resnet", "BitResNet", {"num_outputs": CLASSES, "gn_num_groups": 4, "num_layers": 5}, _IMAGE
    ),
    "Axial ResNet": _Model("baselines.axial_resnet", "AxialResNet", _AXES, _LARGER),
    "U-Net": _Model("baselines.unet", "UNet", {"num_classes": 4, "block_size": (8, 16, 24)}, _IMAGE),
    "ViT": _Model("baselines.vit", "ViT", _VIT, _IMAGE),
    "ViT, class token": _Model(
        "baselines.vit", "ViT", {**_VIT, "positional_embedding": "sinusoidal_2d", "classifier": "token"}, _IMAGE
    ),
    "ViT, attention pooling": _Model("baselines.vit", "ViT", {**_VIT, "classifier": "map"}, _IMAGE),
    "Plain ViT": _Model("baselines.plainvit.plainvit", "ViT", {**_VIT, "positional_embedding": "sincos2d"}, _IMAGE),
    "Hybrid ViT": _Model(
        "baselines.hybrid_vit", "HybridViT", {**_VIT, "resnet": {"num_layers": (1,), "width_factor": 1}}, _LARGER
    ),
    "MatViT": _Model("matvit.matvit", "MatViT", _VIT, _IMAGE),
    "Universal ViT": _Model(_UNIVERSAL, "UViT", {**_VIT, "ac_config": None}, _IMAGE),
    "Universal ViT, halting": _Model(_UNIVERSAL, "UViT", {**_VIT, "ac_config": _HALTING}, _IMAGE),
    "Mixer": _Model("baselines.mixer", "Mixer", {**_MIXER, "layer_scale": 0.1}, _IMAGE),
    "OmniMixer": _Model("omninet.model", "OmniMixer", {**_MIXER, "omnimixer": {**_OMNI, "depth_mlp_dim": 16}}, _IMAGE),
    "OmniNet": _Model(
        "omninet.model",
        "OmniNet",
        {
            **{k: v for k, v in _XVIT.items() if k not in ("num_outputs", "transformer_encoder_configs")},
            "num_classes": CLASSES,
            "attention_fn": "standard",
            "omninet": _OMNI,
        },
        _IMAGE,
    ),
    "X-ViT, Linformer": _Model("fast_vit.xvit", "XViT", {**_XVIT, "attention_fn": "linformer"}, _IMAGE),
    "X-ViT, Performer": _Model("fast_vit.xvit", "XViT", {**_XVIT, "attention_fn": "performer"}, _IMAGE),
    "LOCA": _Model(
        "loca.vit",
        "ViT4LOCA",
        {
            **{k: v for k, v in _VIT.items() if k != "num_classes"},
            "n_ref_positions": 16,
            "apply_cluster_loss": True,
            "head_hidden_dim": 32,
            "head_bottleneck_dim": 16,
            "head_output_dim": 24,
            "posembs": (4, 4),
        },
        _IMAGE,
    ),
    "TokenLearner": _Model(
        "token_learner.model",
        "TokenLearnerViT",
        {**{k: v for k, v in _VIT.items() if k != "patches"}, "representation_size": None, "tokenizer": _TAPE},
        _IMAGE,
    ),
    "Token Turing Machine": _Model("token_turing.model", "TokenTuringMachineEncoder", _TURING, _normal(3, 5, 24)),
    "Token Turing Machine, erasing": _Model(
        "token_turing.model",
        "TokenTuringMachineEncoder",
        {**_TURING, "memory_mode": "TL-AddErase", "processing_unit": "mixer"},
        _normal(3, 5, 24),
    ),
    "CLIP, ViT": _Model(
        "baselines.clip.layers",
        "CLIP",
        {**_CLIP, "vision_features": 16, "vision_num_layers": 2, "vision_patch_size": 8},
        _image_and_text,
        {},
    ),
    "CLIP, ResNet": _Model(
        "baselines.clip.layers",
        "CLIP",
        {**_CLIP, "vision_features": 8, "vision_num_layers": (1, 1, 1, 1)},
        _image_and_text,
        {},
    ),
    "BERT": _Model("baselines.bert.model", "BERT", _BERT, _words),
    "ViViT": _Model("vivit.model", "ViViT", {**_VIVIT, "attention_config": {"type": "spacetime"}}, _VIDEO),
    "ViViT, factorized blocks": _Model(
        "vivit.model",
        "ViViT",
        {**_VIVIT, "attention_config": {**_FACTORIZED, "type": "factorized_self_attention_block"}},
        _VIDEO,
    ),
    "ViViT, factorized heads": _Model(
        "vivit.model", "ViViT", {**_VIVIT, "attention_config": {"type": "factorized_dot_product_attention"}}, _VIDEO
    ),
    "ViViT, space then time": _Model(
        "vivit.model",
        "SpaceTimeViViT",
        {
            **_SPACE_TIME,
            **{k: v for k, v in _VIVIT.items() if k not in _BLOCKS},
            "attention_config": {"type": "factorized_encoder"},
        },
        _VIDEO,
    ),
    "MTV": _Model("mtv.model", "MTV", {**_MTV, "cross_view_fusion": None}, _VIDEO),
    "MTV, attention between views": _Model(
        "mtv.model",
        "MTV",
        {**_MTV, "cross_view_fusion": {**_FUSED, "type": "cross_view_attention", "use_query_config": True}},
        _VIDEO,
    ),
    "MTV, bottleneck": _Model(
        "mtv.model",
        "MTV",
        {**_MTV, "cross_view_fusion": {**_FUSED, "type": "bottleneck", "bottleneck_tokens": 4}},
        _VIDEO,
    ),
    "MBT": _Model(
        "mbt.model",
        "MBT",
        {
            **_VIVIT,
            "attention_config": {"type": "spacetime"},
            "classifier": "token",
            "fusion_layer": 1,
            "modality_fusion": ("rgb", "spectrogram"),
            "use_bottleneck": True,
            "n_bottlenecks": 2,
        },
        lambda: ({"rgb": normal(N, 4, 8, 8, 3), "spectrogram": normal(N, 8, 16, 3)},),
    ),
    "Segment Anything, images": _Model(
        "baselines.segment_anything.modeling.image_encoder",
        "ImageEncoderViT",
        {**_SAM, "window_size": 3},
        _normal(64, 64, 3),
    ),
    "Segment Anything": _Model(
        "baselines.segment_anything.modeling.sam",
        "Sam",
        {"image_encoder_args": {**_SAM, "window_size": 2}, "prompt_encoder_args": {}, "mask_decoder_args": {}},
        _image_and_points,
        {"train": False, "return_batch_as_list": False},
    ),
    "DETR": _Model("baselines.detr.model", "DETR", _DETR, _normal(64, 64, 3)),
    "Deformable DETR": _Model("baselines.deformable_detr.model", "DeformableDETR", _DEFORMABLE, _normal(64, 64, 3)),
    "Point Cloud Transformer": _Model(
        "pointcloud.models",
        "PointCloudTransformerClassifier",
        {"in_dim": 3, "feature_dim": 16, "num_classes": CLASSES},
        _normal(16, 3),
    ),
}


def _configured(value: Any) -> Any:
    """Dicts as Scenic's configurations, also within lists."""
    if isinstance(value, list):
        return [_configured(part) for part in value]
    config: Any = importlib.import_module("ml_collections").ConfigDict
    return config(value) if isinstance(value, dict) else value


def _built(folder: Path, known: _Model) -> Public:
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(f"scenic.projects.{known.module}")
    finally:
        sys.path.remove(str(folder))
    model = getattr(module, known.name)(**{key: _configured(value) for key, value in known.arguments.items()})
    model = OwnArguments(model) if known.name == "MBT" else model
    sample = known.sample()
    keys = {name: jax.random.key(seed) for seed, name in enumerate(("params", "dropout", "performer"))}
    variables = nn.meta.unbox(model.init(keys, *sample, **known.call))
    return Public(model, filled(variables), sample, known.call)


def source(folder: Path) -> Source:
    """All of them.

    Raises:
      FileNotFoundError: the folder is no checkout of Scenic.
    """
    if not (folder / "scenic" / "projects").exists():
        raise FileNotFoundError(f"no {folder}/scenic/projects: --scenic takes a checkout of google-research/scenic")

    def builder(known: _Model) -> Callable[[], Public]:
        return lambda: _built(folder, known)

    return {f"Scenic {title}": builder(known) for title, known in _MODELS.items()}
