"""Weight parameters against a search over codes in numpy, and exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.calibration import weight_qparams, weights
from qjax.calibration.weights import WeightMethod, squared_error
from qjax.numerics.affine import QSpec, choose_qparams

RNG = np.random.default_rng(7)
WEIGHT = (RNG.standard_t(4, (3, 10, 4)) * np.array([1.0, 1e-3, 30.0, 2.0])).astype(np.float32)


def nearest_error(w: np.ndarray, values: np.ndarray) -> float:
    """Sum of squared distances to the nearest value, by trying every one."""
    return float((np.abs(w.reshape(-1, 1).astype(np.float64) - values.reshape(1, -1)).min(axis=1) ** 2).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.sampled(2)
def test_mse_is_the_best_factor_of_each_channel(bits: int, narrow: bool) -> None:
    spec = QSpec(bits=bits, axis=-1, narrow_range=narrow)
    got = np.asarray(weight_qparams(WEIGHT, spec, "mse").scale)
    codes = np.arange(spec.qmin, spec.qmax + 1)
    for channel in range(4):
        w = WEIGHT[..., channel]
        factors = [np.float32(i / 128) for i in range(128, 7, -1)]
        scales = [np.abs(w).max() * f * np.float32(1 / spec.qmax) for f in factors]
        errors = [nearest_error(w, codes * np.float64(s)) for s in scales]
        assert np.isclose(got[channel], scales[int(np.argmin(errors))], rtol=2**-22, atol=0)


def test_asymmetric_mse_beats_one_factor_and_the_range() -> None:
    spec = QSpec(bits=3, axis=-1, symmetric=False)
    w = np.abs(WEIGHT) - np.float32(0.1)
    chosen = squared_error(w, weight_qparams(w, spec, "mse"))
    for i in range(8, 129):
        lo, hi = np.minimum(w.min(axis=(0, 1)), 0), w.max(axis=(0, 1))
        clipped = np.clip(w, lo * np.float32(i / 128), hi * np.float32(i / 128))
        assert (chosen <= squared_error(w, weight_qparams(clipped, spec))).all()


def test_squared_error_is_that_of_the_nearest_codes() -> None:
    spec = QSpec(bits=3, axis=-1)
    qparams = weight_qparams(WEIGHT, spec)
    for channel, error in enumerate(squared_error(WEIGHT, qparams)):
        values = np.arange(spec.qmin, spec.qmax + 1).astype(np.float32) * np.asarray(qparams.scale)[channel]
        assert np.isclose(error, nearest_error(WEIGHT[..., channel], values.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("method", ["minmax", "mse", "lsq"])
@pytest.mark.sampled(1)
def test_per_channel_and_per_group_are_loops(method: WeightMethod) -> None:
    channels = weight_qparams(WEIGHT, QSpec(bits=4, axis=(0, 2)), method).scale
    groups = weight_qparams(WEIGHT[0], QSpec(bits=4, axis=1, group_size=5, group_axis=0), method).scale
    for i, j in np.ndindex(3, 4):
        assert np.array_equal(channels[i, j], weight_qparams(WEIGHT[i, :, j], QSpec(bits=4), method).scale)
    for g, j in np.ndindex(2, 4):
        part = WEIGHT[0, 5 * g : 5 * g + 5, j]
        assert np.array_equal(groups[g, j], weight_qparams(part, QSpec(bits=4), method).scale)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_lsq_is_the_papers_initial_scale(bits: int) -> None:
    """(s * sqrt(Qp))**2 == (2 mean|w|)**2, to within the neighbouring float32 on either side."""
    spec = QSpec(bits=bits, axis=-1)
    for channel, s in enumerate(np.asarray(weight_qparams(WEIGHT, spec, "lsq").scale)):
        values = [abs(Fraction(v)) for v in WEIGHT[..., channel].ravel().tolist()]
        target = (2 * sum(values) / len(values)) ** 2 / spec.qmax
        below, above = np.nextafter(s, np.float32(0)), np.nextafter(s, np.float32(np.inf))
        assert Fraction(float(below)) ** 2 < target < Fraction(float(above)) ** 2


@pytest.mark.parametrize("method", ["minmax", "mse", "lsq"])
def test_a_channel_of_zeros_does_not_disturb_the_others(method: WeightMethod) -> None:
    w = WEIGHT.copy()
    w[..., 1] = 0
    scale = np.asarray(weight_qparams(w, QSpec(bits=4, axis=-1), method).scale)
    whole = np.asarray(weight_qparams(WEIGHT, QSpec(bits=4, axis=-1), method).scale)
    assert scale[1] == 1.0
    assert np.array_equal(scale[[0, 2, 3]], whole[[0, 2, 3]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["minmax", "mse", "lsq"])
def test_any_array_of_a_floating_dtype_and_any_flag(method: WeightMethod) -> None:
    spec = QSpec(bits=4, axis=-1)
    half = jnp.asarray(WEIGHT).astype(jnp.bfloat16)
    expected = weight_qparams(np.asarray(half.astype(jnp.float32)), spec, method).scale
    assert np.array_equal(weight_qparams(half, spec, method).scale, expected)
    with jax.enable_x64(True):
        assert np.array_equal(weight_qparams(WEIGHT, spec, method).scale, weight_qparams(WEIGHT, spec, method).scale)
        wide = weight_qparams(WEIGHT.astype(np.float64), spec, method)
    assert np.array_equal(wide.scale, weight_qparams(WEIGHT, spec, method).scale)


def test_errors_name_the_cure() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'max'. Expected 'minmax', 'mse' or 'lsq'"):
        weight_qparams(WEIGHT, QSpec(), "max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"method 'lsq' expected a symmetric spec"):
        weight_qparams(WEIGHT, QSpec(symmetric=False), "lsq")
    with pytest.raises(TypeError, match=r"expected a floating weight. Got int32"):
        weight_qparams(np.ones(3, np.int32), QSpec())
    with pytest.raises(ValueError, match=r"at least one element. Got shape \(0, 3\)"):
        weight_qparams(np.ones((0, 3), np.float32), QSpec())
    with pytest.raises(ValueError, match=r"Got 2 of 3 that are NaN or infinite"):
        weight_qparams(np.array([1.0, np.nan, np.inf], np.float32), QSpec())


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize("spec", [QSpec(4, axis=-1), QSpec(8), QSpec(4, symmetric=False), QSpec(3, axis=0)])
def test_a_small_weight_has_the_bits_of_a_large_one(spec: QSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy computes small weights, XLA large ones."""
    small = weight_qparams(WEIGHT, spec, "mse")
    monkeypatch.setattr(weights, "_SMALL", 0)
    monkeypatch.setattr(weights, "_choose_unchecked", lambda spec: lambda lo, hi: choose_qparams(lo, hi, spec))
    large = weight_qparams(WEIGHT, spec, "mse")
    assert np.array_equal(small.scale, large.scale)
    assert np.array_equal(small.zero_point, large.zero_point)
    assert np.array_equal(squared_error(WEIGHT, small), squared_error(WEIGHT, large))
