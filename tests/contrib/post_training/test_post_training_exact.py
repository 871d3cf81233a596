"""With every step on, graph, exact forward, C and ONNX Runtime agree in every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import runtimes
from qjax.contrib.post_training import migration
from qjax.contrib.post_training.scoring import Judge
from tests.analysis.models import data


class Convolutions(nnx.Module):
    """Convolution, batch norm, relu6, depthwise, residual, dense."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.point = nnx.Conv(8, 8, (1, 1), rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu6(self.norm(self.first(x)) * 2)
        x = x + self.point(jax.nn.relu6(self.depthwise(x)))
        return self.head(x.mean((1, 2)))


class Transformer(nnx.Module):
    """Words and positions, attention and a feed-forward part with norms in front; one channel is 40 times as great."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.words, self.positions = nnx.Embed(30, 8, rngs=rngs), nnx.Embed(6, 8, rngs=rngs)
        self.words.embedding[...] = self.words.embedding[...].at[:, 0].multiply(40)
        self.norms = nnx.List(nnx.LayerNorm(8, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, words):
        x = self.words(words) + self.positions(jnp.arange(words.shape[1]))[None]
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


IMAGES = [data(4, 6, 6, 3, seed=s) for s in range(4)]
WORDS = [np.random.default_rng(s).integers(0, 30, (4, 6)).astype(np.int32) for s in range(4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("model", "batches"), [(Convolutions, IMAGES), (Transformer, WORDS)])
def test_every_step_is_exact(model, batches, bits, monkeypatch, tmp_path):
    # also a step that brings nothing here must leave what is exact
    monkeypatch.setattr(Judge, "better", lambda *_: True)
    for gain in ("GAIN", "GAIN_TOGETHER"):
        monkeypatch.setattr(migration, gain, float("inf"))
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1))
    qmodel = qjax.post_training(model(), recipe, batches, effort="thorough", progress=False)
    report = qmodel.post_training_report
    kept = {one.step for one in report.steps if one.kept}
    wanted = {"equalize", "precision"} if model is Convolutions else {"precision", "tables"}
    assert kept >= wanted | {"gptq", "adaround", "brecq", "bias"}, report
    x = batches[0]
    graph = qjax.convert(qmodel, x)
    assert np.array_equal(nnx.jit(qjax.exact(qmodel, x))(qmodel, x), graph(x))
    codes = [np.asarray(graph.quantize(x))]
    for name, options in (("c", {}), ("onnxruntime", {"style": "integer"})):
        folder = tmp_path / name
        folder.mkdir()
        (found,) = runtimes.prepare(name, graph, folder, len(x), options)(codes)
        assert np.array_equal(found, graph.run(*codes)), name
