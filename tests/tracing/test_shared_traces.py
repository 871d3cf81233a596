"""Equal equations and equal quantizers are traced once; what is not equal is not taken for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import qjax
from qjax.calibration.estimators import LSQ, estimator
from qjax.numerics.calls import traced_once
from qjax.tracing import program, shared_traces
from tests.layers.round_trip import data


def equations(function, *arrays):
    return program.from_jaxpr(jax.make_jaxpr(function)(*arrays)).equations


def test_equal_equations_have_equal_forms():
    first, second = equations(lambda x, a, b: (x @ a) @ b, jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((3, 3)))
    assert first is not second
    assert shared_traces.form_of(first) == shared_traces.form_of(second)
    assert hash(shared_traces.form_of(first)) == hash(shared_traces.form_of(second))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, a: jnp.matmul(x, a, precision="highest"), (3, 3)),
        (lambda x, a: jnp.matmul(x, a, preferred_element_type=jnp.float16), (3, 3)),
        (lambda x, a: jnp.einsum("ij,kj->ik", x, a), (3, 3)),
        (jnp.matmul, (3, 4)),
    ],
)
def test_a_precision_a_dtype_axes_or_a_shape_make_another_form(function, shape):
    def product(function, shape):
        found = equations(function, jnp.ones((2, 3)), jnp.ones(shape))
        return shared_traces.form_of(next(eqn for eqn in found if eqn.primitive == "dot_general"))

    assert product(function, shape) is not None
    assert product(function, shape) != product(jnp.matmul, (3, 3))


def test_a_literal_or_a_function_among_the_parameters_has_no_form():
    (scaled,) = equations(lambda x: x * 2.0, jnp.ones(3))
    assert shared_traces.form_of(scaled) is None
    (loop,) = equations(lambda x: jax.lax.scan(lambda c, _: (c + 1.0, None), x, length=2)[0], jnp.ones(3))
    assert shared_traces.form_of(loop) is None


def test_a_function_is_traced_once_and_concrete_arrays_compile_nothing():
    calls = []

    @traced_once(0)
    def power(n, x):
        calls.append(isinstance(x, Tracer))
        return x**n

    x = data(4)
    # one trace for the two equal calls, one for the other exponent
    twice = jax.jit(lambda x: (power(2, x), power(2, 2 * x), power(3, x)))(x)
    assert calls == [True, True]
    assert np.array_equal(twice[0], power(2, x))
    assert np.array_equal(twice[1], power(2, 2 * x))
    assert np.array_equal(twice[2], power(3, x))
    assert calls == [True, True, False, False, False]


def test_an_estimator_without_a_hash_is_refused():
    @dataclasses.dataclass
    class Own(LSQ):
        strength: float = 1.0

    with pytest.raises(TypeError, match=r"Own: expected a hashable estimator.*frozen=True"):
        qjax.Recipe(method=Own())
    with pytest.raises(TypeError, match="hashable"):
        estimator(Own())
