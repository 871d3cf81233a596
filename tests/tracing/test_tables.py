"""Chains of elementwise equations become tables: which, from where, and what they compute."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.numerics.elementary import Expression, evaluate
from qjax.tracing import Program, from_jaxpr, rewrite

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32) * 2
SLOPE = np.asarray([[0.3]], np.float32)


def program(function: Callable[..., Any], *args: Any, parameters: int = 0) -> Program:
    """The rewritten program of a function; the last arguments are parameters."""
    constant = [False] * (len(args) - parameters) + [True] * parameters
    return rewrite(from_jaxpr(jax.make_jaxpr(function)(*args)), constant)


def names(found: Program) -> list[str]:
    return [eqn.primitive for eqn in found.equations]


def run(found: Program, *args: Any) -> list[Any]:
    env: dict[Any, Any] = dict(zip(found.inputs, args, strict=True))
    for eqn in found.equations:
        given = [v.constant if v.constant is not None else env[v] for v in eqn.inputs]
        env.update(zip(eqn.outputs, eqn.bind(*given), strict=True))
    return [env[v] for v in found.outputs]


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **{
        name: getattr(jax.nn, name)
        for name in """celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid mish selu
        sigmoid silu soft_sign softplus sparse_plus squareplus swish tanh""".split()  # noqa: SIM905
    },
    "gelu of erf": lambda x: jax.nn.gelu(x, approximate=False),
    "cube": lambda x: x**3,
    "square": lambda x: x * x,
    "power": lambda x: jnp.abs(x) ** 1.7,
    "root": lambda x: lax.rsqrt(x * x + 1e-3),
    "reciprocal": lambda x: 1.0 / (2.0 + jnp.abs(x)),
    "log": lambda x: jnp.log1p(jnp.exp(-jnp.abs(x))),
    "where": lambda x: jnp.where(x > 0.25, jnp.sin(x), -x),
    "both": lambda x: jnp.where((x > -1) & (x < 1), 0.0, x),
    "round": jnp.round,
    "floor": lambda x: jnp.floor(2 * x) / 2,
    "remainder": lambda x: x % 0.75,
    "logaddexp": lambda x: jnp.logaddexp(x, 1.0),
    "maximum": lambda x: jnp.maximum(x, 0.1 * x),
    "swish with steps": lambda x: 0.5 + 2 * jax.nn.silu(0.7 * x - 0.1),
    "sinc": jnp.sinc,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_value(name):
    function = FUNCTIONS[name]
    found = program(function, X)
    tables = [eqn for eqn in found.equations if eqn.primitive == "table"]
    (table,) = tables
    assert table.inputs[0] is found.inputs[0]
    assert len(table.inputs) == 1 or name == "remainder"
    assert table.params["float32"]
    want = np.asarray(function(jnp.asarray(X)))
    assert np.array_equal(run(found, X)[0], want)
    if len(table.inputs) == 1:
        expression = Expression.from_json(table.params["expression"])
        got = [evaluate(expression, float(v)) for v in X.ravel()]
        assert np.allclose(got, want.ravel(), rtol=1e-4, atol=1e-5)
    # the user's own function differentiates as before
    slope = jax.grad(lambda x: run(found, x)[0].sum())(X)
    assert np.allclose(slope, jax.grad(lambda x: function(x).sum())(X), rtol=1e-5, atol=1e-6)


def test_what_affine_steps_and_clamps_say_is_left_alone():
    for function in (
        lambda x: jax.nn.relu(2 * x + 1),
        lambda x: jnp.clip(x, -1, 1) / 3,
        lambda x: x - 0.5 * x,
        lambda x: jax.nn.relu6(-x).astype(jnp.bfloat16),
        lambda x: x * jnp.asarray(X[0])[None],
    ):
        assert "table" not in names(program(function, X))


def test_functions_of_two_values_are_no_tables():
    found = program(lambda x, y: jnp.tanh(x) * jnp.where(x > y, y, jax.nn.silu(y)), X, X)
    assert names(found).count("table") == 2
    assert {"mul", "gt", "select_n"} <= set(names(found))


def test_every_exit_is_a_function_of_the_root():
    def function(x):
        s = jax.nn.sigmoid(2 * x)
        return s, jnp.square(s), s * x

    found = program(function, X)
    assert names(found) == ["table"] * 3
    assert all(eqn.inputs == (found.inputs[0],) for eqn in found.equations)
    want = [np.asarray(y) for y in function(jnp.asarray(X))]
    assert all(np.array_equal(a, b) for a, b in zip(run(found, X), want, strict=True))


def test_a_comparison_that_something_else_reads_reads_codes():
    found = program(lambda x, y: jnp.where(jnp.tanh(x) > 0.5, y, x), X, X)
    assert names(found)[:2] == ["table", "gt"]


def test_parameters_of_one_element():
    def prelu(x, slope):
        return jnp.where(x >= 0, x, slope * x)

    found = program(prelu, X, SLOPE, parameters=1)
    (table,) = (eqn for eqn in found.equations if eqn.primitive == "table")
    assert table.inputs == found.inputs
    assert Expression.from_json(table.params["expression"]).parameters == 1
    assert np.array_equal(run(found, X, SLOPE)[0], prelu(jnp.asarray(X), jnp.asarray(SLOPE)))
    # one slope per channel is none of them
    channels = np.linspace(0.1, 0.6, 6, dtype=np.float32)[None]
    assert "table" not in names(program(prelu, X, channels, parameters=1))


def test_a_bias_stays_with_its_accumulator():
    def function(x, bias):
        return jnp.tanh((x + bias) * 2)

    for bias in (SLOPE, np.ones((1, 6), np.float32)):
        found = program(function, X, bias, parameters=1)
        table = found.equations[-1]
        assert [table.primitive, len(table.inputs)] == ["table", 1]
        assert "add" in names(found)
        assert "mul" not in names(found)
        assert np.array_equal(run(found, X, bias)[0], function(X, bias))


def test_a_tensor_that_is_needed_anyway_is_the_root():
    found = program(lambda x: (jax.nn.relu(x), jnp.exp(-jax.nn.relu(x))), X)
    assert names(found) == ["relu", "relu", "table"] or names(found) == ["relu", "table"]
    shared = program(lambda x: (lambda r: (r, jnp.exp(-r)))(jax.nn.relu(x)), X)
    assert names(shared) == ["relu", "table"]
    assert shared.equations[1].inputs == shared.equations[0].outputs


def test_bodies_of_loops():
    def function(x):
        y = lax.scan(lambda c, _: (jnp.tanh(c) * 0.9, None), x, length=3)[0]
        return jax.checkpoint(lambda v: jax.nn.gelu(v) + v)(y)

    found = program(function, X)
    inner = [names(eqn.body) for eqn in found.equations if eqn.body is not None]
    assert inner == [["table"], ["table"]]


def test_softmax_is_not_taken_apart():
    found = program(lambda x: jax.nn.log_softmax(x) + jax.nn.logsumexp(x, axis=-1, keepdims=True), X)
    assert all(len(eqn.inputs) == 1 for eqn in found.equations if eqn.primitive == "table")


class Model(nnx.Module):
    def __init__(self, dtype: Any = None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 5, rngs=rngs, dtype=dtype)
        self.last = nnx.Linear(5, 3, rngs=rngs, dtype=dtype)
        self.slope = nnx.Param(jnp.asarray([0.2]))

    def __call__(self, x):
        y = jax.nn.gelu(self.first(x))
        y = jnp.where(y >= 0.1, y, y * self.slope[...].astype(y.dtype).reshape(1, 1))
        return jax.nn.sigmoid(self.last(y))


@pytest.mark.exhaustive
def test_a_model_end_to_end():
    qmodel = qjax.quantize(Model(), qjax.Recipe(target="tflite_xnnpack"), X)
    graph = qjax.convert(qmodel, X)
    assert [node.op for node in graph.ir.nodes] == ["dot", "table", "dot", "table"]
    assert np.allclose(graph(X), Model()(X), atol=0.05)
    assert qjax.verify(graph, qmodel, [X]).exact
    output = graph.ir.tensors[graph.ir.outputs[0]].quantization
    assert output is not None
    assert (float(output.scale), int(output.zero_point)) == (2.0**-8, -128)
    forward = qjax.exact(qmodel, X)

    def loss(m):
        y = forward(m, X)
        return (y**2).sum(), y

    (_, y), gradient = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(qmodel)
    assert np.array_equal(y, graph(X))
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(gradient))


@pytest.mark.exhaustive
def test_a_model_of_bfloat16():
    model = Model(jnp.bfloat16)
    qmodel = qjax.quantize(model, qjax.Recipe(), X)
    graph = qjax.convert(qmodel, X)
    assert [node.op for node in graph.ir.nodes] == ["dot", "table", "dot", "table"]
    assert np.allclose(graph(X), model(X).astype(jnp.float32), atol=0.06)
    grid = graph.ir.tensors[graph.ir.outputs[0]].quantization
    assert grid is not None
    # training computes the function in float32, whatever the model's dtype
    assert np.allclose(qmodel(X).astype(jnp.float32), graph(X), atol=float(grid.scale) * 1.01)
