"""Ranges that cannot be right are named: constants beyond the data, data that are a single number, lost channels."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

DATA = np.asarray(jax.random.normal(jax.random.key(1), (16, 6, 8)))
EVEN = np.arange(8) % 2 == 0


class Formed(nnx.Module):
    """A function of the input, and a layer that reads the input as well."""

    def __init__(self, form):
        self.form, self.dense = form, nnx.Linear(8, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.form(x), self.dense(x)


def converted(model, x, recipe=None):
    """The graph of a calibrated model, and the messages of all warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        qmodel = qjax.quantize(model, recipe or qjax.Recipe(), x)
        qjax.calibrate(qmodel, [x])
        qmodel.eval()
        graph = qjax.convert(qmodel, x)
    return graph, qmodel, [str(each.message) for each in said]


CONSTANTS = {
    "pad": lambda x: jnp.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=50.0),
    "interior": lambda x: jax.lax.pad(x, np.float32(50.0), ((0, 0, 0), (0, 0, 1), (0, 0, 0))),
    "where": lambda x: jnp.where(EVEN, x, 50.0),
    "where of data": lambda x: jnp.where(x[:, :1] > 0, x, 50.0),
    "where below": lambda x: jnp.where(x[:, :1] > 0, x, -20.0),
    "clip": lambda x: jnp.clip(x, 5.0, 10.0),
    "maximum of an array": lambda x: jnp.maximum(x, 3 * np.arange(8, dtype=np.float32)[None, None]),
    "minimum": lambda x: jnp.minimum(x[:, ::-1], -7.0),
    "max with an initial value": lambda x: jnp.max(x, axis=1, initial=20.0),
    "max of nothing": lambda x: jnp.max(x, axis=1, initial=-20.0, where=np.arange(6)[:, None] > 8),
    "in a scan": lambda x: jax.lax.scan(
        lambda c, v: (jnp.where(v[:, :1] > 0, v, 12.0), c), jnp.zeros((len(x), 8)), jnp.moveaxis(x, 1, 0)
    )[1].transpose(1, 0, 2),
    "in remat": jax.checkpoint(lambda x: jnp.where(x[:, :1] > 0, x, 12.0)),
    "beyond an interval": lambda x: jnp.where(x[:, :1] > 0, jax.nn.sigmoid(x), 2.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_beyond_the_data_is_in_the_range(name):
    form = CONSTANTS[name]
    graph, _, said = converted(Formed(form), DATA)
    got, wanted = np.asarray(graph(DATA)[0]), np.asarray(form(DATA))
    assert said == []
    (output, *_) = graph.ir.outputs
    quantization = graph.ir.tensors[output].quantization
    assert quantization is not None
    step = float(np.asarray(quantization.scale))
    # an element within the range is at most half a step off the operand's code, which is half a step off itself
    assert np.max(np.abs(got - wanted)) <= 1.01 * step


@pytest.mark.exhaustive
def test_other_readers_of_the_operand_lose_no_codes():
    graph, _, _ = converted(Formed(lambda x: jnp.where(x[:, :1] > 0, x, 50.0)), DATA)
    codes = np.asarray(graph.quantize(DATA))
    assert np.array_equal(np.unique(codes)[[0, -1]], [-128, 127])


FAR = {
    "999": (lambda x: jnp.where(x[:, :1] > 0, x, 999.0), "999"),
    "-1e9": (lambda x: jnp.where(x[:, :1] > 0, x, -1e9), "-1e+09"),
    "cummax": (lambda x: jax.lax.cummax(jnp.where(x[:, :1] > 0, x, -1e9), axis=1), "-1e+09"),
    "infinity": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=-jnp.inf), "-inf"),
}


@pytest.mark.parametrize("name", FAR)
@pytest.mark.sampled(2)
def test_a_constant_that_no_range_can_hold_is_named(name):
    form, number = FAR[name]
    _, _, said = converted(Formed(form), DATA)
    assert len(said) == 2  # of the sample, and of calibrate
    assert all(f"puts {number} among numbers" in message for message in said)
    assert all("test_ranges_that_fit.py" in message for message in said)


HIDDEN = {
    "softmax": lambda x: jax.nn.softmax(jnp.where(x[:, :1] > 0, x, -1e9)),
    "max": lambda x: jnp.max(jnp.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=-jnp.inf), axis=1),
    "argmax": lambda x: jnp.argmax(jnp.where(EVEN, x, -1e9), axis=-1),
    "min": lambda x: jnp.min(jnp.where(EVEN, x, 1e9), axis=-1),
    "relu": lambda x: jax.nn.relu(jnp.where(x[:, :1] > 0, x, -30.0)),
    "top_k": lambda x: jax.lax.top_k(jnp.where(EVEN, x, -jnp.inf), 2)[0],
    "zero": lambda x: jnp.where(x[:, :1] > 0, x, 0.0),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.sampled(2)
