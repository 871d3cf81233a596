"""`qjax.post_training`: judged on held-out data, taken back where worse, exact afterwards; and its clear errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training import steps
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.post_training import split
from tests.analysis.models import data


class Outliers(nnx.Module):
    """A residual stream of which one channel is 300 times as great as the others, and a layer that ignores it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.first.kernel[...] = self.first.kernel[...].at[:, 0].multiply(300)
        self.second.kernel[...] = self.second.kernel[...].at[0].multiply(0.001)

    def __call__(self, x):
        x = self.first(x)
        return self.head(nnx.relu(self.second(x)))


BATCHES = [data(16, 6, seed=s) for s in range(4)]


@pytest.fixture(scope="module")
def outliers():
    model = Outliers()
    steps = ["precision", "gptq", "bias"]  # equalisation alone would cure this model
    return model, qjax.post_training(model, qjax.Recipe(), BATCHES, steps=steps, progress=False)


def noise(model, qmodel, batches):
    y, q = (np.concatenate([np.asarray(m(x), np.float64) for x in batches]) for m in (model, qmodel))
    return -10 * np.log10(np.sum((y - q) ** 2) / np.sum(y**2))


def test_the_tensor_with_outliers_gets_16_bits_and_the_report_says_what_it_brought(outliers):
    model, qmodel = outliers
    report = qmodel.post_training_report
    assert qmodel.plan.by_name["first"].spec.bits == 16
    assert {t.name for t in report["precision"].details.tensors} == {"first"}
    assert report["precision"].kept
    plain = qjax.quantize(model, qjax.Recipe(), BATCHES[0])
    qjax.calibrate(plain, BATCHES[:3])
    assert report.final.decibels > noise(model, plain, BATCHES[3:]) + 6
    np.testing.assert_allclose(report.final.decibels, noise(model, qmodel, BATCHES[3:]), rtol=1e-4)
    assert (report.held_out, report.examples, report.seen) == (16, 64, False)
    text = str(report)
    assert all(
        word in text
        for word in (
            "precision",
            "more bits for 0 weights, 1 activations",
            "true forward",
            "16 held-out examples of 64",
        )
    )


@pytest.mark.exhaustive
def test_what_it_returns_is_exact(outliers):
    _, qmodel = outliers
    x = BATCHES[0]
    graph = qjax.convert(qmodel, x)
    assert np.array_equal(qjax.exact(qmodel, x)(qmodel, x), graph(x))


@pytest.mark.exhaustive
def test_the_reports_recipe_gives_the_same_widths(outliers):
    model, qmodel = outliers
    again = qjax.quantize(model, qmodel.post_training_report.recipe, BATCHES[0])
    assert {n: q.spec for n, q in again.plan.quantizers} == {n: q.spec for n, q in qmodel.plan.quantizers}
    again.check_state()


def test_the_float_model_is_not_changed(outliers):
    model, _ = outliers
    fresh = nnx.to_flat_state(nnx.state(Outliers()))
    for (path, a), (_, b) in zip(nnx.to_flat_state(nnx.state(model)), fresh, strict=True):
        assert np.array_equal(a[...], b[...]), path


def test_a_step_that_makes_it_worse_is_taken_back(monkeypatch):
    def spoil(work):
        scale = work.qmodel.model.head.bias
        scale[...] = scale[...] + 1
        return "spoiled", None

    monkeypatch.setitem(steps.TABLE, "bias", spoil)
    model = Outliers()
    spoiled = qjax.post_training(model, qjax.Recipe(), BATCHES, steps=["bias"], progress=False)
    report = spoiled.post_training_report
    assert report["bias"].kept is False
    assert "spoiled; " in report["bias"].said
    assert "taken back" in str(report)
    states = (nnx.to_pure_dict(nnx.state(m, nnx.Param))["head"] for m in (spoiled.model, model))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert report.final.noise <= report["bias"].score.noise


def test_every_output_counts_alike_whatever_its_unit_is():
    box, pixels = np.asarray([0.1, -0.1]), np.asarray([300.0, 400.0])
    both = noise_of([(box, pixels)] * 2, [(box * 1.5, pixels)] * 2)
    np.testing.assert_allclose(both, 0.5**2 / 2)
    assert noise_of([box], [box]) == 0
    # an output of zeros has no signal to compare with
    assert noise_of([(box, 0 * box)], [(box, 0 * box)]) == 0
    assert noise_of([(box, 0 * box)], [(box, box)]) == 0.5


