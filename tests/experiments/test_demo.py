"""The pieces of the demo: data, training loop, exact steps, picture, and the whole of it in little."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from experiments import demo
from experiments.accuracy import digits as accuracy
from experiments.data import digits
from experiments.models import CNN, MLP, ResNet
from experiments.training import Schedule, one_hot, parameter_bytes, scores, train


@pytest.fixture(autouse=True)
def optax_promotion():
    """optax mixes dtypes; the library's own strictness is tested elsewhere."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_split_is_stratified_fixed_and_disjoint():
    first, again = digits(), digits()
    assert np.array_equal(first.test_images, again.test_images)
    assert first.train_images.shape == (1297, 8, 8, 1)
    assert first.test_images.shape == (500, 8, 8, 1)
    train_share, test_share = (np.bincount(y) / len(y) for y in (first.train_labels, first.test_labels))
    assert np.abs(train_share - test_share).max() < 0.002
    kept = first.validation()
    assert len(kept.train_images) + len(kept.test_images) == 1297
    assert np.array_equal(np.concatenate([kept.train_images, kept.test_images]), first.train_images)


@pytest.mark.parametrize("make", [MLP, CNN, ResNet])
@pytest.mark.sampled(1)
def test_models_give_ten_scores_and_shapes_do_not_depend_on_the_batch(make):
    model = make(rngs=nnx.Rngs(0))
    model.eval()
    for batch in (1, 5):
        assert jax.eval_shape(model, np.zeros((batch, 8, 8, 1), np.float32)).shape == (batch, 10)


def test_parameter_bytes_counts_every_float():
    # 64*48+48 + 48*48+48 + 48*10+10 numbers of 4 bytes
    assert parameter_bytes(MLP(rngs=nnx.Rngs(0))) == 4 * 5962


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_training_learns_and_the_same_seed_gives_the_same_bits():
    data = digits()
    runs = []
    for _ in range(2):
        model = MLP(rngs=nnx.Rngs(0))
        history = train(model, data.train_images, one_hot(data.train_labels), Schedule(4), seed=0)
        assert history.loss[-1] < history.loss[0] / 3
        runs.append(np.asarray(scores(model, data.test_images)))
    assert np.array_equal(*runs)


@pytest.mark.exhaustive
def test_scales_have_a_rate_of_their_own():
    data = digits()
    images, labels = data.train_images[:256], one_hot(data.train_labels[:256])
    qmodel = qjax.quantize(MLP(rngs=nnx.Rngs(0)), accuracy.recipe_of(8), images)
    assert isinstance(qmodel.model, MLP)
    before = {name: np.asarray(qparams.scale) for name, qparams in qmodel.qparams().items()}
    weights = np.asarray(qmodel.model.head.kernel[...])
    train(qmodel, images, labels, Schedule(1, scale_rate=0.0), seed=0)
    assert all(np.array_equal(before[name], qparams.scale) for name, qparams in qmodel.qparams().items())
    assert not np.array_equal(weights, qmodel.model.head.kernel[...])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_exact_step_is_the_graph_of_that_step():
    data = digits()
    images, labels = data.train_images[:192], one_hot(data.train_labels[:192])
    qmodel = qjax.quantize(MLP(rngs=nnx.Rngs(0)), demo.recipe_of(8), images)
    check = demo.ExactSteps(images[:4])
    train(
        qmodel,
        images,
        labels,
        Schedule(1, batch_size=64),
        seed=0,
        forward=qjax.exact(qmodel, images[:4]),
        on_step=check,
    )
    assert (check.steps, check.outputs, check.different) == (3, 1920, 0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_demo_runs_and_its_integers_agree(tmp_path):
    rows = demo.main(["--quick", "--epochs", "1", "--out", str(tmp_path)])
    assert [row.name for row in rows] == ["W8A8", "W4A4"]
    for row in rows:
        assert row.exact_outputs_that_differ == 0
        assert row.codes_that_differ / row.codes_compared < 2e-5
        assert row.constant_bytes < row.file_bytes < row.float_bytes
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["exact_training"] == {"steps": 2, "outputs": 12800, "different": 0}
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    shipped = qjax.load(tmp_path / "model.qjax")(digits().test_images)
    assert float(np.mean(np.argmax(np.asarray(shipped), -1) == digits().test_labels)) == rows[0].graph_accuracy
