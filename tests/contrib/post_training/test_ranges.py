"""Scales by the model's output, and scales for the rows of tables."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.ranges import left_out
from qjax.contrib.post_training.report import Score
from qjax.contrib.post_training.scoring import Judge, Unseen
from qjax.contrib.post_training.simulated import grids_of
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
@pytest.mark.exhaustive
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


class Reaching(nnx.Module):
    """Two sums whose inputs reach as far as the batch does; the second has a lower end of its own."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(6, 8, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x))[:, :6])


def heavy(count: int, seed: int, examples: int = 16) -> list[np.ndarray]:
    """Batches of a distribution with outliers: every batch reaches farther than most others do."""
    rng = np.random.default_rng(seed)
    return [rng.standard_t(3, (examples, 6)).astype(np.float32) for _ in range(count)]


def test_ranges_grow_where_each_batch_leaves_those_of_the_others():
    seen, new = heavy(4, seed=0), heavy(64, seed=1)
    qmodel = qjax.quantize(Reaching(), qjax.Recipe(), seen[0])
    qjax.calibrate(qmodel, seen)
    plain = nnx.clone(qmodel)
    found = qjax.training.output_ranges(qmodel, seen)
    assert found.after < found.before
    assert any(t.factor > 1 for t in found.tensors)
    walk, batches = Walk(qmodel, [(x,) for x in seen]), [(x,) for x in new]
    truth = walk.outputs(Stream.of(qmodel, quantized=False), batches)
    after, before = (noise_of(truth, walk.outputs(Stream.of(q), batches)) for q in (qmodel, plain))
    assert after < before


def test_equal_batches_leave_nothing_out():
    x = heavy(1, seed=0)[0]
    qmodel = qjax.quantize(Reaching(), qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x])
    once = qjax.training.output_ranges(nnx.clone(qmodel), [x])
    thrice = qjax.training.output_ranges(nnx.clone(qmodel), [x] * 3)
    assert [(t.name, t.factor) for t in once.tensors] == [(t.name, t.factor) for t in thrice.tensors]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_range_without_a_batch_is_that_of_the_other_batches(symmetric):
    seen = heavy(3, seed=2)
    spec = qjax.QSpec(symmetric=symmetric)
    recipe = qjax.Recipe(activations=spec)
    qmodel = qjax.quantize(Reaching(), recipe, seen[0])
    qjax.calibrate(qmodel, seen)
    walk = Walk(qmodel, [(x,) for x in seen])
    names = [name for name, _ in qmodel.plan.quantizers if "kernel" not in name and "bias" not in name]
    folds = left_out(qmodel, walk, Stream.of(qmodel, quantized=False), names, 3, [(x,) for x in seen])
    for index, fold in enumerate(folds):
        others = qjax.quantize(Reaching(), recipe, seen[0])
        qjax.calibrate(others, [x for i, x in enumerate(seen) if i != index])
        wanted = grids_of(others)
        for name in names:
            # a zero point moves the ends of a range by up to half a code
            near, steps = (1e-5, 0) if symmetric else (1 / 255, 1)
            np.testing.assert_allclose(fold[name]["scale"], wanted[name]["scale"], rtol=near)
            np.testing.assert_allclose(fold[name]["low"], wanted[name]["low"], atol=steps)
            assert np.array_equal(fold[name]["high"] - fold[name]["low"], wanted[name]["high"] - wanted[name]["low"])


def test_a_step_by_cross_validation_is_judged_by_it():
    judge = Judge([(None, (np.zeros((2, 3)),))], None, None)
    better = functools.partial(judge.better, Score(0.02), Score(0.01))
    assert not better()
    assert better(Unseen(before=0.1, after=0.05))
    assert not better(Unseen(before=0.1, after=0.11))
    # a loss is what the user asked for
    lossy = Judge([(None, (np.zeros((2, 3)),))], lambda *_: 1.0, None)
    assert not lossy.better(Score(0.01, loss=2.0), Score(0.01, loss=1.0), Unseen(before=0.1, after=0.05))


def test_a_model_without_a_table_says_so():
    qmodel = qjax.quantize(Ignored(), qjax.Recipe(), jnp.zeros((2, 6)))
    with pytest.raises(ValueError, match="expected an embedding table with one scale"):
        qjax.training.row_scales(qmodel, qjax.Recipe())