@pytest.mark.exhaustive
def test_a_loss_judges_where_there_is_one():
    pairs = [(x, jnp.arange(16) % 3) for x in BATCHES]

    def loss(output, batch):
        return -jnp.mean(jax.nn.log_softmax(output)[jnp.arange(16), batch[1]])

    def accuracy(output, batch):
        return jnp.mean((jnp.argmax(output, -1) == batch[1]).astype(jnp.float32))

    first = lambda batch: batch[0]  # noqa: E731
    found = qjax.post_training(
        Outliers(), qjax.Recipe(), pairs, inputs=first, loss=loss, metric=accuracy, steps=["bias"], progress=False
    )
    report = found.post_training_report
    before, after = (one.score for one in report.steps)
    assert report["bias"].kept == (after.loss <= before.loss)
    y = Outliers()(pairs[3][0])
    np.testing.assert_allclose(report.float_loss, loss(y, pairs[3]), rtol=1e-5)
    np.testing.assert_allclose(report.float_metric, accuracy(y, pairs[3]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"such as labels, must be in the batch"):
        qjax.post_training(Outliers(), qjax.Recipe(), BATCHES, metric=accuracy, steps=["bias"], progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "at least one batch"),
        ({"batches": [BATCHES[0].at[0, 0].set(jnp.nan)]}, "1 NaN or infinite numbers of 96 in batch 0"),
        ({"steps": ["gtpq"]}, "expected some of .*'gtpq'"),
        ({"effort": "much"}, "expected one of 'fast', 'standard', 'thorough'"),
        ({"recipe": qjax.Recipe(target="tflite_micro"), "steps": ["precision"]}, "'tflite_micro' do not support"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {"recipe": qjax.Recipe(), "batches": BATCHES, **change}
    recipe, batches = given.pop("recipe"), given.pop("batches")
    with pytest.raises(ValueError, match=message):
        qjax.post_training(Outliers(), recipe, batches, progress=False, **given)


@pytest.mark.exhaustive
def test_a_target_with_one_width_keeps_it():
    found = qjax.post_training(
        Outliers(), qjax.Recipe(target="tflite_micro"), BATCHES[0], effort="fast", progress=False
    )
    assert {q.spec.bits for _, q in found.plan.quantizers} == {8}
    report = found.post_training_report
    assert report["precision"].kept is None
    assert "one width" in report["precision"].said
    assert (report.held_out, report.examples) == (4, 16)


@pytest.mark.exhaustive
def test_a_walk_computes_what_the_model_computes():
    model = Outliers()
    qmodel = qjax.quantize(model, qjax.Recipe(), BATCHES[0])
    walk = Walk(qmodel, BATCHES_ARGS := [(x,) for x in BATCHES[:2]])
    assert [item.name for item in walk.items] == ["first/kernel", "second/kernel", "head/kernel"]
    for x, y in zip(BATCHES, walk.outputs(Stream.of(qmodel, quantized=False), BATCHES_ARGS), strict=False):
        np.testing.assert_allclose(y, model(x), rtol=1e-5, atol=1e-4)
    # the roundings of the bias and of products beyond 2^24 are all that a walk leaves out
    for x, y in zip(BATCHES, walk.outputs(Stream.of(qmodel), BATCHES_ARGS), strict=False):
        step = np.asarray(qmodel.qparams()["head"].scale)
        assert np.max(np.abs(np.asarray(y) - np.asarray(qmodel(x)))) <= 1.01 * step
    assert dataclasses.is_dataclass(Stream)


class Pooled(nnx.Module):
    """Two wide convolutions with a pool between them: the second one's sums outgrow int32 with inputs of 16 bits."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.first = nnx.Conv(1, 64, (3, 3), rngs=rngs)
        self.second = nnx.Conv(64, 4, (9, 9), rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2)))


class Selected(Pooled):
    """The same with a PReLU, which selects codes by a mask."""

    def __call__(self, x):
        x = self.first(x)
        return self.second(nnx.max_pool(jnp.where(x >= 0, x, x * np.float32(0.25)), (2, 2), (2, 2)))


@pytest.mark.parametrize("model", [Pooled, Selected])
def test_precision_sees_the_sums_behind_a_pool(model):
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
    # weights of 12 bits cost nothing, so all of the noise is that of activations
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=12, symmetric=True, axis=-1))
    qmodel = qjax.quantize(model(), recipe, x)
    qjax.calibrate(qmodel, [x])
    found = qjax.training.widen(qmodel, [x], activations=1.0)
    assert "may leave int32" in str(found)
    qjax.convert(qmodel, x)


class Wide(nnx.Module):
    """A small layer with channels of unlike ranges, and a large one behind it."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.small = nnx.Linear(16, 4, rngs=rngs)
        self.large = nnx.Linear(4, 2584, rngs=rngs)
        # a large weight of an input that is nearly zero leaves few codes to the others
        self.small.kernel[...] = self.small.kernel[...].at[0].multiply(30)

    def __call__(self, x):
        return self.large(self.small(x * jnp.asarray([[0.001, *[1.0] * 15]])))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.sampled(1)
def test_a_small_weight_that_costs_most_gets_more_bits(bits):
    x = data(16, 16)
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1), activations=qjax.QSpec(bits=16))
    qmodel = qjax.quantize(Wide(), recipe, x)
    found = qjax.training.widen(qmodel, [x], weights=0.1)
    assert [(t.name, t.kind, t.before) for t in found.tensors] == [("small/kernel", "weight", bits)]
    assert qmodel.plan.by_name["small/kernel"].spec.bits >= 8
    assert found.bytes[0] < found.bytes[1] <= found.bytes[0] + 0.1 * 10400 / 8
    assert "small/kernel" in str(found)
    assert np.array_equal(qjax.exact(qmodel, x)(qmodel, x), qjax.convert(qmodel, x)(x))
    kept = qjax.quantize(Wide(), qjax.Recipe(weights=recipe.weights, target="tflite_micro"), x)
    assert all(t.bits == 8 for t in qjax.training.widen(kept, [x], weights=0.1).tensors)


