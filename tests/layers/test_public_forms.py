"""Forms that public Flax code uses: each is read as the model means it, and is exact."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

import qjax
from qjax.layers import instrument, trace
from tests.layers.round_trip import assert_same, data

LENGTH, WIDTH, WORDS = 6, 16, 20
X = data(3, LENGTH, WIDTH)
IDS = jnp.asarray(np.random.default_rng(0).integers(1, WORDS, (3, LENGTH)), jnp.int32)
COUNT = jnp.arange(1.0, 17.0).reshape(1, 1, WIDTH)
SEGMENTS = jnp.array([0, 1, 1, 2, 0, 2])
ORDER = Layout(major_to_minor=(0, 1, 2))
TRIL = np.tril(np.ones((LENGTH, LENGTH), bool))


class Net(nnx.Module):
    """Layers for the functions below, which are its forward one at a time or all together."""

    def __init__(self, functions: dict[str, Callable[..., Any]]):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(32, WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.other = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs), nnx.GroupNorm(WIDTH, 4, rngs=rngs)]
        )
        self.row = nnx.Param(jax.random.normal(jax.random.key(3), (1, 1, WIDTH)))
        self.functions = functions

    def __call__(self, x, ids):
        return {name: function(self, x, ids) for name, function in self.functions.items()}


def causal(m, x, ids):
    """A mask of the data combined with a constant one of the batch's size, through floats."""
    mask = nnx.combine_masks(nnx.make_attention_mask(ids > 0, ids > 2), nnx.make_causal_mask(ids))
    return m.attention(m.table(ids), mask=mask)


def heads(m, x, ids, *, turned, data):
    """Attention by hand of learned rows, which every example has, and data; heads made by reshapes."""

    def split(y):
        y = y.reshape(len(x), -1, 2, WIDTH // 2)
        return y.transpose(0, 2, 1, 3) if turned else y

    rows = m.dense(jnp.broadcast_to(m.row[...] * COUNT[0, 0, :3].reshape(1, 3, 1), (len(x), 3, WIDTH)))
    queries, keys = (m.other(x), rows) if data == "queries" else (rows, m.other(x))
    if turned:
        scores = split(queries) @ split(keys).swapaxes(-1, -2)
        return jax.nn.softmax(scores / 4, axis=-1) @ split(keys)
    scores = jnp.einsum("bqhd,bkhd->bhqk", split(queries), split(keys))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores / 4, axis=-1), split(keys))


def normalized_probe(m, x, ids):
    """Perceiver's latents: the norm of a constant, as layers of flax."""
    probe = jnp.tile(m.row[...], (len(x), 2, 1))
    return sum(m.attention(norm(probe), x, x) for norm in m.norms)


