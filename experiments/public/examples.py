"""Flax's own examples in little, from the folder `examples` of a checkout of github.com/google/flax.

What an example imports for its data and its logs only (tensorflow, orbax, ...) is replaced by nothing where it is not
installed. ogbg_molpcba needs `pip install jraph`. Two of linen_design_test are left out: attention_simple.py and
autoencoder.py do not run in Flax itself any more.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import qjax
from experiments.public.models import Public, Source, integers, normal, padding, positions

N, LENGTH, VOCABULARY = 3, 8, 40
_UNUSED = (
    "absl",
    "absl.logging",
    "clu",
    "clu.metric_writers",
    "clu.periodic_actions",
    "grain",
    "grain.python",
    "grain.transforms",
    "jaxtyping",
    "ml_collections",
    "orbax",
    "orbax.checkpoint",
    "orbax.checkpoint.checkpoint_managers",
    "sentencepiece",
    "tensorflow",
    "tensorflow_datasets",
    "flax.metrics.tensorboard",
)
_TRANSFORMER = {"emb_dim": 32, "num_heads": 4, "num_layers": 2, "qkv_dim": 32, "mlp_dim": 64, "max_len": 32}


def _absent(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return True
    return False


def load(folder: Path, name: str) -> ModuleType:
    """The module folder/name.py, whose own imports come from the same folder."""
    path = folder / f"{name}.py"
    if not path.exists():
        raise FileNotFoundError(f"no {path}: --examples takes the folder `examples` of a checkout of flax")
    spec = importlib.util.spec_from_file_location(f"flax_example_{folder.name}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    sys.modules[spec.name] = module
    try:
        with mock.patch.dict(sys.modules, {unused: mock.MagicMock() for unused in _UNUSED if _absent(unused)}):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def _linen(module: Any, *sample: Any, method: Any = None, init: Any = None, **evaluation: Any) -> Public:
    streams = {name: jax.random.key(i) for i, name in enumerate(("params", "dropout", "lstm"))}
    options = evaluation if init is None else init
    variables = module.init(streams, *(() if init is not None else sample), **options)
    return Public(module, variables, sample, evaluation, method)


def _tokens(seed: int = 0) -> jax.Array:
    """Token ids, of which 0 is padding behind the text."""
    return integers(N, LENGTH, below=VOCABULARY, start=2, seed=seed) * padding(N, LENGTH)


def _imagenet(folder: Path) -> Public:
    models = load(folder / "imagenet", "models")
    net = models.ResNet(stage_sizes=[1, 1], block_cls=models.ResNetBlock, num_classes=10, num_filters=8)
    return _linen(net, normal(N, 32, 32, 3), train=False)


def _imagenet_bottleneck(folder: Path) -> Public:
    models = load(folder / "imagenet", "models")
    net = models.ResNet(stage_sizes=[1, 1], block_cls=models.BottleneckResNetBlock, num_classes=10, num_filters=8)
    return _linen(net, normal(N, 32, 32, 3), train=False)


def _mnist(folder: Path) -> Public:
    net = load(folder / "mnist", "train").CNN(nnx.Rngs(0))
    return Public(net, None, (normal(N, 28, 28, 1), None))


def _vae_generate(folder: Path) -> Public:
    net = load(folder / "vae", "models").VAE(latents=4)
    made = net.init(jax.random.key(0), normal(N, 784), jax.random.key(1))
    return Public(net, made, (normal(N, 4),), method="generate")


def _vae_encoder(folder: Path) -> Public:
    return _linen(load(folder / "vae", "models").Encoder(latents=4), normal(N, 784))


def _vae(folder: Path) -> Public:
    net = load(folder / "vae", "models").VAE(latents=4)
    return _linen(net, normal(N, 784), z_rng=jax.random.key(1))


def _seq2seq(folder: Path, method: Any = None) -> Public:
    net = load(folder / "seq2seq", "models").Seq2seq(teacher_force=True, hidden_size=16, vocab_size=12)
    questions, answers = (
        jax.nn.one_hot(integers(N, length, below=12, seed=seed), 12) for seed, length in enumerate((6, 4))
    )
    made = net.init({"params": jax.random.key(0), "lstm": jax.random.key(1)}, questions, answers)
    return Public(net, made, (questions, answers), method=method, rngs={"lstm": jax.random.key(1)})


def _logits(net: Any, questions: jax.Array, answers: jax.Array) -> jax.Array:
    """What seq2seq computes, without the words that it draws at random from it."""
    return net(questions, answers)[0]


def _ppo(folder: Path) -> Public:
    net = load(folder / "ppo", "models").ActorCritic(num_outputs=4)
    return _linen(net, jax.random.uniform(jax.random.key(0), (N, 84, 84, 4), maxval=255.0))


def _lm1b(folder: Path) -> Public:
    models = load(folder / "lm1b", "models")
    config = models.TransformerConfig(VOCABULARY, VOCABULARY, deterministic=True, **_TRANSFORMER)
    return _linen(models.TransformerLM(config), _tokens())


def _lm1b_step(folder: Path) -> Public:
    """One token with the cache that Linen keeps in its variables."""
    models = load(folder / "lm1b", "models")
    options = {**_TRANSFORMER, "max_len": LENGTH}
    config = models.TransformerConfig(VOCABULARY, VOCABULARY, deterministic=True, decode=True, **options)
    net = models.TransformerLM(config)
    model = qjax.from_linen(net, net.init(jax.random.key(0), jnp.zeros((N, LENGTH), jnp.int32)))
    step = qjax.stateful(model, nnx.Cache)
    state = step.state()
    for token in range(LENGTH // 2):  # a cache that the model has filled itself
        _, state = step(state, integers(N, 1, below=VOCABULARY, start=2, seed=token))
    return Public(step, None, (state, integers(N, 1, below=VOCABULARY, start=2)))


def _lm1b_packed(folder: Path) -> Public:
    models = load(folder / "lm1b", "models")
    config = models.TransformerConfig(VOCABULARY, VOCABULARY, deterministic=True, **_TRANSFORMER)
    segments = jnp.broadcast_to(1 + jnp.arange(LENGTH) // 4, (N, LENGTH))
    return _linen(models.TransformerLM(config), _tokens(), positions(N, LENGTH) % 4, segments)


def _wmt(folder: Path) -> Public:
    models = load(folder / "wmt", "models")
    config = models.TransformerConfig(
        VOCABULARY, VOCABULARY, deterministic=True, share_embeddings=True, logits_via_embedding=True, **_TRANSFORMER
    )
    return _linen(models.Transformer(config), _tokens(), _tokens(1))


def _nlp_seq(folder: Path) -> Public:
    models = load(folder / "nlp_seq", "models")
    net = models.Transformer(models.TransformerConfig(VOCABULARY, VOCABULARY, **_TRANSFORMER))
    variables = net.init(jax.random.key(0), inputs=_tokens(), train=False)
    return Public(net, variables, (_tokens(),), {"train": False})


def _sst2(folder: Path) -> Public:
    net = load(folder / "sst2", "models").TextClassifier(
        embedding_size=16,
        hidden_size=16,
        vocab_size=VOCABULARY,
        output_size=1,
        dropout_rate=0.5,
        word_dropout_rate=0.1,
    )
    return _linen(net, _tokens(), padding(N, LENGTH).sum(1), deterministic=True)


def gemma_config(loaded: Any, vocabulary: int = VOCABULARY, **options: Any) -> Any:
    """A small configuration of the example gemma; loaded: its module `transformer`."""
    modes = loaded.modules.AttentionType
    return loaded.TransformerConfig(
        num_layers=2,
        num_embed=vocabulary,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(modes.LOCAL_SLIDING, modes.GLOBAL),
        use_qk_norm=True,
        **options,
    )


def _gemma(folder: Path, cached: bool = False) -> Public:
    loaded = load(folder / "gemma", "transformer")
    config = gemma_config(loaded, attn_logits_soft_cap=50.0, sliding_window_size=4)
    net = loaded.Transformer(config, rngs=nnx.Rngs(0))
    if cached:
        cache = net.init_cache(LENGTH, N, jnp.float32)
        half = LENGTH // 2
        for place in range(half + 1):  # a cache that the model has filled itself
            seen = jnp.broadcast_to(jnp.arange(LENGTH) <= place, (N, 1, LENGTH))
            sample = (integers(N, 1, below=VOCABULARY, seed=place), jnp.full((N, 1), place), cache, seen)
            _, cache = net(*sample)
        return Public(net, None, sample)
    tokens = padding(N, LENGTH) > 0
    sample = (_tokens(), loaded.build_positions_from_mask(tokens), None, loaded.make_causal_attn_mask(tokens))
    return Public(net, None, sample)


def _ogbg(folder: Path, name: str) -> Public:
    """A graph has no batch: `vmap` over the features of one graph with fixed edges, whose examples are molecules."""
    jraph = importlib.import_module("jraph")
    net = getattr(load(folder / "ogbg_molpcba", "models"), name)(
        latent_size=16, num_mlp_layers=2, message_passing_steps=2, output_globals_size=4
    )
    senders, receivers = jnp.array([0, 1, 2, 3, 4, 0]), jnp.array([1, 2, 3, 4, 5, 2])
    one = {"senders": senders, "receivers": receivers, "n_node": jnp.array([6]), "n_edge": jnp.array([6])}

    class Molecules(nn.Module):
        graph_net: Any

        @nn.compact
        def __call__(self, nodes: jax.Array, edges: jax.Array, whole: jax.Array) -> jax.Array:
            def call(net: Any, nodes: jax.Array, edges: jax.Array, whole: jax.Array) -> jax.Array:
                return net(jraph.GraphsTuple(nodes=nodes, edges=edges, globals=whole, **one)).globals

            each = nn.vmap(call, variable_axes={"params": None}, split_rngs={"params": False})
            return each(self.graph_net, nodes, edges, whole)

    return _linen(Molecules(net), normal(N, 6, 5), normal(N, 6, 3, seed=1), normal(N, 1, 2, seed=2))


def _mlp(folder: Path) -> Public:
    module = load(folder / "linen_design_test", "mlp_inline")
    return _linen(module.MLP((16, 4)), normal(N, 8))


def _scan(folder: Path) -> Public:
    module = load(folder / "nnx_toy_examples", "06_scan_over_layers")
    return Public(module.ScanMLP(16, n_layers=3, rngs=nnx.Rngs(0)), None, (normal(N, 16),))


_EXAMPLES: dict[str, Callable[[Path], Public]] = {
    "imagenet": _imagenet,
    "imagenet, bottleneck": _imagenet_bottleneck,
    "mnist": _mnist,
    "vae": _vae,
    "vae, encoder": _vae_encoder,
    "vae, generate": _vae_generate,
    "seq2seq": _seq2seq,
    "seq2seq, logits": lambda folder: _seq2seq(folder, _logits),
    "ppo": _ppo,
    "lm1b": _lm1b,
    "lm1b, packed": _lm1b_packed,
    "lm1b, step": _lm1b_step,
    "wmt": _wmt,
    "nlp_seq": _nlp_seq,
    "sst2": _sst2,
    "gemma": _gemma,
    "gemma, step": lambda folder: _gemma(folder, cached=True),
    "ogbg_molpcba": lambda folder: _ogbg(folder, "GraphNet"),
    "ogbg_molpcba, convolution": lambda folder: _ogbg(folder, "GraphConvNet"),
    "linen_design_test, MLP": _mlp,
    "nnx_toy_examples, scan": _scan,
}


def source(folder: Path) -> Source:
    """All of them."""
    return {f"flax {name}": (lambda build=build: build(folder)) for name, build in _EXAMPLES.items()}
