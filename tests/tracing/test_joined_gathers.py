"""Gathers in which each example chooses along several axes at once."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import check, data

N, HEIGHT, WIDTH, CHANNELS, PLACES = 3, 4, 5, 8, 6
X = data(N, HEIGHT, WIDTH, CHANNELS)
I = jax.random.randint(jax.random.key(1), (N, PLACES), 0, HEIGHT)
J = jax.random.randint(jax.random.key(2), (N, PLACES), 0, WIDTH)


class Choosing(nnx.Module):
    def __init__(self, function):
        self.first = nnx.Linear(CHANNELS, CHANNELS, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x, i, j):
        return self.function(self.first(x), i, j)


LONG = data(N, 300, 2, CHANNELS)
PLACE = jnp.asarray([[0, 255], [7, 200], [130, 1]], jnp.uint8)


def test_small_integers_that_choose_along_a_long_axis():
    """The joined index does not fit into their dtype."""
    function = lambda x, i, j: jax.vmap(lambda row, a, b: row[a, b])(x, i, j)  # noqa: E731
    check(Choosing(function), (LONG, PLACE, PLACE % 2))


FORMS = {
    "two axes": lambda x, i, j: x[jnp.arange(len(x))[:, None], i, j],
    "one element": lambda x, i, j: x[jnp.arange(len(x)), i[:, 0], j[:, 0]],
    "vmap": lambda x, i, j: jax.vmap(lambda row, a, b: row[a, b])(x, i, j),
    "the other order": lambda x, i, j: jax.vmap(lambda row, a, b: jnp.swapaxes(row, 0, 1)[b, a])(x, i, j),
    "with an axis between": lambda x, i, j: jax.vmap(lambda row, a, b: row[a, :, b])(x, i, j),
    "three axes": lambda x, i, j: jax.vmap(lambda row, a, b: row[a, b, a])(x, i, j),
    "beyond the ends": lambda x, i, j: jax.vmap(lambda row, a, b: row.at[a * 3, b - 9].get(mode="clip"))(x, i, j),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FORMS)
def test_elements_by_several_indices(name):
    model, sample = Choosing(FORMS[name]), (X, I, J)
    qmodel, graph = check(model, sample)
    assert np.abs(graph(*sample) - qmodel.model(*sample)).max() < 0.05


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_filling_what_is_out_of_range_is_refused():
    def function(x, i, j):
        return jax.vmap(lambda row, a, b: row.at[a, b].get(mode="fill", fill_value=0.0))(x, i, j)

    qmodel = qjax.quantize(Choosing(function), qjax.Recipe(), (X, I, J))
    with pytest.raises(qjax.ConversionError, match="'gather' on 3x4x5x8, 3x6x2 has no integer form"):
        qjax.convert(qmodel, (X, I, J))
