"""Constants that are derived once: the same bits as `exact`, for changed parameters too, and what is refused."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.api.derived_constants import fingerprint_of
from tests.layers.round_trip import data

N, SIZE, WIDTH = 3, 4, 8


class Memory(nnx.Module):
    """Sums over a cache into which every example writes at a place of its own."""

    def __init__(self):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, places, cache):
        cache = cache.at[jnp.arange(len(x)), places].set(nnx.relu(self.first(x)))
        return self.last(jnp.sum(cache, axis=1)), cache


def call(n=N, seed=0):
    places = np.random.default_rng(seed).integers(0, SIZE, n).astype(np.int32)
    return data(n, WIDTH, seed=seed), places, np.abs(data(n, SIZE, WIDTH, seed=seed + 1))


@functools.cache
def prepared():
    qmodel = qjax.quantize(Memory(), qjax.Recipe(), call())
    qjax.calibrate(qmodel, [call(8, seed) for seed in range(3)], progress=False)
    qmodel.eval()
    return qmodel, qjax.exact(qmodel, call(), state=("cache", 1))


def changed(qmodel, by):
    """A copy with another kernel."""
    other = nnx.clone(qmodel)
    other.model.first.kernel[...] = other.model.first.kernel[...] * np.float32(by)
    return other


def test_the_value_is_that_of_exact_after_every_update():
    qmodel, forward = prepared()
    derive, traces = jax.jit(forward.constants), []

    @jax.jit
    def step(constants, *inputs):
        traces.append(1)
        return forward(constants, *inputs)

    for by in (1.0, 1.01, 0.9):
        model = changed(qmodel, by)
        constants = derive(model)
        forward.check(constants, model)
        for given in (call(), call(N, 5)):
            for found, wanted in zip(step(constants, *given), jax.jit(forward)(model, *given), strict=True):
                np.testing.assert_array_equal(found, wanted)
    assert len(traces) == 1
    assert not np.array_equal(step(derive(qmodel), *call())[0], step(constants, *call())[0])


def test_a_state_of_codes_stays_one():
    qmodel, forward = prepared()
    constants = forward.constants(qmodel)
    x, places, cache = call()
    codes = constants.state(cache)
    assert codes.dtype == jnp.int8
    for turn in range(3):
        at = (places + turn) % SIZE
        y, codes = forward(constants, x, at, codes)
        wanted, cache = forward(constants, x, at, cache)
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(codes, constants.state(cache))
        assert codes.dtype == jnp.int8
        assert cache.dtype == jnp.float32


def test_stale_constants_and_those_of_another_forward_are_refused():
    qmodel, forward = prepared()
    constants = forward.constants(qmodel)
    with pytest.raises(ValueError, match="these constants are stale"):
        forward.check(constants, changed(qmodel, 1.01))
    other = qjax.exact(qmodel, call(), state=("cache", 1))
    for use in (lambda: other(constants, *call()), lambda: other.check(constants, qmodel)):
        with pytest.raises(ValueError, match="belong to another forward"):
            use()
    four = qjax.quantize(Memory(), qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1)), call())
    with pytest.raises(ValueError, match="8 bits in the model, 4 bits in the state"):
        forward.check(constants, four)
    with pytest.raises(TypeError, match="Call it outside of jit"):
        jax.jit(lambda c: forward.check(c, qmodel))(constants)


def test_calls_that_do_not_fit_are_refused():
    qmodel, forward = prepared()
    constants = forward.constants(qmodel)
    x, places, cache = call()
    with pytest.raises(ValueError, match=r"expected shape \(batch, 4, 8\), got \(3, 5, 8\)"):
        forward(constants, x, places, np.zeros((N, 5, WIDTH), np.float32))
    with pytest.raises(ValueError, match="expected one batch size"):
        forward(constants, x[:2], places, cache)
    with pytest.raises(TypeError, match="expected the quantized model"):
        forward(cast("Any", qmodel.model), x, places, cache)


def test_the_fingerprint_sees_every_element_and_its_place():
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2, 3], np.int8), np.array([True, False])]
    own = np.asarray(fingerprint_of(arrays))
    np.testing.assert_array_equal(jax.jit(fingerprint_of)(arrays), own)
    seen = {tuple(own.tolist())}
    for number, array in enumerate(arrays):
        for place in np.ndindex(array.shape):
            other = [x.copy() for x in arrays]
            other[number][place] = not array[place] if array.dtype == bool else array[place] + 1
            seen.add(tuple(np.asarray(fingerprint_of(other)).tolist()))
    swapped = [arrays[0][:, ::-1], *arrays[1:]]
    seen |= {tuple(np.asarray(fingerprint_of(x)).tolist()) for x in (swapped, arrays[1:])}
    assert len(seen) == 1 + 11 + 2