def keras_norm(m, x, ids):
    """`LayerNormalization` of Keras and TensorFlow."""
    x = m.dense(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    inv = lax.rsqrt(variance + 1e-3) * m.row[...]
    return x * inv + (0.5 - mean * inv)


def switched_scan(m, x, ids):
    def step(carry, given):
        number, row = given
        carry = lax.cond(number % 2 == 0, lambda c: jnp.tanh(m.dense(c) + row), lambda c: m.other(c) - row, carry)
        return carry, carry

    _, ys = lax.scan(step, x[:, 0], (jnp.arange(LENGTH), jnp.swapaxes(x, 0, 1)))
    return jnp.swapaxes(ys, 0, 1)


def drawing_scan(m, x, ids):
    """flax's seq2seq: words drawn at random leave the loop, but only the logits are used."""

    def step(carry, row):
        state, key, _ = carry
        state = jnp.tanh(m.dense(state) + row)
        key, own = jax.random.split(key)
        word = jax.random.categorical(own, state)
        return (state, key, word), (state, jax.nn.one_hot(word, WIDTH))

    start = (x[:, 0], jax.random.key(0), jnp.zeros(len(x), jnp.int32))
    _, (states, words) = lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    states, _ = jnp.swapaxes(states, 0, 1), jnp.swapaxes(words, 0, 1)
    return states


def pooled(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "SAME")


MOVES: dict[str, Callable[..., Any]] = {
    # constants of the batch's size that are the same for every example
    "causal": causal,
    "broadcast mask": lambda m, x, i: jnp.where(jnp.broadcast_to(TRIL[None, :, :1], x.shape), m.dense(x), 0.0),
    "positions": lambda m, x, i: m.dense(x) + m.places(jnp.broadcast_to(jnp.arange(LENGTH), i.shape)),
    "class token": lambda m, x, i: jnp.concatenate([jnp.broadcast_to(m.row[...], (len(x), 1, WIDTH)), x], 1),
    "ones": lambda m, x, i: m.dense(x) + jnp.ones_like(x) * m.row[...],
    "numpy ones": lambda m, x, i: m.dense(x) + np.full(x.shape, 0.5, np.float32),
    "numpy mask": lambda m, x, i: jnp.where(np.repeat(TRIL[None, :, :1], len(x), 0), m.dense(x), 0.0),
    # each example takes its own element
    "last word": lambda m, x, i: m.dense(x)[jnp.arange(len(x)), (i > 4).sum(-1) - 1],
    "end of text": lambda m, x, i: m.dense(x)[jnp.arange(len(x)), jnp.argmax(i, -1)],
    "row of each": lambda m, x, i: jax.vmap(lambda row, n: row[n])(m.dense(x), jnp.argmax(i == 5, -1)),
    "roll of each": lambda m, x, i: jax.vmap(functools.partial(jnp.roll, axis=0))(m.dense(x), i[:, 0]),
    "window of each": lambda m, x, i: jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, 3))(m.dense(x), i[:, 0]),
    "same places for each": lambda m, x, i: jnp.take_along_axis(
        m.dense(x), jnp.tile(jnp.arange(LENGTH)[None, ::-1, None], (len(x), 1, 1)), axis=1
    ),
    # integers that stand for themselves
    "shift right": lambda m, x, i: m.table(jnp.pad(i, ((0, 0), (1, 0)))[:, :-1]),
    "shift with a start": lambda m, x, i: m.table(jnp.zeros_like(i).at[:, 1:].set(i[:, :-1]).at[:, 0].set(2)),
    "pad with a word": lambda m, x, i: m.table(jnp.pad(i, ((0, 0), (1, 1)), constant_values=4)),
    "remainder": lambda m, x, i: m.table(jnp.clip(i % 7, 1, 5)) + m.places(i // 2),
    "sign": lambda m, x, i: m.places(jnp.sign(i - 5) + jnp.abs(i - 9)),
    # branches
    "branch of each": lambda m, x, i: jax.vmap(lambda r, n: lax.cond(n > 5, lambda r: -r, lambda r: r, r))(x, i[:, 0]),
}
"""Forms whose reading moves, selects or counts: the same float bits."""

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "probe": lambda m, x, i: m.attention(jnp.tile(m.row[...], (len(x), 1, 1)), x, x),
    "normalized probe": normalized_probe,
    "heads of queries": functools.partial(heads, turned=False, data="keys"),
    "heads of keys": functools.partial(heads, turned=False, data="queries"),
    "turned heads of queries": functools.partial(heads, turned=True, data="keys"),
    "turned heads of keys": functools.partial(heads, turned=True, data="queries"),
    "start of a state": lambda m, x, i: m.dense(jnp.zeros((len(x), WIDTH))) + m.other(x[:, 0]),
    "softmax of a constant": lambda m, x, i: m.dense(x)[:, 0] * jax.nn.softmax(jnp.ones((len(x), WIDTH)) * m.row[0]),
    # an axis of size 1 beside a wider constant
    "column times row": lambda m, x, i: m.dense(x[..., :1] * COUNT),
    "row over column": lambda m, x, i: COUNT / (2 + jnp.abs(m.dense(x)[..., :1])),
    "column plus row": lambda m, x, i: m.dense(x)[..., :1] + m.row[...],
    "column times column": lambda m, x, i: m.dense(x)[:, :1] * x[..., :1],
    # constants with a row for every example, all rows equal, in arithmetic that keeps one
    "pool of ones": lambda m, x, i: pooled(m.dense(x)) / pooled(jnp.ones_like(x)),
    "places counted": lambda m, x, i: m.dense(x + jnp.sin(jnp.cumsum(jnp.ones(i.shape), 1))[..., None]),
    "times places": lambda m, x, i: m.dense(x) * jnp.cumsum(jnp.ones((len(x), LENGTH, 1)), 1),
    "at least places": lambda m, x, i: jnp.maximum(m.dense(x), jnp.sin(jnp.cumsum(jnp.ones_like(x), 1))),
    # what `x @ matrix` is with JAX's usual promotion of dtypes
    "matrix of integers": lambda m, x, i: lax.dot_general(
        m.dense(x),
        jnp.tril(jnp.ones((WIDTH, WIDTH), jnp.int32)).T,
        (((2,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    ),
    "keras norm": keras_norm,
    "standardize": lambda m, x, i: jax.nn.standardize(m.dense(x)),
    # sums of segments
    "segments": lambda m, x, i: jax.vmap(lambda r: jax.ops.segment_sum(r, SEGMENTS, 4))(m.dense(x)),
    "switched scan": switched_scan,
    "drawing scan": drawing_scan,
}
"""Forms whose reading computes in another order."""


def evaluated(model: Net, x: jax.Array, ids: jax.Array) -> Any:
    """The program as qjax reads it, on floats."""
    traced = trace(instrument(model), (x, ids), {})

    def run(args: Any) -> Any:
        env = dict(zip(traced.program.inputs, args, strict=True))
        for eqn in traced.program.equations:
            if eqn.body is None:
                results = eqn.bind(*(env.get(v, v.constant) for v in eqn.inputs))
            else:
                pytest.fail("a body has an evaluation of its own")
            env.update(zip(eqn.outputs, results, strict=True))
        return traced.outputs([env.get(v, v.constant) for v in traced.program.outputs])

    return jax.jit(run)(traced.args)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.exhaustive), LENGTH])
