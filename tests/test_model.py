"""quantize, the training forward, calibrate: what they keep, what they move, what they list."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportAttributeAccessIssue=false

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax import Override, QSpec, Recipe, calibration
from tests.layers.round_trip import assert_same, data, host, train_step


class ConvNet(nnx.Module):
    """conv, batch norm, relu, residual, pooling, dropout, head."""

    def __init__(self, width=3):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(2, width, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(width, momentum=0.8, rngs=rngs)
        self.conv = nnx.Conv(width, width, (1, 1), rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.stem(x)))
        x = nnx.relu(x + self.conv(x))
        return self.head(self.drop(jnp.mean(x, axis=(1, 2))))


IMAGES = data(4, 4, 4, 2)


@pytest.fixture(scope="module")
def qmodel():
    model = qjax.quantize(ConvNet(), Recipe(), IMAGES)
    model.eval()
    return model


def places(qmodel, batch):
    """What the annotator finds: labels, names and shapes without the batch."""
    annotation = qmodel.trace(batch).annotation
    found = [(p.label, p.name, p.kind, p.op, p.shape[1:]) for p in annotation.values.values()]
    return found + [(p.label, p.name, p.kind, p.op, p.shape) for p in annotation.weights.values()]


@pytest.mark.exhaustive
def test_same_tensors_in_training_and_evaluation_and_at_any_batch(qmodel):
    model = nnx.clone(qmodel)
    model.eval()
    expected = places(model, IMAGES)
    assert [name for _, name, *_ in expected] == [name for name, _ in qmodel.plan.quantizers]
    assert places(model, IMAGES[:1]) == expected
    assert places(model, data(7, 4, 4, 2)) == expected
    model.train()
    assert places(model, IMAGES) == expected
    assert places(model, data(7, 4, 4, 2)) == expected


def test_summary_lists_every_quantizer(qmodel):
    lines = qmodel.summary().splitlines()
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == [name for name, _ in qmodel.plan.quantizers]
    assert lines[0].split()[:4] == ["quantizer", "kind", "module", "op"]
    qparams = qmodel.qparams()
    for name, quantizer in qmodel.plan.quantizers:
        row = rows[name]
        assert f"int8 [{quantizer.spec.qmin}, {quantizer.spec.qmax}]" in row
        assert "lsq" in row
        if name.endswith("kernel"):
            assert " weight " in row
            assert "axis" in row
        else:
            assert "per tensor" in row
            assert f"{float(qparams[name].scale):.4g}" in row
            assert row.split()[-1] == str(int(qparams[name].zero_point))
    assert "batchx4x4x2" in rows["input"]
    assert "3x3x2x3" in rows["stem/kernel"]
    assert set(rows) == {"input", "stem", "stem/kernel", "conv", "conv/kernel", "add", "sum", "head", "head/kernel"}


def test_a_call_that_takes_another_path_is_refused():
    class Fork(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x, other=False):
            return self.b(x) if other else self.a(x)

    x = data(2, 3)
    model = qjax.quantize(Fork(), Recipe(), x)
    assert model(x).shape == (2, 3)
    with pytest.raises(ValueError, match=r"tensor 'b.*was not there when the model was quantized"):
        model(x, other=True)


def test_quantize_takes_modules_only():
    with pytest.raises(TypeError, match=r"expected a flax nnx.Module.*from_linen"):
        qjax.quantize(lambda x: x, Recipe(), data(2, 3))  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------- what moves


@pytest.mark.exhaustive
def test_training_leaves_the_original_alone_and_moves_the_copy():
    model = ConvNet()
    before = host(nnx.state(model))
    qmodel = qjax.quantize(model, Recipe(), IMAGES)
    assert_same(before, host(nnx.state(model)))
    start = host(nnx.state(qmodel))
    first = train_step(qmodel, IMAGES, 0.1)
    last = train_step(qmodel, IMAGES, 0.1)
    assert last < first
    assert_same(before, host(nnx.state(model)))
    after = host(nnx.state(qmodel))
    for path in (("model", "stem", "kernel"), ("model", "bn", "mean"), ("quantizers", "learned_log2_scale")):
        a, b = start, after
        for key in path:
            a, b = a[key], b[key]
        assert not np.array_equal(a[...], b[...]), path


def test_evaluation_and_calibration_move_no_state_of_the_model(qmodel):
    model = nnx.clone(qmodel)
    model.train()
    before = host(nnx.state(model))
    qjax.calibrate(model, [IMAGES * 3, IMAGES])
    assert_same(before["model"], host(nnx.state(model))["model"])
    assert not np.array_equal(before["quantizers"]["learned_log2_scale"][...], model.quantizers.learned_log2_scale[...])
    calibrated = host(nnx.state(model))
    model.eval()
    model(IMAGES)
    model.codes(IMAGES)
    qjax.verify(qjax.convert(model, IMAGES), model, [IMAGES])
    assert_same(calibrated, host(nnx.state(model)))


def test_batch_statistics_move_as_in_flax():
    """With quantizers of 16 bits the statistics are those of the float model, up to the quantization of the data."""
    wide = Recipe(weights=QSpec(bits=16, axis=-1), activations=QSpec(bits=16, symmetric=False))
    model = ConvNet()
    with pytest.warns(UserWarning, match="beyond int32"):
        qmodel = qjax.quantize(model, wide, 2 * IMAGES)
    model.train()
    qmodel.train()
    for seed in range(3):
        batch = data(4, 4, 4, 2, seed=seed)
        model(batch)
        qmodel(batch)
    for name in ("mean", "var"):
        expected, got = getattr(model.bn, name)[...], getattr(qmodel.model.bn, name)[...]
        assert not np.allclose(got, 0.0 if name == "mean" else 1.0, atol=1e-2)
        # 2^-15 of the range per operand, 18 products per sum
        assert np.abs(np.asarray(expected) - np.asarray(got)).max() < 18 * 2.0**-13
    qmodel.eval()
    before = host(nnx.state(qmodel))
    qmodel(IMAGES)
    assert_same(before, host(nnx.state(qmodel)))


# ---------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("name", calibration.names())
@pytest.mark.sampled(2)
def test_every_observer_by_name(qmodel, name):
    model = nnx.clone(qmodel)
    # a moving average lies below the last batch, which is twice as large, and clips it
    clips = pytest.warns(UserWarning, match="keeps .* dB") if name == "moving_average" else contextlib.nullcontext()
    with clips:
        qjax.calibrate(model, [IMAGES, 2 * IMAGES], observer=name)
    for key, p in model.qparams().items():
        scale = np.asarray(p.scale)
        assert np.isfinite(scale).all(), key
        assert (scale > 0).all(), key
    if name == "minmax":
        low, high = float(IMAGES.min()) * 2, float(IMAGES.max()) * 2
        expected = np.float32((high - low) / 255)
        assert np.isclose(model.qparams()["input"].scale, expected, rtol=1e-6, atol=0)


@pytest.mark.exhaustive
def test_observer_of_the_recipe_and_of_the_user():
    seen = []

    def spy(batch):
        seen.append(batch.shape)
        return -1.0, 3.0

    callback = calibration.Callback(spy)
    model = qjax.quantize(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), Recipe(observer=callback), data(4, 3))
    qjax.calibrate(model, [data(4, 3), data(4, 3)])
    for name in ("input", "dot"):
        p = model.qparams()[name]
        assert np.isclose(p.scale, 4 / 255, rtol=1e-6, atol=0)
        assert p.zero_point == -128 + round(255 / 4)
    assert (4, 3) in seen
    assert (4, 2) in seen


@pytest.mark.exhaustive
def test_calibration_merges_batches_of_any_size(qmodel):
    whole, parts = nnx.clone(qmodel), nnx.clone(qmodel)
    batch = data(5, 4, 4, 2, seed=3)
    qjax.calibrate(whole, [batch])
    qjax.calibrate(parts, (batch[i:j] for i, j in ((0, 2), (2, 5))))
    assert_same(host(nnx.state(whole))["quantizers"], host(nnx.state(parts))["quantizers"])


def test_calibration_holds_one_batch_at_a_time(qmodel):
    """A generator of batches: each may go before the next one is made."""
    import gc
    import weakref

    model, alive = nnx.clone(qmodel), []
    # a collection looks at what the loop makes, and not at everything that other tests have left
    gc.freeze()

    class Batch(np.ndarray):
        """An array that can be referred to weakly."""

    def batches():
        for seed in range(4):
            batch = np.asarray(data(4, 4, 4, 2, seed=seed)).view(Batch)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1

    try:
        qjax.calibrate(model, batches())
    finally:
        gc.unfreeze()
    assert len(alive) == 4


def test_nan_in_the_data_names_the_quantizer(qmodel):
    bad = np.array(IMAGES)
    bad[0, 0, 0, 0] = np.nan
    model = nnx.clone(qmodel)
    before = host(nnx.state(model))
    with pytest.raises(ValueError, match=r"Quantizer 'input'.*NaN"):
        qjax.calibrate(model, [IMAGES, bad])
    assert_same(before, host(nnx.state(model)))


@pytest.mark.exhaustive
def test_verify_takes_modules_that_no_cache_can_be_keyed_by():
    class Configured(nnx.Module):
        def __init__(self):
            self.config = {"sizes": [4, 2]}
            self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
            self.between = nnx.static({"scale": np.float32(2)})

        def __call__(self, x):
            return self.dense(x) * self.between["scale"]

    x = data(3, 4)
    qmodel = qjax.quantize(Configured(), Recipe(), x)
    with pytest.raises(TypeError, match="unhashable"):
        hash(nnx.split(qmodel)[0])
    assert qjax.verify(qjax.convert(qmodel, x), qmodel, [x, x]).exact


def test_calibration_needs_a_batch(qmodel):
    with pytest.raises(ValueError, match="at least one batch, got none"):
        qjax.calibrate(nnx.clone(qmodel), [])


# ---------------------------------------------------------------------------- methods


class Small(nnx.Module):
    def __init__(self, **kwargs):
        self.a = nnx.Linear(6, 5, rngs=nnx.Rngs(0), **kwargs)
        self.b = nnx.Linear(5, 3, rngs=nnx.Rngs(1), **kwargs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def fit(qmodel, x, steps=12, forward=None, eps=1e-8):
    """Adam towards a fixed target; the losses."""
    forward = forward or (lambda m, x: m(x))
    optimizer = nnx.Optimizer(qmodel, optax.adam(3e-2, eps=eps), wrt=nnx.Param)
    target = data(x.shape[0], 3, seed=7)

    @nnx.jit
    def step(qmodel, optimizer, x):
        def loss(m):
            return jnp.mean(jnp.square(forward(m, x).astype(jnp.float32) - target))

        value, grads = nnx.value_and_grad(loss)(qmodel)
        with jax.numpy_dtype_promotion("standard"):  # optax divides by an integer count
            optimizer.update(qmodel, grads)
        return value

    return [float(step(qmodel, optimizer, x)) for _ in range(steps)]


METHODS = {
    "lsq": Recipe(),
    "lsq_plus": Recipe(method="lsq_plus"),
    "pact": Recipe(method="static", overrides={"a": Override(method="pact", activations=QSpec(bits=8, signed=False))}),
    "tqt": Recipe(method="tqt", weight_method="tqt", activations=QSpec(bits=8)),
    "static": Recipe(method="static", weight_method="static"),
    "dynamic": Recipe(method="static", weight_method="dynamic"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", METHODS)
def test_methods_learn_and_convert(name):
    x = data(16, 6)
    qmodel = qjax.quantize(Small(), METHODS[name], x)
    start = {k: np.asarray(p.scale) for k, p in qmodel.qparams().items()}
    losses = fit(qmodel, x)
    assert losses[-1] < 0.8 * losses[0]
    end = {k: np.asarray(p.scale) for k, p in qmodel.qparams().items()}
    for key, scale in end.items():
        assert np.isfinite(scale).all(), key
        assert (scale > 0).all(), key
        if dict(qmodel.plan.quantizers)[key].method == "tqt":
            assert (np.frexp(scale)[0] == 0.5).all(), key
    moved = {key for key in start if not np.array_equal(start[key], end[key])}
    if name in ("static", "dynamic"):
        assert not moved
    elif name == "pact":
        assert moved == {"a", "a/kernel", "b/kernel"}
    elif name != "tqt":
        assert moved == set(start)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    forward = nnx.jit(qjax.exact(qmodel, x))
    assert np.array_equal(forward(qmodel, x), graph(x))
    report = qjax.verify(graph, qmodel, [x])
    assert report.local <= 1
    assert report.local_max <= 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.exhaustive
def test_low_precision_models(dtype):
    x = data(16, 6)
    qmodel = qjax.quantize(Small(dtype=dtype, param_dtype=dtype), Recipe(), x)
    # Adam's own 1e-8 is zero in float16, and a division by it infinite
    losses = fit(qmodel, x, eps=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    qmodel.eval()
    assert qmodel(x).dtype == dtype
    assert qmodel.model.a.kernel[...].dtype == dtype
    graph = qjax.convert(qmodel, x)
    value = nnx.jit(qjax.exact(qmodel, x))(qmodel, x)
    assert np.array_equal(np.asarray(value, np.float32), np.asarray(graph(x), np.float32))
    report = qjax.verify(graph, qmodel, [x, 2 * x])
    assert report.local <= 1, str(report)
    assert report.local_max <= 1, str(report)