def test_what_its_readers_ignore_does_not_widen_a_range(name):
    form = HIDDEN[name]
    graph, _, said = converted(Formed(form), DATA)
    assert said == []
    scales = [np.max(t.quantization.scale) for t in graph.ir.tensors.values() if t.quantization is not None]
    assert max(scales) < 0.05


def test_a_row_without_a_choice_widens_what_its_maximum_hid():
    graph, _, _ = converted(Formed(CONSTANTS["max of nothing"]), DATA)
    assert np.array_equal(np.unique(np.round(np.asarray(graph(DATA)[0]))), [-20.0])


# ---------------------------------------------------------------------------- a single number


def mlp():
    return nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 4, rngs=nnx.Rngs(1)))


@pytest.fixture
def blind():
    """A model whose sample was zeros."""
    return qjax.quantize(mlp(), qjax.Recipe(), jnp.zeros((1, 16)))


X = np.asarray(jax.random.normal(jax.random.key(0), (64, 16)))


@pytest.mark.exhaustive
def test_a_sample_of_zeros_is_known_until_calibrate(blind):
    assert [each.name for each in blind.plan.blind] == ["input", "layers/0", "layers/2"]
    qjax.calibrate(blind, [X])
    assert blind.plan.blind == ()
    blind.eval()
    qjax.convert(blind, X)


def test_convert_exact_emit_and_verify_name_what_saw_nothing(blind, tmp_path):
    blind.eval()
    with pytest.warns(UserWarning, match=r"convert: 3 quantizers .*'input' saw only 0; .*qjax\.calibrate"):
        graph = qjax.convert(blind, X)
    with pytest.warns(UserWarning, match="exact: 3 quantizers"):
        qjax.exact(blind, X)
    graph.save(tmp_path / "a.qjax")
    with pytest.warns(UserWarning, match=r"emit: the ranges of 3 quantizers \('input', "):
        qjax.load(tmp_path / "a.qjax").emit("c", tmp_path / "c")
    report = qjax.verify(graph, blind, [X])
    first, second, *_ = str(report).splitlines()
    assert first.endswith("the codes from 0 to 255. Calibrate with data like these.")
    assert second.startswith("The ranges of 3 quantizers ('input', 'layers/0', 'layers/2') come from a single number")


def test_the_first_training_step_names_what_saw_nothing(blind):
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x))))
    with pytest.warns(UserWarning, match="The call: 3 quantizers"):
        step(blind, X)


@pytest.mark.exhaustive
def test_numbers_that_came_otherwise_are_no_longer_blind(blind):
    other = qjax.quantize(mlp(), qjax.Recipe(), X)
    nnx.update(blind, nnx.state(other))  # as a checkpoint is restored
    blind.eval()
    graph = qjax.convert(blind, X)
    other.eval()
    assert np.array_equal(graph(X), qjax.convert(other, X)(X))


@pytest.mark.parametrize("number", [0.0, 1.0, -2.5])
def test_calibrate_says_that_its_data_were_blank(number):
    qmodel = qjax.quantize(mlp(), qjax.Recipe(), X)
    with pytest.warns(UserWarning, match=rf"calibrate: .* a single number.*: 'input' saw only {number:.6g}[;.]"):
        qjax.calibrate(qmodel, [np.full((4, 16), number, np.float32)] * 2)


@pytest.mark.exhaustive
def test_verify_counts_inputs_outside_of_the_range():
    qmodel = qjax.quantize(mlp(), qjax.Recipe(), X)
    qjax.calibrate(qmodel, [X / 255])
    qmodel.eval()
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X])
    (of_input,) = report.inputs
    found = qmodel.qparams()["input"]
    scale, zero_point = np.asarray(found.scale, np.float64), np.asarray(found.zero_point, np.float64)
    steps = np.asarray(X, np.float64) / scale + zero_point
    spec = qmodel.plan.by_name["input"].spec
    assert of_input.clipped == np.sum((steps < spec.qmin - 0.5) | (steps > spec.qmax + 0.5))
    assert of_input.compared == X.size
    assert str(report).startswith(f"{of_input.clipped / X.size:.1%} of the numbers of 'input' are clipped")