def test_moves_are_read_as_they_are_meant(batch: int) -> None:
    model, (x, ids) = Net(MOVES), (jnp.tile(X, (2, 1, 1))[:batch], jnp.tile(IDS, (2, 1))[:batch])
    assert_same(evaluated(model, x, ids), jax.jit(model)(x, ids))


@pytest.mark.parametrize("batch", [1, LENGTH])
@pytest.mark.sampled(1)
def test_arithmetic_is_read_as_it_is_meant(batch: int) -> None:
    # of another order of float operations: a few units in the last place of numbers up to 100
    functions = {name: f for name, f in ARITHMETIC.items() if not name.endswith("scan")}
    model, (x, ids) = Net(functions), (jnp.tile(X, (2, 1, 1))[:batch], jnp.tile(IDS, (2, 1))[:batch])
    found, expected = evaluated(model, x, ids), jax.jit(model)(x, ids)
    for name in functions:
        error = np.abs(np.asarray(found[name]) - np.asarray(expected[name])).max()
        assert error <= 1e-5 * np.abs(np.asarray(expected[name])).max(), name


SOME = (
    *("broadcast mask", "positions", "class token", "last word", "roll of each", "shift right", "branch of each"),
    *("normalized probe", "heads of queries", "row over column", "places counted", "matrix of integers", "keras norm"),
    *("switched scan", "drawing scan"),
)
"""One of each kind; all are read in `test_moves_...` and `test_arithmetic_...` but the scans, which are here."""


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.exhaustive)])
def converted(request: pytest.FixtureRequest) -> tuple[Net, qjax.QuantizedModel, qjax.IntegerGraph]:
    functions = {**MOVES, **ARITHMETIC}
    model = Net(functions if request.param == "all" else {name: functions[name] for name in SOME})
    qmodel = qjax.quantize(model, qjax.Recipe(activations=qjax.QSpec(bits=10)), (X, IDS))
    qmodel.eval()
    return model, qmodel, qjax.convert(qmodel, (X, IDS))


def test_every_form_converts_for_any_batch_and_says_what_the_model_says(converted: Any) -> None:
    model, _, graph = converted
    found, several = graph(X, IDS), graph(jnp.tile(X, (2, 1, 1)), jnp.tile(IDS, (2, 1)))
    for name, value in jax.jit(model)(X, IDS).items():
        np.testing.assert_array_equal(several[name][3:], found[name], name)
        a, b = np.asarray(value, np.float64).ravel(), np.asarray(found[name], np.float64).ravel()
        assert a @ b > 0.999 * np.linalg.norm(a) * np.linalg.norm(b), name


