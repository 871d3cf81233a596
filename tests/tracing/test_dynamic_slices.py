"""Reads and writes at places that the data chooses: trained, converted, saved, emitted; what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax

N, SIZE, WIDTH = 3, 8, 4


class Of(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def batch(n=N, *shapes, low=-2, high=SIZE + 2, seed=0):
    keys = jax.random.split(jax.random.key(seed), 8)
    given = [jax.random.normal(k, (n, *shape)) for k, shape in zip(keys, shapes, strict=False)]
    return (*given, jax.random.randint(keys[-1], (n,), low, high, jnp.int32))


def twice(i):
    """Three places per example, two of which are one: the later write stays."""
    return jnp.stack([i, i + 1, i], axis=1)


def many(i):
    """Forty places per example: some come twice, and some lie behind the tensor."""
    steps = jnp.arange(40, dtype=jnp.int32) // 3
    return i[..., None] + steps.reshape((1,) * i.ndim + (-1,))


def fitting(x, y, i):
    """Three rows for each example; nothing is written where they do not fit."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (1,), (0,), (0,))
    return lax.scatter(x, i[:, None], y, numbers, mode="drop")


ROW, ROWS, CACHE = (WIDTH,), (3, WIDTH), (SIZE, WIDTH)

FORMS = {
    "read": (lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 3, axis=1), [CACHE]),
    "read one": (lambda x, i: lax.dynamic_index_in_dim(x, i[0], axis=1, keepdims=False), [CACHE]),
    "write one": (lambda x, y, i: lax.dynamic_update_index_in_dim(x, y[:, None], i[0], axis=1), [CACHE, ROW]),
    "write three": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i[0], 0)), [CACHE, ROWS]),
    "write a corner": (lambda x, y, i: lax.dynamic_update_slice(x, y[:, :, :2], (0, i[0], i[0] % 3)), [CACHE, ROWS]),
    "write all": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i[0], 0)) + x, [CACHE, CACHE]),
    "ring": (lambda x, y, i: lax.dynamic_update_slice(x, y[:, None], (0, i[0] % SIZE, 0)), [CACHE, ROW]),
    "at": (lambda x, y, i: x.at[:, i[0]].set(y), [CACHE, ROW]),
    "at, added": (lambda x, y, i: x.at[:, i[0]].add(y), [CACHE, ROW]),
    "vmap": (jax.vmap(lambda x, y, i: x.at[i].set(y)), [CACHE, ROW]),
    "vmap, slices": (jax.vmap(lambda x, y, i: lax.dynamic_update_slice(x, y[None], (i, 0))), [CACHE, ROW]),
    "vmap, one slice for all": (lambda x, i: jax.vmap(lambda e: lax.dynamic_slice_in_dim(e, i[0], 3, 0))(x), [CACHE]),
    "vmap, one row for all": (lambda x, i: jax.vmap(lambda e: lax.dynamic_slice(e, (i[0], 0), (1, WIDTH)))(x), [CACHE]),
    "vmap, one corner for all": (
        lambda x, i: jax.vmap(lambda e: lax.dynamic_slice(e, (i[0], i[1]), (3, 2)))(x),
        [CACHE],
    ),
    "vmap, all for all": (lambda x, i: jax.vmap(lambda e: lax.dynamic_slice_in_dim(e, i[0], SIZE, 0))(x) + x, [CACHE]),
    "vmap, one slice written": (
        lambda x, y, i: jax.vmap(lambda e, f: lax.dynamic_update_slice(e, f, (i[0], 0)))(x, y),
        [CACHE, ROWS],
    ),
    "vmap, an element": (jax.vmap(lambda x, y, i: x.at[i, i % WIDTH].set(y[0])), [CACHE, ROW]),
    "arange": (lambda x, y, i: x.at[jnp.arange(x.shape[0]), i].set(y), [CACHE, ROW]),
    "several": (lambda x, y, i: x.at[jnp.arange(x.shape[0])[:, None], twice(i)].set(y), [CACHE, ROWS]),
    "several, added": (lambda x, y, i: x.at[jnp.arange(x.shape[0])[:, None], twice(i)].add(y), [CACHE, ROWS]),
    "several, vmap": (jax.vmap(lambda x, y, i: x.at[jnp.stack([i, i + 1, i])].set(y)), [CACHE, ROWS]),
    "vmap, slices of three": (jax.vmap(lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0))), [CACHE, ROWS]),
    "vmap, a corner": (jax.vmap(lambda x, y, i: lax.dynamic_update_slice(x, y[:, :2], (i, i % 3))), [CACHE, ROWS]),
    "vmap, all": (jax.vmap(lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0))), [CACHE, CACHE]),
    "vmap, three or none": (jax.vmap(lambda x, y, i: x.at[i + jnp.arange(3)].set(y, mode="drop")), [CACHE, ROWS]),
    "slices that fit": (fitting, [CACHE, ROWS]),
    "many": (lambda x, y, i: x.at[jnp.arange(x.shape[0])[:, None], many(i)].set(y), [CACHE, (40, WIDTH)]),
    "many, everywhere": (lambda x, y, i: x.at[:, many(i)[0]].set(y), [CACHE, (40, WIDTH)]),
    "many elements": (jax.vmap(lambda x, y, i: x.at[many(i), many(i) % 3].set(y[:, 0])), [CACHE, (40, WIDTH)]),
    "several, everywhere": (lambda x, y, i: x.at[:, twice(i)[0]].set(y), [CACHE, ROWS]),
}


