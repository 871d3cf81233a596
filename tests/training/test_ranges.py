"""Scales by the model's output, and scales for the rows of tables."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.training.walk import Stream, Walk, noise_of
from tests.analysis.models import data


class Ignored(nnx.Module):
    """One channel is 100 times as great as the others, and the layer behind it does not read it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.first.kernel[...] = self.first.kernel[...].at[:, 0].multiply(100)
        self.head.kernel[...] = self.head.kernel[...].at[0].set(0)

    def __call__(self, x):
        return self.head(nnx.tanh(self.first(x) * 0.5) + self.first(x) * 0.5)


class Tagger(nnx.Module):
    """Words to scores; one word that is never asked for is 50 times as great as the others."""

    def __init__(self):
        self.words = nnx.Embed(40, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))
        self.words.embedding[...] = self.words.embedding[...].at[3].multiply(50)

    def __call__(self, words):
        return self.head(self.words(words))


BATCHES = [data(16, 6, seed=s) for s in range(2)]
WORDS = [np.random.default_rng(s).integers(4, 40, (16, 5)).astype(np.int32) for s in range(4)]


def test_an_outlier_that_the_output_ignores_is_clipped():
    qmodel = qjax.quantize(Ignored(), qjax.Recipe(), BATCHES[0])
    qjax.calibrate(qmodel, BATCHES)
    walk, batches = Walk(qmodel, [(x,) for x in BATCHES]), [(x,) for x in BATCHES]
    truth = walk.outputs(Stream.of(qmodel, quantized=False), batches)
    before, scales = noise_of(truth, walk.outputs(Stream.of(qmodel), batches)), qmodel.qparams()
    found = qjax.training.output_ranges(qmodel, BATCHES)
    assert noise_of(truth, walk.outputs(Stream.of(qmodel), batches)) < before / 4
    assert all(t.after < t.before for t in found.tensors)
    for t in found.tensors:
        wanted = np.asarray(scales[t.name].scale) * np.float32(t.factor)
        np.testing.assert_allclose(qmodel.qparams()[t.name].scale, wanted, rtol=1e-6)
    assert "scale times" in str(found)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_a_table_gets_scales_of_its_rows_and_every_step_stays_exact(bits):
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1))
    qmodel = qjax.post_training(Tagger(), recipe, WORDS, progress=False)
    report = qmodel.post_training_report
    assert report["tables"].kept
    assert qmodel.plan.by_name["words/embedding"].spec.axis == 0
    assert report["tables"].score.decibels > report.steps[0].score.decibels + 6
    assert np.array_equal(qjax.exact(qmodel, WORDS[0])(qmodel, WORDS[0]), qjax.convert(qmodel, WORDS[0])(WORDS[0]))
    again = qjax.quantize(Tagger(), report.recipe, WORDS[0])
    assert {n: q.spec for n, q in again.plan.quantizers} == {n: q.spec for n, q in qmodel.plan.quantizers}


def test_a_model_without_a_table_says_so():
    qmodel = qjax.quantize(Ignored(), qjax.Recipe(), jnp.zeros((2, 6)))
    with pytest.raises(ValueError, match="expected an embedding table with one scale"):
        qjax.training.row_scales(qmodel, qjax.Recipe())
