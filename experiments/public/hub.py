"""The 35 Flax architectures of `transformers` 4 (the last version that has them), in little and with random weights.

The package is one of the tests, not of qjax: `make venv` installs it, or `pip install "transformers<5"`; no torch.
"""

import importlib
import types
from typing import Any

import jax.numpy as jnp

from experiments.public.models import Public, Source, integers, normal, padding, positions

N, LENGTH, VOCABULARY = 3, 8, 40
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 32}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}
_LLAMA = {**_ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}


def _tokens(seed: int = 0) -> Any:
    return integers(N, LENGTH, below=VOCABULARY, start=3, seed=seed)


def _ids() -> tuple[Any, ...]:
    return (_tokens(), padding(N, LENGTH))


def _ids_positions() -> tuple[Any, ...]:
    return (*_ids(), positions(N, LENGTH))


def _ids_types_positions() -> tuple[Any, ...]:
    return (*_ids(), integers(N, LENGTH, below=2), positions(N, LENGTH))


def _head_mask() -> tuple[Any, ...]:
    return (*_ids_types_positions(), None)


def _pairs() -> tuple[Any, ...]:
    return (*_ids(), _tokens(1), padding(N, LENGTH))


def _pairs_positions() -> tuple[Any, ...]:
    return (*_pairs(), positions(N, LENGTH), positions(N, LENGTH))


def _images(size: int = 16) -> tuple[Any, ...]:
    return (normal(N, size, size, 3),)


def _roformer() -> tuple[Any, ...]:
    return (*_ids(), integers(N, LENGTH, below=2), None)


def _clip() -> tuple[Any, ...]:
    ids = _tokens().at[:, -1].set(VOCABULARY - 1)
    return (ids, normal(N, 16, 16, 3), padding(N, LENGTH), positions(N, LENGTH))


def _speech() -> tuple[Any, ...]:
    return (normal(N, 400),)


def _whisper() -> tuple[Any, ...]:
    return (normal(N, 8, 32), _tokens(), padding(N, LENGTH), positions(N, LENGTH))


_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "ALBERT": ("Albert", "ForMaskedLM", {**_ENCODER, "embedding_size": 16}, _ids_types_positions),
    "BART": ("Bart", "ForConditionalGeneration", _SEQ2SEQ, _pairs_positions),
    "BEiT": ("Beit", "ForImageClassification", _VISION, _images),
    "BERT": ("Bert", "Model", _ENCODER, _ids_types_positions),
    "BigBird": ("BigBird", "Model", {**_ENCODER, "attention_type": "original_full"}, _head_mask),
    "Blenderbot": ("Blenderbot", "ForConditionalGeneration", _SEQ2SEQ, _pairs_positions),
    "BlenderbotSmall": ("BlenderbotSmall", "ForConditionalGeneration", _SEQ2SEQ, _pairs_positions),
    "Bloom": ("Bloom", "ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _ids),
    "CLIP": (
        "CLIP",
        "Model",
        {
            "text_config": {**_ENCODER, "eos_token_id": VOCABULARY - 1, "bos_token_id": 0, "projection_dim": 16},
            "vision_config": {**_VISION, "projection_dim": 16},
            "projection_dim": 16,
        },
        _clip,
    ),
    "DINOv2": (
        "Dinov2",
        "ForImageClassification",
        {**_VISION, "mlp_ratio": 2},
        _images,
    ),
    "DistilBERT": (
        "DistilBert",
        "ForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 32,
        },
        _ids,
    ),
    "ELECTRA": ("Electra", "ForPreTraining", {**_ENCODER, "embedding_size": 16}, _ids_types_positions),
    "Gemma": ("Gemma", "ForCausalLM", {**_LLAMA, "head_dim": 8}, _ids_positions),
    "GPT-2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        _ids_positions,
    ),
    "GPT-J": (
        "GPTJ",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
        _ids_positions,
    ),
    "GPT-Neo": (
        "GPTNeo",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
        },
        _ids_positions,
    ),
    "Llama": ("Llama", "ForCausalLM", _LLAMA, _ids_positions),
    "LongT5": ("LongT5", "ForConditionalGeneration", {**_T5, "local_radius": 3, "global_block_size": 4}, _pairs),
    "Marian": ("Marian", "MTModel", {**_SEQ2SEQ, "decoder_vocab_size": VOCABULARY}, _pairs_positions),
    "mBART": ("MBart", "ForConditionalGeneration", _SEQ2SEQ, _pairs_positions),
    "Mistral": ("Mistral", "ForCausalLM", {**_LLAMA, "sliding_window": 4, "head_dim": 8}, _ids_positions),
    "mT5": ("MT5", "ForConditionalGeneration", _T5, _pairs),
    "OPT": (
        "OPT",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
        _ids_positions,
    ),
    "Pegasus": ("Pegasus", "ForConditionalGeneration", _SEQ2SEQ, _pairs_positions),
    "RegNet": (
        "RegNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
        lambda: _images(32),
    ),
    "ResNet": (
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
        lambda: _images(32),
    ),
    "RoBERTa": ("Roberta", "ForMaskedLM", _ENCODER, _head_mask),
    "RoBERTa, pre-norm": ("RobertaPreLayerNorm", "ForMaskedLM", _ENCODER, _head_mask),
    "RoFormer": ("RoFormer", "ForMaskedLM", {**_ENCODER, "embedding_size": 32}, _roformer),
    "T5": ("T5", "ForConditionalGeneration", _T5, _pairs),
    "ViT": ("ViT", "ForImageClassification", _VISION, _images),
    "wav2vec 2.0": (
        "Wav2Vec2",
        "ForCTC",
        {
            **_ENCODER,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
        },
        _speech,
    ),
    "Whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            **{name: value for name, value in _SEQ2SEQ.items() if name != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _whisper,
    ),
    "XGLM": (
        "XGLM",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
        },
        _ids_positions,
    ),
    "XLM-RoBERTa": ("XLMRoberta", "ForMaskedLM", _ENCODER, _head_mask),
}
"""Name -> the prefix of the classes, the class that is built, its configuration, the arguments of a call."""


