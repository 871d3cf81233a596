"""Callback: a user's numpy functions, eager and inside jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.calibration import Callback, MinMax
from qjax.numerics.affine import QSpec

PER_CHANNEL = QSpec(axis=-1, symmetric=False)


def batches(n: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((6, 3)).astype(np.float32) for _ in range(n)]


def test_ranges_are_merged_as_minmax_merges_them() -> None:
    callback = Callback(lambda batch: (batch.min(axis=0), batch.max(axis=0)))
    eager, expected = callback.init(PER_CHANNEL, (6, 3)), MinMax().init(PER_CHANNEL, (6, 3))
    jitted, step = eager, jax.jit(lambda state, x: callback.update(state, x, PER_CHANNEL))
    for x in batches():
        eager = callback.update(eager, jnp.asarray(x), PER_CHANNEL)
        jitted = step(jitted, x)
        expected = MinMax().update(expected, jnp.asarray(x), PER_CHANNEL)
    want = MinMax().qparams(expected, PER_CHANNEL)
    for state in (eager, jitted):
        got = callback.qparams(state, PER_CHANNEL)
        assert np.array_equal(got.scale, want.scale)
        assert np.array_equal(got.zero_point, want.zero_point)


def three_sigma(state: dict[str, np.ndarray], batch: np.ndarray) -> dict[str, np.ndarray]:
    return {"n": state["n"] + np.int32(batch.size), "squares": state["squares"] + np.sum(batch**2)}


def test_any_statistic_can_be_carried() -> None:
    callback = Callback(
        three_sigma,
        start=lambda spec, shape: {"n": np.int32(0), "squares": np.float32(0)},
        finish=lambda state, spec: (
            -3 * np.sqrt(state["squares"] / state["n"]),
            3 * np.sqrt(state["squares"] / state["n"]),
        ),
    )
    # Squares and sums of small integers are exact.
    data = [np.full((4, 4), 2.0, np.float32), np.full((2, 4), 1.0, np.float32)]
    eager = callback.init(QSpec(), (4, 4))
    jitted = eager
    for x in data:
        eager = callback.update(eager, jnp.asarray(x), QSpec())
        jitted = jax.jit(lambda state, x: callback.update(state, x, QSpec()))(jitted, x)
    expected = np.float32(3 * np.sqrt(np.float32(72) / np.int32(24)))
    for state in (eager, jitted):
        assert int(state.value["n"]) == 24
        assert float(callback.bounds(state, QSpec())[1]) == expected


def test_a_large_batch_inside_jit() -> None:
    x = jnp.arange(1 << 22, dtype=jnp.float32)
    callback = Callback(lambda batch: (batch.min(), batch.max()))
    state = jax.jit(lambda state, x: callback.update(state, x, QSpec()))(callback.init(QSpec(), x.shape), x)
    assert float(callback.bounds(state, QSpec())[1]) == 4194303.0


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"expected both start and finish, or neither; got only start"):
        Callback(three_sigma, start=lambda spec, shape: np.float32(0))
    x = jnp.ones((6, 3))
    wrong_shape = Callback(
        lambda state, batch: np.zeros(2, np.float32), lambda s, h: np.float32(0), lambda s, p: (0, 1)
    )
    with pytest.raises(ValueError, match=r"expected an array of shape \(\). Got \(2,\)"):
        wrong_shape.update(wrong_shape.init(QSpec(), x.shape), x, QSpec())
    wrong_dtype = Callback(lambda state, batch: 0.5, lambda s, h: np.int32(0), lambda s, p: (0, 1))
    with pytest.raises(TypeError, match=r"expected an array of dtype int32. Got float64"):
        wrong_dtype.update(wrong_dtype.init(QSpec(), x.shape), x, QSpec())
    wrong_tree = Callback(lambda state, batch: {"a": state}, lambda s, h: np.int32(0), lambda s, p: (0, 1))
    with pytest.raises(TypeError, match=r"expected a state of structure"):
        wrong_tree.update(wrong_tree.init(QSpec(), x.shape), x, QSpec())
    swapped = Callback(lambda state, batch: state, lambda s, h: np.int32(0), lambda s, p: (1.0, -1.0))
    with pytest.raises(ValueError, match=r"expected bounds with lo <= hi. Got lo=1.0, hi=-1.0"):
        swapped.qparams(swapped.update(swapped.init(QSpec(), x.shape), x, QSpec()), QSpec())
    per_tensor = Callback(lambda batch: (batch.min(), batch.max()))
    with pytest.raises(ValueError, match=r"expected an array of shape \(3,\). Got \(\)"):
        per_tensor.update(per_tensor.init(PER_CHANNEL, x.shape), x, PER_CHANNEL)