@pytest.mark.exhaustive
def test_the_exact_forward_of_some_forms_is_the_graph() -> None:
    chosen = ("causal", "last word", "keras norm")
    qmodel = qjax.quantize(Net({name: {**MOVES, **ARITHMETIC}[name] for name in chosen}), qjax.Recipe(), (X, IDS))
    qmodel.eval()
    expected = qjax.convert(qmodel, (X, IDS))(X[:2], IDS[:2])
    assert_same(nnx.jit(qjax.exact(qmodel, (X, IDS)))(qmodel, X[:2], IDS[:2]), expected)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "constant that differs": (lambda m, x, i: m.dense(x) + jnp.arange(float(len(x)))[:, None, None], "from example"),
    "mask that differs": (
        lambda m, x, i: jnp.where((jnp.arange(len(x)) % 2 == 0)[:, None, None], m.dense(x), 0.0),
        "differs from example to example",
    ),
    "element of the first example": (lambda m, x, i: m.dense(x)[jnp.zeros(len(x), int), i[:, 0] % 6], "gather"),
    "examples in another order": (lambda m, x, i: m.dense(x)[jnp.arange(len(x))[::-1], i[:, 0] % 6], "gather"),
    "rows of which the data has one": (
        lambda m, x, i: m.dense(x.sum(0, keepdims=True)) + jnp.cumsum(jnp.ones((len(x), LENGTH, 1)), 1),
        "repeats a tensor of shape",
    ),
    "random numbers": (
        lambda m, x, i: m.dense(x) + jax.random.normal(jax.random.key(0), x.shape),
        "random numbers for",
    ),
    "division by data": (lambda m, x, i: m.table(WORDS // jnp.maximum(i, 1)), "div"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
@pytest.mark.sampled(3)
def test_what_treats_an_example_by_its_place_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    qmodel = qjax.quantize(Net({"y": function}), qjax.Recipe(), (X, IDS))
    with pytest.raises(qjax.ConversionError, match=message):
        qjax.convert(qmodel, (X, IDS))


def calibrated(net):
    """The network with quantizers, and its graph."""
    qmodel = qjax.quantize(net, qjax.Recipe(), (X, IDS))
    qjax.calibrate(qmodel, [(X, IDS)], progress=False)
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, (X, IDS))


def test_where_arrays_lie():
    """What says where an array of floats, integers or truth values lies, or names it, is no operation."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    anywhere, rows = jax.sharding.PartitionSpec(None), jax.sharding.PartitionSpec("data")

    def function(m, x, ids):
        x, ids = jax.sharding.reshard(x, anywhere), lax.with_sharding_constraint(ids, rows)
        shown = checkpoint_name(ids > 3, "shown")
        return m.dense(jnp.where(shown[..., None], m.table(jax.device_put(ids)), with_layout_constraint(x, ORDER)))

    net = Net({"y": function})
    with jax.set_mesh(mesh):
        qmodel, graph = calibrated(net)
        wanted = qmodel(X, IDS)
    assert_same(graph(X, IDS), jax.tree.map(np.asarray, wanted))


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.sampled(1)
def test_associative_scans(length):
    """Of even lengths JAX combines tensors without elements on the way."""

    def function(m, x, ids):
        x = m.dense(x)[:, :length]
        decay = jnp.broadcast_to(jax.nn.sigmoid(m.row[...]), x.shape)
        return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=1)[1]

    net = Net({"y": function})
    qmodel, graph = calibrated(net)
    assert qjax.verify(graph, qmodel, [(X, IDS)]).local == 0
    assert np.abs(graph(X, IDS)["y"] - net(X, IDS)["y"]).max() < 0.1


@jax.custom_vjp
def added_up(y):
    """A sum over the axis "model" whose gradient is not summed again, as Megatron's parallel layers have it."""
    return lax.psum(y, "model")


added_up.defvjp(lambda y: (lax.psum(y, "model"), None), lambda _, g: (g,))


def on_each(table, x, w):
    """What a member of the axes "data" and "model" does with its part."""
    place = lax.axis_index("model").astype(jnp.float32)
    y = added_up(nnx.silu(x @ lax.all_gather(w, "model", axis=0, tiled=True)))
    return lax.fori_loop(0, 2, lambda _, c: nnx.relu(c * 0.5 + y), y) + place + table


def test_shard_map_on_one_device():
    """A call; what is said to the other members of an axis is said to oneself."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.PartitionSpec("data")

    def function(m, x, ids):
        specs = (rows, rows, jax.sharding.PartitionSpec())
        split = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return split(m.table(ids), x, m.dense.kernel[...])

    net = Net({"y": function})
    qmodel, graph = calibrated(net)
    assert qjax.verify(graph, qmodel, [(X, IDS)]).local == 0
    assert_same(graph(X, IDS), jax.tree.map(np.asarray, qjax.exact(qmodel, (X, IDS))(qmodel, X, IDS)))
    assert np.abs(graph(X, IDS)["y"] - net(X, IDS)["y"]).max() < 0.1


def test_shard_map_with_marks_of_what_varies():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def function(m, x, ids):
        return m.dense(jax.shard_map(lambda x: nnx.relu(x) + 1.0, mesh=mesh, in_specs=rows, out_specs=rows)(x))

    plain = calibrated(Net({"y": lambda m, x, ids: m.dense(nnx.relu(x) + 1.0)}))[1]
    assert_same(calibrated(Net({"y": function}))[1](X, IDS), jax.tree.map(np.asarray, plain(X, IDS)))
