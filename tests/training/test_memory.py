"""What a training step holds."""

import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import Recipe
from qjax.api import calibrate as calibrating


class Perceptron(nnx.Module):
    """Linear layers with relu between them."""

    def __init__(self, depth=4, width=256):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=nnx.Rngs(i)) for i in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def temporary_bytes(model, x):
    """Of the compiled gradient."""

    @nnx.jit
    def gradient(model, x):
        return nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(model)

    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, x: nnx.state(gradient(nnx.merge(graphdef, state), x)))
    analysis = step.lower(state, x).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of jax 0.10 schedules it otherwise: 1.1 and 2.1 times")
@pytest.mark.parametrize(
    "recipe",
    [Recipe(method="static", weight_method="static"), Recipe(), Recipe(overrides={".*": qjax.Dynamic()})],
    ids=["static", "lsq", "dynamic"],
)
def test_a_step_holds_no_more_than_a_float_step(recipe):
    """Codes wait for the backward as int8; as float32 it would be 1.1, 1.3 and 1.1 times as much."""
    x = jax.random.normal(jax.random.key(0), (2048, 256))
    qmodel = qjax.quantize(Perceptron(), recipe, x)
    assert temporary_bytes(qmodel, x) <= bytes_of_a_float_step(*x.shape)


@functools.cache
def bytes_of_a_float_step(rows: int, width: int) -> int:
    return temporary_bytes(Perceptron(width=width), jnp.zeros((rows, width)))


class Turned(Perceptron):
    """Its last weight is read transposed."""

    def __call__(self, x):
        return super().__call__(x) @ self.layers[0].kernel[...].T


def test_weights_are_not_copied_to_find_their_scales(monkeypatch):
    """What is a parameter itself is read where it lies; only the weight that the model computes is asked for."""
    asked, weights_of = [], calibrating._compile_steps

    def compiled(watched):
        step, weights = weights_of(watched)
        return step, lambda *args: (asked.append(args[-1]), weights(*args))[1]

    monkeypatch.setattr(calibrating, "_compile_steps", compiled)
    x = jax.random.normal(jax.random.key(0), (4, 8))
    qmodel = qjax.quantize(Turned(depth=2, width=8), Recipe(), x)
    assert asked == [frozenset({"layers/0/kernel#2"})]
    monkeypatch.setattr(calibrating, "_direct", lambda *args: ())
    other = qjax.quantize(Turned(depth=2, width=8), Recipe(), x)
    assert len(asked[-1]) == 3
    for name, found in other.qparams().items():
        np.testing.assert_array_equal(found.scale, qmodel.qparams()[name].scale)


def test_the_scales_of_a_weight_are_searched_once(monkeypatch):
    """`calibrate` finds those of `quantize`, as long as the weight is the same array and its codes are the same."""
    searched, of_weight = [], calibrating._of_weight
    monkeypatch.setattr(
        calibrating, "_of_weight", lambda q, w, way: (searched.append(w.shape), of_weight(q, w, way))[1]
    )
    x = jax.random.normal(jax.random.key(0), (4, 8))
    model = Perceptron(depth=2, width=8)
    qmodel = qjax.quantize(model, Recipe(weights=qjax.QSpec(bits=4, axis=-1)), x)
    found = qmodel.qparams()
    assert len(searched) == 2
    learned: Any = qmodel.quantizers["layers/0/kernel"]
    learned.log2_scale[...] = jnp.zeros(8)
    qjax.calibrate(qmodel, [x, 2 * x])
    assert len(searched) == 2
    for name in ("layers/0/kernel", "layers/1/kernel"):
        np.testing.assert_array_equal(qmodel.qparams()[name].scale, found[name].scale)
    inner: Any = qmodel.model
    inner.layers[0].kernel[...] = 2 * inner.layers[0].kernel[...]
    qjax.calibrate(qmodel, [x])
    assert len(searched) == 3
    np.testing.assert_array_equal(qmodel.qparams()["layers/0/kernel"].scale, 2 * found["layers/0/kernel"].scale)
    qjax.quantize(model, Recipe(weights=qjax.QSpec(bits=3, axis=-1)), x)
    assert len(searched) == 5
    before = len(calibrating._SEARCHED)
    del model, qmodel, inner, learned
    gc.collect()
    assert len(calibrating._SEARCHED) < before
