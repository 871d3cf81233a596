"""Products of many elements as products of halves."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.layers import instrument, trace
from qjax.tracing import Annotation, Evaluation
from tests.layers.round_trip import check, data

X = data(3, 4, 12)


class Of(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(1.0 - 0.5 * jax.nn.sigmoid(x))


FORMS = {
    **{f"{n} elements": lambda x, n=n: jnp.prod(x[..., :n], axis=-1) for n in (1, 2, 3, 4, 5, 6, 7, 8, 11)},
    "two axes": lambda x: jnp.prod(x, axis=(1, 2)),
    "the first of an example": lambda x: jnp.prod(x, axis=1, keepdims=True),
    **{f"running, {n} elements": lambda x, n=n: jnp.cumprod(x[..., :n], axis=-1) for n in (1, 2, 3, 5, 8, 12)},
    "running along another axis": lambda x: jnp.cumprod(x, axis=1),
    "running back": lambda x: jax.lax.cumprod(x, axis=2, reverse=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_product(name):
    model = Of(FORMS[name])
    found = trace(instrument(model), (X,), {})
    values, _ = Evaluation(Annotation(), None).run(found.program, found.args, {})
    # floats are multiplied in another order
    np.testing.assert_allclose(found.outputs(values), model(X), rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMS)
def test_it_converts(name):
    model = Of(FORMS[name])
    _, graph = check(model, X)
    assert np.abs(graph(X) - model(X)).max() < 0.03


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
@pytest.mark.parametrize("function", [lambda x: jnp.cumprod(x, axis=1), lambda x: jnp.prod(x, axis=1)])
def test_too_many_elements_are_an_error(function):
    x = data(1, 4097)
    qmodel = qjax.quantize(Of(function), qjax.Recipe(), x)
    with pytest.raises(qjax.ConversionError, match=r"prod' on 1x4097 has no integer form\. At most 4096 elements"):
        qjax.convert(qmodel, x)