# ---------------------------------------------------------------------------- channels of unlike size


UNLIKE = np.asarray([[1e3, 1e3, 1, 1e3, 1, 1e3]], np.float32)


class Head(nnx.Module):
    """Boxes in pixels and scores between 0 and 1, apart or in one output."""

    def __init__(self, joined):
        rngs = nnx.Rngs(0)
        self.joined, self.box, self.score = joined, nnx.Linear(16, 4, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        boxes, scores = nnx.sigmoid(self.box(x)) * 640, nnx.sigmoid(self.score(x))
        return jnp.concatenate([boxes, scores], -1) if self.joined else (boxes, scores)


def test_scores_beside_boxes_are_named():
    _, _, said = converted(Head(joined=True), X)
    assert len(said) == 2
    assert all(
        "never leave one or two codes" in m and "Return parts of different magnitude separately" in m for m in said
    )


def test_channels_of_few_values_lie_close_together_by_chance():
    """Of 784 pixels of two random images, some have both values within a code."""
    x = np.random.default_rng(0).normal(size=(2, 784)).astype(np.float32)
    spread = np.ptp(x, axis=0)
    assert spread.min() < np.ptp(x) / 255  # one is that narrow here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qjax.quantize(nnx.Linear(784, 4, rngs=nnx.Rngs(0)), qjax.Recipe(), x)


class Classifier(nnx.Module):
    """Has many classes that few data do not show, as probabilities or as exponentials of unlike size."""

    def __init__(self, last):
        self.inner, self.last = nnx.Linear(16, 500, rngs=nnx.Rngs(0)), last

    def __call__(self, x):
        return self.last(self.inner(x) * 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("last", [nnx.softmax, lambda h: nnx.sigmoid(h - 30)])
def test_probabilities_of_classes_that_the_data_do_not_show_are_fine(last):
    assert converted(Classifier(last), X)[2] == []


def test_exponentials_of_unlike_size_are_named():
    assert converted(Classifier(jnp.exp), X)[2]


class Embedding(nnx.Module):
    """Examples that hardly differ: each channel has a large mean of its own."""

    def __init__(self):
        self.inner = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.mean = nnx.Param(np.linspace(-1, 1, 32, dtype=np.float32))

    def __call__(self, x):
        return self.inner(x) * 1e-3 + self.mean[None]


def test_examples_that_hardly_differ_are_named():
    _, _, said = converted(Embedding(), X)
    assert said
    for message in said:
        assert re.search(
            r"channels along axis 1 \(.*\) move by 0\.00\d+ at most and never leave one or two codes", message
        )
        assert "All channels hardly differ between examples: calibrate with data" in message


@pytest.mark.exhaustive
def test_scores_apart_from_boxes_are_fine():
    assert converted(Head(joined=False), X)[2] == []


@pytest.mark.exhaustive
def test_a_single_product_with_channels_of_unlike_size_is_named():
    model = nnx.Linear(16, 6, rngs=nnx.Rngs(0))
    model.kernel[...] = model.kernel[...] * UNLIKE
    _, _, said = converted(model, X)
    assert all("2 of 6 channels along axis 1 (2, 4)" in message for message in said)
    assert len(said) == 2


def test_inputs_with_units_of_their_own_are_named():
    x = X[:, :3] * np.asarray([1.0, 1e3, 1e-2], np.float32)
    _, _, said = converted(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), x)
    assert all(m.startswith("Input 'input'") and "2 of 3 channels along axis 1 (0, 2)" in m for m in said)
    assert len(said) == 2


def test_a_norm_behind_channels_of_unlike_size_is_named():
    class Normed(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(16, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)
            self.dense.kernel[...] = self.dense.kernel[...] * UNLIKE

        def __call__(self, x):
            return self.norm(self.dense(x))

    _, _, said = converted(Normed(), X)
    assert [m for m in said if m.startswith("Tensor 'dense'") and "2 of 6 channels along axis 1 (2, 4)" in m]


@pytest.mark.exhaustive
def test_channels_that_do_not_move_in_floats_are_fine():
    x = np.concatenate([X[:, :8], np.full((64, 8), 1e-4, np.float32)], axis=1)
    assert converted(mlp(), x)[2] == []


def test_verify_names_the_worst_channel():
    from qjax.comparison.verify_report import OutputReport

    report = OutputReport("y", 1.0, (1.0, 1.0, 0.0), (1e6, 1.0, 5.0))
    assert report.worst == (1, 0.0)
    assert round(report.decibels, 3) == round(10 * np.log10(1000006 / 2), 3)
