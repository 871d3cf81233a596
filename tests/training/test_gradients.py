"""Models whose backward pass is in integers: what changes, what does not, keys, transforms, platforms, refusals."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.training.test_lowered_steps import Perceptron as Split
from tests.training.test_lowered_steps import lowered


class Dense(nnx.Module):
    def __init__(self) -> None:
        self.first, self.head = nnx.Linear(6, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.first(x)))


class Stack(nnx.Module):
    """Two equal layers in a scan, each of them recomputed in the backward pass."""

    def __init__(self) -> None:
        self.kernels = nnx.Param(jnp.tile(0.3 * jax.random.normal(jax.random.key(7), (1, 6, 6)), (2, 1, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, kernel: nnx.tanh(x @ kernel))
        return jax.lax.scan(lambda x, kernel: (layer(x, kernel), None), x, self.kernels[...])[0]


class Grouped(nnx.Module):
    def __init__(self, dense: bool) -> None:
        self.conv = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1)) if dense else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        return x if self.head is None else self.head(x)


class Convolution(nnx.Module):
    def __init__(self) -> None:
        self.conv, self.head = nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.mean(nnx.relu(self.conv(x)), axis=(1, 2)))


X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
NEAREST, STOCHASTIC = qjax.Gradients(rounding="nearest"), qjax.Gradients()


def quantized(how: qjax.Gradients | None, model: nnx.Module | None = None, x: Any = X) -> qjax.QuantizedModel:
    return qjax.quantize(model or Dense(), qjax.Recipe(gradients=how), x)


def gradients(qmodel: Any, key: jax.Array | None = None, loss_scale: float = 1.0, x: Any = X) -> list[np.ndarray]:
    """Of a sum of squares, with respect to every parameter and every scale."""
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)

    def loss(params: Any) -> jax.Array:
        y = nnx.merge(graphdef, params, rest)
        if key is None:
            return jnp.float32(loss_scale) * jnp.sum(jnp.square(y(x)))
        with qjax.training.gradient_key(key):
            return jnp.float32(loss_scale) * jnp.sum(jnp.square(y(x)))

    return [np.asarray(g) for g in jax.tree.leaves(jax.grad(loss)(params))]


def apart(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The distance of all gradients, relative to their length."""
    a64, b64 = (np.concatenate([g.ravel() for g in found]).astype(np.float64) for found in (a, b))
    return float(np.linalg.norm(a64 - b64) / np.linalg.norm(b64))


def test_the_forward_keeps_its_bits_and_gradients_come_near_as_bits_are_added() -> None:
    plain = quantized(None)
    exact = gradients(plain)
    found: dict[int, float] = {}
    for bits in (4, 8, 16):
        qmodel = quantized(dataclasses.replace(NEAREST, bits=bits))
        assert np.array_equal(qmodel(X), plain(X))
        assert bits != 4 or np.array_equal(qjax.convert(qmodel, X)(X), qjax.convert(plain, X)(X))
        own = gradients(qmodel)
        assert all(np.any(g) for g, e in zip(own, exact, strict=True) if np.any(e))  # scales learn as well
        found[bits] = apart(own, exact)
    assert 2**-7 < found[4] < 2**-2
    assert 2**-12 < found[8] < 2**-6
    assert 0 < found[16] < 2**-13


def test_without_the_setting_the_backward_multiplies_no_integers_and_a_key_changes_no_equation() -> None:
    graphdef, params, rest = nnx.split(quantized(None), nnx.Param, ...)

    def loss(params: Any, key: jax.Array | None) -> jax.Array:
        model = nnx.merge(graphdef, params, rest)
        if key is None:
            return jnp.sum(model(X))
        with qjax.training.gradient_key(key):
            return jnp.sum(model(X))

    key = jax.random.key(0)
    plain = jax.make_jaxpr(jax.grad(lambda params: loss(params, None)))(params)
    keyed = jax.make_jaxpr(jax.grad(lambda params: loss(params, key)))(params)
    assert str(plain) == str(keyed)
    forward = str(jax.make_jaxpr(lambda params: loss(params, None))(params))
    assert str(plain).count("preferred_element_type=int32") == forward.count("preferred_element_type=int32") > 0


def test_loss_scaling_by_a_power_of_two_scales_every_gradient() -> None:
    for how, key in ((NEAREST, None), (STOCHASTIC, jax.random.key(3))):
        qmodel = quantized(how)
        plain, scaled = gradients(qmodel, key), gradients(qmodel, key, 1024.0)
        assert all(np.array_equal(np.ldexp(a, 10), b) for a, b in zip(plain, scaled, strict=True))