class _OldNumpy(types.ModuleType):
    """`jax.numpy` with the old names of `clip`'s bounds, which newer versions of jax have dropped and T5 writes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: Any, a_min: Any = None, a_max: Any = None) -> Any:
        return jnp.clip(x, a_min, a_max)


_LAYERS = frozenset(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split()  # noqa: SIM905
)


def _with_layers(sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    """The sizes with another depth, those of a model's parts too."""
    found = {name: _with_layers(own, layers) if isinstance(own, dict) else own for name, own in sizes.items()}
    return {name: layers if name in _LAYERS else own for name, own in found.items()}


def _build(prefix: str, suffix: str, sizes: dict[str, Any], sample: Any) -> Public:
    library = importlib.import_module("transformers")
    config = getattr(library, f"{prefix}Config")(**sizes)
    if prefix in ("T5", "LongT5", "MT5"):
        name = "t5" if prefix == "MT5" else prefix.lower()
        module = importlib.import_module(f"transformers.models.{name}.modeling_flax_{name}")
        vars(module)["jnp"] = _OldNumpy("jax.numpy")
    shape = {"input_shape": sample()[0].shape} if prefix in ("Wav2Vec2",) else {}
    model = getattr(library, f"Flax{prefix}{suffix}")(config, seed=0, **shape)
    # with batch statistics the library keeps all variables in `params`
    variables = model.params if "batch_stats" in model.params else {"params": model.params}
    return Public(model.module, variables, sample())


def source(layers: int = 2) -> Source:
    """All of them.

    layers: how deep those are whose depth is a number.

    Raises:
      ModuleNotFoundError: with the command that installs the package.
    """
    try:
        version = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('the package is missing: pip install "transformers<5"') from error
    if int(version.split(".")[0]) >= 5:
        raise ModuleNotFoundError(f'transformers {version} has no Flax models: pip install "transformers<5"')
    deep = {name: (*made[:2], _with_layers(made[2], layers), made[3]) for name, made in _ARCHITECTURES.items()}
    return {name: (lambda made=made: _build(*made)) for name, made in deep.items()}
