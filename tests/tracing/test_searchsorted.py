"""Searches of sorted constants as comparisons and tables."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

EDGES = np.asarray([-1.0, -0.3, 0.0, 0.4, 1.0], np.float32)
KNOTS = np.linspace(-2, 2, 33, dtype=np.float32)


class Searching(nnx.Module):
    def __init__(self, function):
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x):
        return self.function(self.first(x))


INDICES = {
    "digitize": lambda x: jnp.digitize(x, EDGES),
    "digitize, right": lambda x: jnp.digitize(x, EDGES, right=True),
    "digitize, falling": lambda x: jnp.digitize(x, EDGES[::-1]),
    "digitize, falling, right": lambda x: jnp.digitize(x, EDGES[::-1], right=True),
    "searchsorted": lambda x: jnp.searchsorted(EDGES, x),
    "searchsorted, right": lambda x: jnp.searchsorted(EDGES, x, side="right"),
    "each row": lambda x: jax.vmap(lambda row: jnp.searchsorted(EDGES, row))(x),
}
LINES = {
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "interp, many": lambda x: jnp.interp(x, KNOTS, np.sin(KNOTS)),
    "interp, ends": lambda x: jnp.interp(x, EDGES, EDGES, left=-1.5, right=2.0),
    "interp, one end": lambda x: jnp.interp(x, EDGES, EDGES, right=2.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*INDICES, *LINES])
def test_searches_of_constants_convert(name):
    function = INDICES.get(name) or LINES[name]
    x = jax.random.normal(jax.random.key(0), (64, 8))
    qmodel = qjax.quantize(Searching(function), qjax.Recipe(), x)
    graph = qjax.convert(qmodel, x)
    assert qjax.verify(graph, qmodel, [x]).local == 0
    # the function of what the layer's codes stand for
    layer = qmodel.qparams()["first"]
    wide = np.asarray(qmodel.model.first(x))
    expected = function(jnp.asarray(wide))
    if name in INDICES:
        assert np.issubdtype(graph(x).dtype, np.integer)
        assert np.mean(np.asarray(graph(x)) == np.asarray(expected)) > 0.95
        assert [node.op for node in graph.ir.nodes].count("compare") == 1
    else:
        slope = 2.5 * float(np.max(np.asarray(layer.scale))) + 0.02
        close = np.abs(np.asarray(graph(x)) - np.asarray(expected)) < slope
        assert np.mean(close) > (0.95 if "end" in name else 0.999)
        assert [node.op for node in graph.ir.nodes].count("table") == 1


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.interp(x, EDGES, EDGES, period=3.0),
        lambda x: jnp.interp(x, np.linspace(-1, 1, 200, dtype=np.float32), np.ones(200, np.float32)),
        lambda x: jnp.digitize(x, jnp.sort(x[0])),
    ],
    ids=["period", "many knots", "edges of the data"],
)
def test_other_searches_are_named(function):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    with pytest.raises(qjax.ConversionError, match=r"'(interp|digitize)' on .*has no integer form"):
        qjax.convert(qjax.quantize(Searching(function), qjax.Recipe(), x), x)
