"""The trainer's arithmetic on networks: the emulated forward against numpy, and the bands' recursion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.methods import Setting
from experiments.lab import network_precision, precision_claims, precision_outcomes
from experiments.lab.machine_forward import scores_on
from experiments.lab.machines import BFLOAT16, FLOAT32, TF32
from experiments.lab.precision_outcomes import Compared, Forwards, Trained, compared
from experiments.models.small import CNN
from qjax.contrib.lab.study import Settings


def quantized(model, x):
    model.eval()
    qmodel = qjax.quantize(model, Setting(8, 8).recipe(), x)
    qmodel.eval()
    return qmodel


@pytest.mark.exhaustive
def test_the_integer_valued_forward_does_not_know_its_machine():
    x = np.random.default_rng(0).standard_normal((16, 8, 8, 1)).astype(np.float32)
    qmodel = quantized(CNN(4, rngs=nnx.Rngs(0)), x)
    own = np.asarray(nnx.jit(lambda model, x: model(x))(qmodel, x))
    for machine in (TF32, BFLOAT16):
        assert np.array_equal(scores_on(qmodel, x, machine, False, 16), own)
    assert not np.array_equal(scores_on(qmodel, x, BFLOAT16, True, 16), own)


@pytest.mark.exhaustive
def test_the_classic_forward_multiplies_rounded_floats():
    x = np.random.default_rng(1).standard_normal((32, 40)).astype(np.float32)
    layer = nnx.Linear(40, 12, use_bias=False, rngs=nnx.Rngs(0))
    kernel = np.asarray(layer.kernel[...])
    qmodel = quantized(layer, x)
    grids = qmodel.qparams()
    rounded: list[np.ndarray] = []
    for tensor, name in ((x, "input"), (kernel, "kernel")):
        values = qjax.fake_quant(jnp.asarray(tensor), grids[name])
        rounded.append(np.asarray(values.astype(jnp.bfloat16).astype(jnp.float32)))
    real = np.matmul(rounded[0].astype(np.float64), rounded[1].astype(np.float64))
    expected = np.asarray(qjax.fake_quant(jnp.asarray(real.astype(np.float32)), grids["dot"]))
    found = scores_on(qmodel, x, BFLOAT16, True, 32)
    assert np.mean(found != expected) < 0.01  # near ties
    assert np.mean(scores_on(qmodel, x, FLOAT32, True, 32) != expected) > 0.01


def test_a_graph_is_compared_in_the_dtype_of_the_forward():
    shipped = np.array([[1.0, 2.0], [2.0, 1.003]], np.float32)
    same = np.asarray(jnp.asarray(shipped).astype(jnp.bfloat16))
    assert compared(same, shipped, np.array([1, 0])) == Compared(0.0, 0, 0.0)
    other = compared(shipped[:, ::-1], shipped, np.array([1, 0]))
    assert (other.codes, other.decisions, other.points) == (1.0, 2, -100.0)


@pytest.mark.exhaustive
def test_dtypes_of_layers_and_parameters():
    model = CNN(4, rngs=nnx.Rngs(0))
    x = np.zeros((2, 8, 8, 1), np.float32)
    kinds = [precision_outcomes.in_dtype(model, dtype) for dtype in precision_outcomes.DTYPES]
    with jax.numpy_dtype_promotion("standard"):  # Flax's batch norm multiplies bfloat16 with its float32 statistics
        assert [one(x).dtype for one in kinds] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert [one.head.kernel[...].dtype for one in kinds] == [jnp.float32, jnp.float32, jnp.bfloat16]
    assert model.head.dtype is None


def test_wrong_codes_grow_to_where_they_stay():
    rare, common = (precision_claims.last_share(own, 144, 60, 1.0) for own in (1e-6, 1e-2))
    gain = (2 / np.pi) ** 0.5 * precision_claims.theory.OUTPUT_SPREAD / precision_claims.theory.SPREAD
    assert rare == pytest.approx(gain**2, rel=1e-3)
    assert common > rare
    assert precision_claims.last_share(1e-6, 144, 2, 1.0) == pytest.approx(1e-6 + gain * 12e-6)
    shares = [precision_claims.own_share(machine, 144) for machine in (FLOAT32, TF32, BFLOAT16)]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.053, abs=0.005)


def test_a_study_measures_what_it_predicts(monkeypatch):
    classic = {(precision_outcomes.CLASSIC, m.name): Compared(0.2, 3, 0.1) for m in precision_outcomes.EMULATED}
    integer = {(precision_outcomes.INTEGER, m.name): Compared(0.0, 0, 0.0) for m in precision_outcomes.EMULATED}
    one = Forwards({**classic, **integer}, Compared(0.0, 0, 0.0), 0, 0, 91.0)
    near = [Compared(0.0, 0, 0.0)] * 2
    found = {dtype: Trained([90.0, 90.2], near, 0) for dtype in precision_outcomes.DTYPES}
    found["bfloat16 throughout"] = Trained([89.0, 89.6], near, 0)
    for module in (precision_claims, network_precision):
        monkeypatch.setattr(module, "forwards", lambda plan, name, seed: one)
        monkeypatch.setattr(module, "trainings", lambda plan, seed: found)
    for settings in (Settings(), Settings(full=True)):
        measured = network_precision.measure(settings)
        predictions = network_precision.predict(settings)
        assert {prediction.name for prediction in predictions} == set(measured.values)
        assert all(prediction.holds(measured.values[prediction.name]) for prediction in predictions)
        network_precision.draw(Figure(), measured.data)
    assert "trained with bfloat16 throughout: -0.80 ± 0.20 points against float32." in measured.conclusion