def everywhere(shapes):
    """One batch for every place of the first example, those before and behind the tensor included."""
    for place in range(-SIZE - 1, SIZE + 2):
        given = batch(5, *shapes, seed=2)
        yield (*given[:-1], jnp.asarray([place, *given[-1][1:]], jnp.int32))


def converted(name):
    function, shapes = FORMS[name]
    sample = batch(N, *shapes)
    qmodel = qjax.quantize(Of(function), qjax.Recipe(), sample)
    qjax.calibrate(qmodel, everywhere(shapes))
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, sample), sample, shapes


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:On a batch of 1 the model computes other things")  # JAX's vmap compares the sizes
@pytest.mark.parametrize("name", FORMS)
def test_the_graph_is_the_model(name):
    qmodel, graph, _, shapes = converted(name)
    for given in everywhere(shapes):
        found = np.asarray(graph(*given))
        np.testing.assert_array_equal(found, np.asarray(qmodel(*given)))
        # a wrong place would be far away
        wanted = np.asarray(qmodel.model(*given))
        assert np.abs(found - wanted).max() < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["read", "write three", "vmap", "vmap, slices of three", "many", "at, added"])
def test_exact_and_gradients(name):
    qmodel, graph, sample, _ = converted(name)
    forward = nnx.jit(qjax.exact(qmodel, sample))
    np.testing.assert_array_equal(forward(qmodel, *sample), graph(*sample))
    gradient = jax.grad(lambda x: jnp.sum(qmodel(x, *sample[1:]) ** 2))(sample[0])
    assert np.isfinite(gradient).all()
    assert np.asarray(gradient).any()


@pytest.mark.parametrize("name", ["read", "write three", "vmap", "vmap, slices of three", "many"])
@pytest.mark.sampled(2)
@pytest.mark.parametrize("runtime", ["c", "onnxruntime", "stablehlo"])
def test_emitted(name, runtime):
    qmodel, graph, sample, _ = converted(name)
    report = qjax.verify(graph, qmodel, [sample], runtimes=[runtime])
    assert report.exact, report


@pytest.mark.exhaustive
def test_what_is_written_is_read_unchanged():
    """A cache that goes through floats between two steps keeps its codes."""
    _, graph, _, shapes = converted("ring")
    cache = np.asarray(batch(4, *shapes)[0])
    codes = graph.quantize(cache, *batch(4, *shapes)[1:])[0]
    for step in range(2 * SIZE + 3):
        row = batch(4, ROW, seed=step)[0]
        place = jnp.full((4,), step, jnp.int32)
        cache = graph(cache, row, place)
        codes = graph.run(codes, *graph.quantize(cache, row, place)[1:])
        np.testing.assert_array_equal(graph.quantize(cache, row, place)[0], codes)
    assert len(np.unique(codes)) > 20


