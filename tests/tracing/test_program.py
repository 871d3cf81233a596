"""The tracer by itself: what a program holds, where it came from, and that evaluating it changes nothing."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qjax.layers import instrument, module_types, trace
from qjax.tracing import Evaluation, annotate, from_jaxpr
from tests.layers.round_trip import data


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(3, 3, rngs=rngs)
        self.bn = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.bn(self.fc(x)))


class Outer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Inner(rngs), Inner(rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        y = x
        for block in self.blocks:
            y = block(y)
        return self.drop(x + jnp.tanh(y))


X = data(2, 3)


def test_calls_are_inlined_with_scopes_and_lines():
    model = instrument(Outer())
    model.eval()
    program = trace(model, (X,), {}).program
    found = [(eqn.primitive, eqn.scope) for eqn in program.walk() if eqn.primitive != "reshape"]
    assert found == [
        *(
            (primitive, f"blocks/{i}{inner}")
            for i in (0, 1)
            for primitive, inner in (("dot_general", "/fc"), ("add", "/fc"), ("batch_norm", "/bn"), ("relu", ""))
        ),
        ("table", ""),
        ("add", ""),
    ]
    assert all(eqn.location is not None and "test_program.py:" in eqn.location for eqn in program.equations)


def test_instrumented_modules_keep_their_types_and_sharing():
    model = Outer()
    model.other = model.blocks[0]
    copy = instrument(model)
    assert isinstance(copy, Outer)
    assert isinstance(copy.blocks[0].fc, nnx.Linear)
    assert copy.other is copy.blocks[0]
    assert copy.blocks[0] is not model.blocks[0]
    types = module_types(copy, trace(copy, (X,), {}).read)
    assert types["blocks/0/fc"] is nnx.Linear
    assert types["blocks/1"] is Inner
    assert np.array_equal(copy(X), model(X))


@pytest.mark.exhaustive
def test_markers_differentiate_and_batch_as_flax_does():
    def loss(model, x):
        return jnp.sum(jnp.square(model(x)))

    for train in (False, True):
        plain, marked = Outer(), instrument(Outer())
        for model in (plain, marked):
            model.train() if train else model.eval()
        # XLA fuses differently around a layer that is one equation: the last bits of floats may differ
        value, grads = nnx.value_and_grad(loss)(plain, X)
        value2, grads2 = nnx.value_and_grad(loss)(marked, X)
        pairs = [(value, value2), (plain.blocks[1].bn.mean[...], marked.blocks[1].bn.mean[...])]
        pairs += zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True)
        for a, b in pairs:
            assert np.allclose(a, b, rtol=1e-5, atol=1e-7)
    stack = data(5, 2, 3)
    plain.eval()
    marked.eval()
    assert np.array_equal(jax.vmap(lambda x: plain(x))(stack), jax.vmap(lambda x: marked(x))(stack))


def test_evaluation_on_reals_is_the_models_own_output():
    model = instrument(Outer())
    model.eval()
    traced = trace(model, (X,), {})
    annotation = annotate(traced.program, traced.names, traced.constant)
    params = dict.fromkeys(annotation.places(), jnp.zeros(()))
    values, _ = Evaluation(annotation, None).run(traced.program, traced.args, params)
    assert np.array_equal(traced.outputs(values), model(X))


def test_literals_survive_their_casts():
    closed = jax.make_jaxpr(lambda x: jnp.pad(jnp.clip(x, 0, 1), ((0, 0), (1, 1))))(X)
    program = from_jaxpr(closed)
    assert [eqn.primitive for eqn in program.equations if "convert" in eqn.primitive] == []
    pad = next(eqn for eqn in program.equations if eqn.primitive == "pad")
    assert pad.literals[1] == 0.0
    assert pad.literals[1].dtype == np.float32


def test_calls_without_results_are_left_out():
    def function(x):
        jax.debug.print("mean {}", x.mean())
        return x + 1

    closed = jax.make_jaxpr(function)(X)
    with pytest.warns(UserWarning, match=r"test_program\.py:\d+: debug_\w+ is left out of the quantized model"):
        program = from_jaxpr(closed)
    assert all(eqn.outputs for eqn in program.equations)


def _raises(*_):
    raise RuntimeError("too large")


def _host(*_):
    return np.ones(X.shape, np.float32)


def checked(x, bad, fails):
    """A check as `equinox.error_if` makes it, a derivative of its own and all."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_jvp
    def check(x, bad):
        return jax.lax.cond(bad, lambda: jax.pure_callback(fails, shape, 0), lambda: x)

    check.defjvp(lambda primals, tangents: (check(*primals), tangents[0]))
    return check(x, bad)


@pytest.mark.parametrize("place", ["plain", "jit", "vmap"])
def test_a_check_that_raises_is_left_out_with_what_it_alone_reads(place):
    def function(x):
        y = x * 2
        bad = jnp.any(jnp.argsort(y.ravel()) > 10**6)
        if place == "vmap":
            return jax.vmap(lambda row: checked(row, bad, _raises))(y) + 1
        return (jax.jit(checked, static_argnums=2) if place == "jit" else checked)(y, bad, _raises) + 1

    closed = jax.make_jaxpr(function)(X)
    with pytest.warns(UserWarning, match=r"test_program\.py:\d+: a run-time check is left out of the quantized model"):
        program = from_jaxpr(closed)
    assert [eqn.primitive for eqn in program.equations] == ["mul", "add"]
    (found,), _ = Evaluation(annotate(program, ["x"], [False]), None).run(program, [X], {})
    assert np.array_equal(found, X * 2 + 1)


def test_a_branch_that_computes_on_the_host_is_no_check():
    closed = jax.make_jaxpr(lambda x: jax.lax.cond(jnp.any(x > 0), lambda: jax.pure_callback(_host, x, 0), lambda: x))(
        X
    )
    assert "cond" in [eqn.primitive for eqn in from_jaxpr(closed).equations]
