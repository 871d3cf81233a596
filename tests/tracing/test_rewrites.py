"""What the rewriters find in a program, and what looks like it but is something else. Values never change."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.layers import instrument, trace
from qjax.tracing import Annotation, Evaluation
from tests.layers.round_trip import data

X = data(2, 3, 6)


class Written(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def rewritten(function):
    """The primitives of the program, and how far its outputs are from the function's."""
    traced = trace(instrument(Written(function)), (X,), {})
    values, _ = Evaluation(Annotation(), None).run(traced.program, traced.args, {})
    pairs = zip(jax.tree.leaves(traced.outputs(values)), jax.tree.leaves(function(X)), strict=True)
    return [eqn.primitive for eqn in traced.program.equations], max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def exponentials(x, axis=-1):
    return jnp.exp(x - x.max(axis, keepdims=True))


def deviation(x, axis=-1):
    return jnp.sqrt(x.var(axis, keepdims=True) + 1e-5)


def centred(x, axis=-1):
    return x - x.mean(axis, keepdims=True)


@jax.jit
def hypot(x, y):
    """An estimate of the length, as people write it for microcontrollers."""
    return jnp.maximum(x, y) + 0.5 * jnp.minimum(x, y)


FOUND = {
    "softmax": (jax.nn.softmax, ["softmax"]),
    "softmax by hand": (lambda x: exponentials(x) / exponentials(x).sum(-1, keepdims=True), ["softmax"]),
    "log softmax": (jax.nn.log_softmax, ["log_softmax"]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), ["logsumexp"]),
    "layer norm": (lambda x: centred(x) / deviation(x), ["normalize"]),
    "rms norm": (lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6), ["normalize"]),
    "l2 norm": (lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6), ["normalize"]),
    "silu": (jax.nn.silu, ["table"]),
    "gelu": (jax.nn.gelu, ["table"]),
    "leaky": (lambda x: jnp.where(x > 0, x, 0.1 * x), ["table"]),
    "a function of its own": (lambda x: jax.jit(lambda y: jnp.tanh(y) + 1)(x), ["table"]),
    "a branch that is known": (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), ["table"]),
    "relu": (jax.nn.relu, ["relu"]),
    "roll": (lambda x: jnp.roll(x, 2, -1), ["slice", "slice", "concatenate"]),
    "repeat": (lambda x: jnp.repeat(x, 2, 1), ["broadcast_in_dim", "reshape"]),
    "tile": (lambda x: jnp.tile(x, (1, 2, 1)), ["broadcast_in_dim", "reshape"]),
    "rows": (lambda x: x[:, jnp.asarray([2, 0])], ["gather"]),
    "one row": (lambda x: x[:, 1], ["slice", "squeeze"]),
    "the length of a vector": (lambda x: jnp.hypot(x, jnp.flip(x, 1)), ["rev", "table", "table", "add", "table"]),
    "the sign of another": (
        lambda x: jnp.copysign(x, jnp.flip(x, 1)),
        ["rev", "lt", "table", "table", "select_n"],
    ),
    "a sign": (lambda x: jnp.where(jnp.signbit(x), x, x * 2), ["table"]),
    "another function of that name": (lambda x: hypot(x, jnp.flip(x, 1)), ["rev", "max", "min", "mul", "add"]),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.5, x), ["scan"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    function, expected = FOUND[name]
    primitives, apart = rewritten(function)
    assert primitives == expected
    assert apart < 1e-6


OTHERS = {
    # a function, and what it is not
    "sum over another axis": (lambda x: exponentials(x) / exponentials(x).sum(1, keepdims=True), "softmax"),
    "sum of other numbers": (lambda x: exponentials(x) / exponentials(x * 2).sum(-1, keepdims=True), "softmax"),
    "product for quotient": (lambda x: exponentials(x) * exponentials(x).sum(-1, keepdims=True), "softmax"),
    "quotient upside down": (lambda x: exponentials(x).sum(-1, keepdims=True) / exponentials(x), "softmax"),
    "powers of another base": (
        lambda x: (
            jnp.exp2(x - x.max(-1, keepdims=True)) / jnp.exp2(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ),
        "softmax",
    ),
    "logarithm of another axis": (
        lambda x: x - x.max(-1, keepdims=True) - jnp.log(exponentials(x).sum(1, keepdims=True)),
        "log_softmax",
    ),
    "logarithm of other numbers": (lambda x: x - jax.nn.logsumexp(x * 2, -1, keepdims=True), "log_softmax"),
    "logarithm added": (lambda x: x + jax.nn.logsumexp(x, -1, keepdims=True), "log_softmax"),
    "mean over another axis": (lambda x: centred(x, 1) / deviation(x), "normalize"),
    "variance of other numbers": (lambda x: centred(x) / deviation(x * 2), "normalize"),
    "product with a deviation": (lambda x: centred(x) * deviation(x), "normalize"),
    "square of other numbers": (
        lambda x: x * lax.rsqrt((jnp.roll(x, 1, 1) ** 2).mean(-1, keepdims=True) + 1e-6),
        "normalize",
    ),
    "cubes": (lambda x: x * lax.rsqrt(jnp.abs(x * x * x).mean(-1, keepdims=True) + 1e-6), "normalize"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else(name):
    function, unlike = OTHERS[name]
    primitives, apart = rewritten(function)
    assert unlike not in primitives
    assert apart < 1e-5


def test_the_angle_of_a_vector():
    y, x = (a.ravel() for a in np.meshgrid(*2 * [np.asarray([-3, -1, -0.5, 0, 0.5, 1, 3], np.float32)]))

    def function(y, x):
        return jnp.arctan2(y, x)

    traced = trace(instrument(Written(lambda v: function(v[:, 0], v[:, 1]))), (jnp.stack([y, x], 1),), {})
    assert not any(eqn.primitive == "atan2" for eqn in traced.program.equations)
    values, _ = Evaluation(Annotation(), None).run(traced.program, traced.args, {})
    np.testing.assert_allclose(traced.outputs(values), np.arctan2(y, x), atol=3e-7)
    model = Written(lambda v: function(v[:, :3], v[:, 3:]))
    given = data(32, 6)
    qmodel = qjax.quantize(model, qjax.Recipe(), given)
    graph = qjax.convert(qmodel, given)
    assert qjax.verify(graph, qmodel, [given]).local == 0
    turned = np.asarray(graph(given)) - np.asarray(model(given))
    assert np.mean(np.abs((turned + np.pi) % (2 * np.pi) - np.pi) < 0.05) > 0.95
    assert np.isfinite(jax.grad(lambda v: jnp.sum(qmodel(v)))(jnp.zeros((2, 6)))).all()


def test_a_function_of_two_tensors_is_no_table():
    primitives, _ = rewritten(lambda x: jnp.tanh(x) * jnp.flip(x, 1))
    assert sorted(primitives) == ["mul", "rev", "table"]


def test_loops_are_rewritten_within():
    traced = trace(
        instrument(Written(lambda x: lax.scan(lambda c, _: (jax.nn.softmax(c), None), x, length=2)[0])), (X,), {}
    )
    (scan,) = traced.program.equations
    assert scan.body is not None
    assert [eqn.primitive for eqn in scan.body.equations] == ["softmax"]


def test_values_are_the_functions_own():
    for function in (jax.nn.softmax, jax.nn.log_softmax, lambda x: jnp.roll(x, 2, -1)):
        assert rewritten(function)[1] == 0
    assert np.isfinite(rewritten(lambda x: centred(x) / deviation(x))[1])


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize(
    "table", [np.arange(5, dtype=np.int32), np.arange(11, 1, -2, dtype=np.uint8)], ids=["up", "down"]
)
def test_integers_at_equal_distances_are_computed_instead_of_looked_up(table, mode):
    """Indices within the table and beyond both of its ends, unless the model promises otherwise."""
    reach = 2 if mode == "promise_in_bounds" else 9

    def looked_up(values):
        def function(x):
            at = jnp.clip(jnp.round(x * 8), -reach, reach).astype(jnp.int32)
            at = at + 2 if mode == "promise_in_bounds" else at
            return jnp.asarray(values).at[at].get(mode=mode).astype(jnp.int32)

        return function

    at = np.clip(np.round(X * 8), -9, 9)
    assert at.min() < -5
    assert at.max() > 5
    primitives, difference = rewritten(looked_up(table))
    assert "gather" not in primitives
    assert difference == 0
    others = table.copy()
    others[-1] += 1
    primitives, difference = rewritten(looked_up(others))
    assert "gather" in primitives
    assert difference == 0