class Twins(nnx.Module):
    """Two layers of one size that are added. The inputs of the first are copies of two numbers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.copies, self.apart, self.last = (nnx.Linear(n, m, rngs=rngs) for n, m in ((64, 8), (64, 8), (8, 64)))
        # a few great weights leave few codes to the others
        self.copies.kernel[...] = self.copies.kernel[...].at[:4].multiply(12)
        self.apart.kernel[...] = self.apart.kernel[...].at[0].multiply(8)

    def __call__(self, x):
        return self.last(self.copies(jnp.repeat(x[:, :2], 32, axis=1)) + self.apart(x[:, 2:]))


@pytest.mark.parametrize(("names", "wanted"), [(["precision"], "copies"), (["precision", "gptq"], "apart")])
@pytest.mark.sampled(1)
def test_weights_get_more_bits_by_what_is_left_behind_gptq(names, wanted):
    """The errors of inputs that are copies of one another cancel, if GPTQ rounds the weights."""
    batches = [data(64, 66, seed=seed) for seed in range(4)]
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), activations=qjax.QSpec(bits=16))
    found = qjax.post_training(Twins(), recipe, batches, steps=names, progress=False)
    widened = {t.name for t in found.post_training_report["precision"].details.tensors}
    assert widened == {f"{wanted}/kernel"}


def test_scales_found_at_run_time_are_judged_by_the_float_model():
    model = Outliers()
    recipe = qjax.Recipe(overrides={".*": qjax.Dynamic(per="row")})
    qmodel = qjax.post_training(model, recipe, BATCHES, progress=False)
    report = qmodel.post_training_report
    assert 0 < report.final.decibels < 60
    np.testing.assert_allclose(report.final.decibels, noise(model, qmodel, BATCHES[3:]), rtol=1e-4)
    np.testing.assert_allclose(report.steps[0].score.decibels, report.final.decibels, rtol=1e-4)


def test_a_step_after_which_convert_would_refuse_is_taken_back(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (8, 8, 8, 1))
    monkeypatch.setattr("qjax.contrib.post_training.precision._Space.chosen", lambda *_: ({"first": 16}, {}, {}))
    monkeypatch.setattr("qjax.contrib.post_training.scoring.Judge.better", lambda *_: True)
    result = qjax.post_training(Pooled(), qjax.Recipe(weights=qjax.QSpec(bits=12, axis=-1)), [x], steps=["precision"])
    (row,) = [row for row in result.post_training_report.steps if row.step == "precision"]
    assert row.kept is False
    assert "convert would refuse it" in row.said
    qjax.convert(result, x)


@pytest.mark.parametrize(("size", "sizes"), [(8, [2, 2, 2, 2]), (4, [1, 1, 1, 1]), (6, [5, 1]), (3, [2, 1])])
def test_a_single_batch_is_cut_into_parts_to_fit_and_one_to_judge(size, sizes):
    images, labels = np.arange(size * 2.0).reshape(size, 2), np.arange(size)
    fit, held, seen = split([((images, labels), (images,))], lambda batch: batch[0])
    assert not seen
    assert [len(args[0]) for _, args in (*fit, *held)] == sizes
    assert len(held) == 1
    for position in range(2):
        joined = np.concatenate([batch[position] for batch, _ in (*fit, *held)])
        assert np.array_equal(joined, (images, labels)[position])


def test_one_example_is_fitted_and_judged():
    images = np.zeros((1, 2))
    fit, held, seen = split([(images, (images,))], None)
    assert seen
    assert fit == held