def test_equal_keys_give_equal_bits() -> None:
    qmodel = quantized(STOCHASTIC)
    first, again, other = (gradients(qmodel, jax.random.key(i)) for i in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert apart(other, first) > 0


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_the_mean_over_keys_comes_near_the_float_gradient() -> None:
    exact = gradients(quantized(None))
    graphdef, params, rest = nnx.split(quantized(dataclasses.replace(STOCHASTIC, bits=4)), nnx.Param, ...)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        return _keyed_sum(nnx.merge(graphdef, params, rest), key)

    keys = jax.random.split(jax.random.key(0), 32)
    found = [np.asarray(g) for g in jax.tree.leaves(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, keys))]
    one = [apart([g[i] for g in found], exact) for i in range(32)]
    # the errors of 32 keys are independent: their mean is smaller by sqrt(32) = 5.7
    assert min(one) > 0
    assert apart([g.mean(0, dtype=np.float64) for g in found], exact) < np.mean(one) / 4


def test_layers_of_a_scan_draw_independently_also_where_the_backward_recomputes_them() -> None:
    """Both layers have equal weights, so their gradients under one draw of both would show it."""
    qmodel = quantized(dataclasses.replace(STOCHASTIC, bits=4), Stack())
    step = nnx.jit(lambda qmodel, key: nnx.grad(lambda m: _keyed_sum(m, key))(qmodel))
    first, again, other = (np.asarray(step(qmodel, jax.random.key(i))["model"]["kernels"][...]) for i in (0, 0, 1))
    assert np.array_equal(first, again)
    assert (first != other)[0].any()
    assert (first != other)[1].any()


def _keyed_sum(model: Any, key: jax.Array) -> jax.Array:
    with qjax.training.gradient_key(key):
        return jnp.sum(jnp.square(model(X)))


def test_a_step_without_a_key_is_refused_but_a_call_without_a_gradient_is_not() -> None:
    qmodel = quantized(STOCHASTIC)
    assert np.isfinite(np.asarray(qmodel(X))).all()
    with pytest.raises(ValueError, match=r"this step has no key.*with qjax\.training\.gradient_key"):
        gradients(qmodel)


def test_a_key_that_a_program_would_hold_as_a_constant_is_refused() -> None:
    qmodel = quantized(STOCHASTIC)
    constant = jax.random.key(0)
    with pytest.raises(ValueError, match="the key is a constant of a program"):
        nnx.jit(lambda qmodel: nnx.grad(lambda m: _keyed_sum(m, constant))(qmodel))(qmodel)
    with qjax.training.gradient_key(constant):
        assert np.isfinite(np.asarray(qmodel(X))).all()  # the compiled call differentiates nothing


@pytest.mark.parametrize("wrong", [0, np.zeros(3, np.uint32), np.zeros((2, 2), np.uint32), np.zeros(2, np.float32)])
def test_what_is_no_key_is_refused(wrong: Any) -> None:
    with (
        pytest.raises(TypeError, match=r"gradient_key: expected one key, such as jax\.random\.key"),
        qjax.training.gradient_key(wrong),
    ):
        pass


def test_a_model_without_such_products_is_refused_and_products_that_stay_in_float_are_named() -> None:
    x = np.ones((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=r"has none in integers: 'conv/kernel' \(conv\). Leave gradients out"):
        quantized(NEAREST, Grouped(dense=False), x)
    with pytest.warns(UserWarning, match=r"The backward pass of others stays in floats: 'conv/kernel' \(conv\)"):
        quantized(NEAREST, Grouped(dense=True), x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_gradients_as_nan(bad: float) -> None:
    qmodel = quantized(NEAREST)
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, params, rest)(X) * jnp.float32(bad))

    found = jax.grad(loss)(params)["model"]
    assert all(np.isnan(found[name]["kernel"][...]).all() for name in ("first", "head"))


@pytest.mark.parametrize("name", ["perceptron", pytest.param("convolution", marks=pytest.mark.exhaustive)])
def test_a_step_lowers_for_gpu_and_tpu_with_its_products_in_int8(name: str) -> None:
    """On a mesh with explicit axes. Of a layer's three products the backward's two multiply int8 on both platforms."""
    model, x = (Split(), _rows()) if name == "perceptron" else (Convolution(), _images())
    text = lowered(quantized(NEAREST, model, x), x)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len([line for line in products if "xi8>" in line.split(":")[-1]]) >= 4
    floats = lowered(quantized(None, type(model)(), x), x)
    assert not [
        line for line in floats.splitlines() if "stablehlo.dot_general" in line and "xi8>" in line.split(":")[-1]
    ]


def _rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def _images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype(np.float32)


@pytest.mark.exhaustive
def test_eight_devices_compute_the_gradients_of_one() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.gradient_devices"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