def test_weights_of_experts_are_written_where_a_router_chose():
    def function(x, _):
        scores, chosen = lax.top_k(x[:, :, 0], 2)
        weights = jnp.zeros(x.shape[:2]).at[jnp.arange(x.shape[0])[:, None], chosen].set(jax.nn.softmax(scores))
        return jnp.einsum("be,bew->bw", weights, x)

    sample = batch(4, CACHE)
    qmodel = qjax.quantize(Of(function), qjax.Recipe(), sample)
    given = batch(5, CACHE, seed=3)
    qjax.calibrate(qmodel, [sample, given], progress=False)
    graph = qjax.convert(qmodel, sample)
    found = np.asarray(graph(*given))
    np.testing.assert_array_equal(found, qmodel(*given))
    assert np.abs(found - qmodel.model(*given)).max() < 0.1


def test_a_sum_of_many_places_is_refused():
    sample = batch(N, CACHE, (40, WIDTH))
    with pytest.warns(UserWarning, match="'scatter-add' on .* has no integer form"):
        qmodel = qjax.quantize(Of(lambda x, y, i: x.at[:, i[:1] + jnp.arange(40)].add(y)), qjax.Recipe(), sample)
    with pytest.raises(ValueError, match=r"'scatter-add' on .* has no integer form"):
        qjax.convert(qmodel, sample)


def test_a_mask_is_read_at_places_that_the_data_chooses():
    """Of booleans and integers JAX fills with no NaN: a place that is not there is refused all the same."""

    def function(x, i):
        places = i[:, None] + jnp.arange(3)[None]
        return jnp.where(jnp.take_along_axis(x[:, :, 0] > 0, places, axis=1), 1.0, x[:, :3, 0])

    sample = batch(N, CACHE, low=0, high=4)
    qmodel = qjax.quantize(Of(function), qjax.Recipe(), sample)
    graph = qjax.convert(qmodel, sample)
    given = batch(5, CACHE, low=0, high=4, seed=3)
    np.testing.assert_array_equal(graph(*given), qmodel(*given))
    with pytest.raises(ValueError, match="indices"):
        graph(given[0], given[1] + SIZE)


@pytest.mark.exhaustive
def test_a_weight_that_a_loop_and_what_follows_it_read_has_two_quantizers():
    """Chunks of rows, then the rest: a loop may have scales for each of its turns, which the rest has not."""
    kernel = np.random.default_rng(0).normal(size=(WIDTH, 2)).astype(np.float32)

    def chunks(w, x):
        def chunk(out, start):
            rows = lax.dynamic_slice_in_dim(x, start, 2, 1)
            return lax.dynamic_update_slice_in_dim(out, rows @ w, start, 1), None

        out = lax.scan(chunk, jnp.zeros((x.shape[0], 5, 2)), jnp.arange(0, 4, 2))[0]
        return lax.dynamic_update_slice_in_dim(out, x[:, 4:] @ w, 4, 1)

    x = batch(N, (5, WIDTH))[0]
    qmodel = qjax.quantize(qjax.from_function(chunks, kernel), qjax.Recipe(), x)
    expected = np.abs(kernel).max(axis=0) * np.float32(1 / 127)
    found = [np.asarray(q.scale) for name, q in qmodel.qparams().items() if name.startswith("params")]
    assert sorted(value.shape for value in found) == [(2,), (2, 2)]
    assert np.array_equal(found[0], np.stack([found[1], found[1]]))
    assert np.array_equal(np.round(found[1] * 2**20), np.round(expected * 2**20))
    graph = qjax.convert(qmodel, x)
    assert len([node for node in graph.ir.nodes if node.op == "dot"]) == 3
