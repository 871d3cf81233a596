"""Loops over time become unrolled integers: recurrent layers, carries of every kind, stacked outputs."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

import re

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import Recipe
from tests.layers.round_trip import assert_same, assert_verified, check, data, doubled

X = data(2, 2, 3)


class Recurrent(nnx.Module):
    """A recurrent layer of flax, and a head on all its outputs."""

    def __init__(self, cell, **options):
        self.rnn = nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0)), **options)
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.rnn(x))


class Parts(nnx.Module):
    """What hand-written loops are made of."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.i = nnx.Linear(3, 4, rngs=rngs)
        self.h = nnx.Linear(4, 4, rngs=rngs)
        self.start = nnx.Linear(3, 4, rngs=rngs)
        self.many = nnx.Param(data(2, 4, 4) * 0.4)
        self.learned = nnx.Param(jnp.full((4,), 0.3))

    def zeros(self, x):
        return jnp.zeros((x.shape[0], 4))

    def step(self, h, x):
        h = nnx.relu(self.i(x) + self.h(h))
        return h, h


def loop(model, h, x, step=None, **options):
    return jax.lax.scan(step or model.step, h, x.swapaxes(0, 1), **options)


def codes_of(model, x=X, recipe=None):
    """Quantize, convert, and compare the graph with the training forward and the exact one, eagerly."""
    qmodel = qjax.quantize(model, recipe or Recipe(), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    more = doubled(x)
    assert_verified(qjax.verify(graph, qmodel, [more]))
    return qmodel, graph


# ---------------------------------------------------------------------------- flax's own


@pytest.fixture(scope="module")
def lstm():
    return check(Recurrent(nnx.LSTMCell), X)


@pytest.mark.exhaustive
def test_an_lstm(lstm):
    qmodel, graph = lstm
    labels = [node.name for node in graph.ir.nodes]
    assert [f"rnn/cell/hi[{i}]" in labels for i in range(3)] == [True, True, False]
    codes = qmodel.codes(X)[1]
    assert {"rnn/start", "rnn/start#2", "rnn/cell/hi[0]", "rnn/cell/hi[1]", "rnn/cell/ii", "head"} <= codes.keys()
    # one quantizer for all iterations, one for both ends of the carry
    assert {p.scale.ndim for name, p in qmodel.qparams().items() if "kernel" not in name} == {0}
    grids = graph.ir.tensors
    assert grids["rnn/start#2"].quantization.scale == grids["rnn/cell/multiply#3[1]"].quantization.scale


def test_iterations_share_their_constants(lstm):
    nodes = {node.name: node for node in lstm[1].ir.nodes}
    assert nodes["rnn/cell/hi[0]"].constants == nodes["rnn/cell/hi[1]"].constants
    assert nodes["rnn/cell/table[0]"].constants == nodes["rnn/cell/table[1]"].constants


@pytest.mark.exhaustive
def test_a_recurrent_graph_survives_a_file_and_leaves_for_a_runtime(lstm, tmp_path):
    graph = lstm[1]
    graph.save(tmp_path / "m.qjax")
    assert_same(qjax.load(tmp_path / "m.qjax")(X), graph(X))
    graph.emit("onnx", tmp_path / "m.onnx")
    ort = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    x = np.asarray(graph.quantize(doubled(X)))
    assert np.array_equal(ort.run(None, {ort.get_inputs()[0].name: x})[0], graph.run(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [nnx.GRUCell, nnx.OptimizedLSTMCell])
def test_other_cells(cell):
    codes_of(Recurrent(cell))


@pytest.mark.exhaustive
def test_a_reversed_layer_in_bfloat16():
    class Model(Parts):
        def __call__(self, x):
            _, ys = loop(self, self.zeros(x).astype(jnp.bfloat16), x.astype(jnp.bfloat16), self.low, reverse=True)
            return ys

        def low(self, h, x):
            h = nnx.relu(x @ self.i.kernel[...].astype(x.dtype) + h @ self.h.kernel[...].astype(x.dtype))
            return h, h

    graph = codes_of(Model())[1]
    rows = next(node for node in graph.ir.nodes if node.op == "concatenate").inputs
    assert rows == ("row[0]", "row[1]")


# ---------------------------------------------------------------------------- carries


class Data(Parts):
    """Starts from data that is read elsewhere too; hands out the last carry and all."""

    def __call__(self, x):
        h0 = nnx.relu(self.start(x[:, 0]))
        early = self.h(h0)
        h, ys = loop(self, h0, x)
        return h + early, ys


class Argument(Parts):
    def __call__(self, x, h):
        return loop(self, h, x)


class Learned(Parts):
    def __call__(self, x):
        return loop(self, jnp.broadcast_to(self.learned[...][None], (x.shape[0], 4)), x)[0]


class Steady(Parts):
    """A counter, a random key and a decay go round beside the state; a weight and a mask per step come in."""

    def __call__(self, x):
        def step(carry, xs):
            h, count, key, decay = carry
            x, w, mask = xs
            key, _ = jax.random.split(key)
            h = nnx.relu(self.i(x) * decay + h @ w) * mask
            return (h, count + 1, key, decay * 0.5), (h, count)

        start = (self.zeros(x), 0, jax.random.key(0), jnp.float32(1))
        xs = (x.swapaxes(0, 1), self.many[...], jnp.array([0.0, 1.0]))
        _, (ys, counts) = jax.lax.scan(step, start, xs)
        return ys * counts.astype(jnp.float32)[:, None, None]


class Swapped(Parts):
    def __call__(self, x):
        def step(carry, x):
            h, g = carry
            return (g, nnx.relu(self.i(x) + self.h(h))), None

        (h, g), _ = loop(self, (self.zeros(x), self.zeros(x)), x, step)
        return h + g


class Shifted(Parts):
    """The carry is the data of the step before: one grid for both."""

    def __call__(self, x):
        return loop(self, jnp.zeros((x.shape[0], 3)), x, lambda c, x: (x, self.i(x + c)))


class Remat(Parts):
    def __call__(self, x):
        return loop(self, self.zeros(x), x, jax.checkpoint(self.step))


class Mapped(Parts):
    def __call__(self, x):
        return jax.lax.map(lambda t: nnx.relu(self.i(t)), x.swapaxes(0, 1))


class Loops(nnx.Module):
    """All of them in one model: one trace, one graph."""

    def __init__(self):
        kinds = (Data, Learned, Steady, Swapped, Shifted, Remat, Mapped)
        self.loops = nnx.Dict({kind.__name__.lower(): kind() for kind in kinds})

    def __call__(self, x):
        return {name: run(x) for name, run in self.loops.items()}


@pytest.mark.filterwarnings("ignore:.*a single number")
def test_loops():
    _, graph = codes_of(Loops())
    tensors = graph.ir.tensors
    # from the grid of its own, which it was given for other readers, onto that of the carry
    assert [node.op for node in graph.ir.nodes if node.name == "loops/data/start"] == ["dot"]
    assert [node.op for node in graph.ir.nodes if node.name == "loops/data/start#2"] == ["rescale"]
    assert tensors["loops/learned/start"].shape == (None, 4)
    assert tensors["loops/learned/start/value"].shape == (1, 4)
    # the shift register's carry is the data itself
    assert tensors["loops/shifted/start"].quantization is tensors["input"].quantization


def test_an_initial_state_from_outside_stands_on_the_carry_s_grid():
    graph = codes_of(Argument(), (X, data(2, 4, seed=3)))[1]
    assert graph.ir.tensors["input/1"].quantization is graph.ir.tensors["add[0]"].quantization
    assert "start" not in {node.name for node in graph.ir.nodes}
    assert len(graph.ir.inputs) == 2


@pytest.mark.exhaustive
def test_layers_of_time():
    """A scan over parameters around one over data: grids per layer, one for all steps; what it stacks is rescaled."""

    class Model(Parts):
        def __call__(self, x):
            def layer(y, w):
                def step(h, y):
                    h = nnx.relu(y @ w + self.h(h))
                    return h, h

                ys = loop(self, self.zeros(x), y, step)[1]
                return ys.swapaxes(0, 1), ys[-1]

            return jax.lax.scan(layer, self.i(x), self.many[...])

    qmodel, graph = codes_of(Model())
    sizes = {name: p.scale.shape for name, p in qmodel.qparams().items()}
    assert sizes["add"] == sizes["dot"] == (2,)
    assert sizes["h/kernel"] == sizes["many"] == (2, 4)
    assert [name for name in graph.ir.tensors if re.fullmatch(r"scan_output\[\d\]", name)] == [
        "scan_output[0]",
        "scan_output[1]",
    ]


@pytest.mark.exhaustive
def test_the_quantizers_see_every_iteration():
    class Model(Parts):
        def __call__(self, x):
            return loop(self, self.zeros(x), x)[1]

    x = X * jnp.array([10.0, 1.0])[None, :, None]
    qmodel, _ = codes_of(Model(), x)
    seen = qmodel.model(x)
    # 255 steps reach the largest value of all iterations, and no further
    assert np.rint(seen.max() / qmodel.qparams()["add"].scale) == 255


def test_training_moves_the_shared_scales():
    qmodel = qjax.quantize(Remat(), Recipe(), X)
    grads = nnx.grad(lambda m: jnp.sum(m(X)[1] ** 2))(qmodel)
    assert qmodel.quantizers.named(grads["quantizers"])["add"]["log2_scale"] != 0
    assert np.abs(grads["model"]["h"]["kernel"][...]).max() > 0


CELLS = [*(pytest.param(c, marks=pytest.mark.exhaustive) for c in (nnx.LSTMCell, nnx.GRUCell)), nnx.SimpleCell]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS)
def test_a_scale_s_gradient_is_summed_after_the_loop(cell, monkeypatch):
    """Up to rounding the gradients that sums in each step give: they are sums of floats in another order."""
    qmodel = qjax.quantize(Recurrent(cell), Recipe(), X)
    graphdef, state = nnx.split(qmodel)

    def loss(state):
        return jnp.sum(nnx.merge(graphdef, state)(X) ** 2)

    def gradient():
        jaxpr = jax.make_jaxpr(jax.grad(loss, allow_int=True))(state)
        backward = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][-1]
        # the loop's state: a sum for each quantizer, of its tensor's shape
        sums = [v.aval.ndim == 2 and v.aval.shape[0] == len(X) for v in backward.outvars].count(True)

        def numbers(state):
            # without the tangents of integers, a dtype that only XLA has
            found = jax.grad(lambda state: loss(state), allow_int=True)(state)
            return jax.tree.map(lambda g: jnp.zeros(g.shape) if g.dtype == jax.dtypes.float0 else g, found)

        return sums, jax.jit(numbers)(state)

    sums, ours = gradient()
    monkeypatch.setattr(qjax.tracing.Evaluation, "_elementwise", lambda *_: {})
    before, plain = gradient()
    inside = [name for name in qmodel.quantizers if "cell" in name and "kernel" not in name]
    assert sums - before == len(inside)
    one, other = (qmodel.quantizers.named(g["quantizers"]) for g in (ours, plain))
    found, expected = (np.stack([g[name]["log2_scale"] for name in inside]) for g in (one, other))
    assert np.all(found != 0)
    # sums of floats, apart by their rounding; test_fake_quant_gradients has numbers whose sums are exact
    assert np.abs(found - expected).max() <= 2.0**-20 * np.abs(expected).max()
    for a, b in zip(jax.tree.leaves(ours["model"]), jax.tree.leaves(plain["model"]), strict=True):
        assert np.array_equal(a, b)


# ---------------------------------------------------------------------------- what cannot be


def test_a_start_that_differs_between_examples_is_refused():
    class Model(Parts):
        def __call__(self, x):
            rows = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None]
            return loop(self, jnp.broadcast_to(rows, (x.shape[0], 4)), x)[0]

    qmodel = qjax.quantize(Model(), Recipe(), X)
    with pytest.raises(qjax.ConversionError, match="differs from example to example"):
        qjax.convert(qmodel, X)


@pytest.mark.parametrize(("platform", "least", "most"), [("cpu", 2, 3), ("gpu", 8, 16)])
def test_the_backward_of_a_loop_keeps_little(monkeypatch, platform, least, most):
    """Of a step its carries and input, elsewhere than on the CPU its eight accumulators; of no quantizer anything."""
    qmodel = qjax.quantize(nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))), Recipe(), X)
    graphdef, state = nnx.split(qmodel)

    def loss(state, x):
        return jnp.sum(nnx.merge(graphdef, state)(x) ** 2)

    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    jaxpr = jax.make_jaxpr(jax.grad(loss, allow_int=True))(state, X).jaxpr
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [v for v in forward.outvars if v.aval.shape[:1] == (X.shape[1],) and len(v.aval.shape) == 3]
    assert least <= len(stacked) <= most


JOINS = {
    "concatenate": lambda x, h: jnp.concatenate([h[:, :1], x], axis=-1)[:, 1:],
    "slice": lambda x, h: lax.dynamic_update_slice(x, h[:, :1], (0, 1)),
    "maximum": jnp.maximum,
    "select": lambda x, h: jnp.where(x > 0, h, x),
}


class Joined(nnx.Module):
    """A stack of layers in which each joins its own tensor to one from outside: all see the same residual."""

    def __init__(self, join):
        rngs = nnx.Rngs(0)
        self.first, self.join = nnx.Linear(3, 3, rngs=rngs), join
        self.layers = nnx.Param(jax.random.normal(rngs.params(), (2, 3, 3)))

    def __call__(self, x):
        h = nnx.relu(self.first(x))

        def layer(x, kernel):
            return JOINS[self.join](x @ kernel, h), None

        return lax.scan(layer, h, self.layers[...])[0]


@pytest.mark.parametrize(
    "join", ["slice", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in JOINS if k != "slice")]
)
def test_layers_join_their_tensor_to_one_from_outside(join):
    """The tensor from outside has one quantizer, and the join of each layer one of its own."""
    qmodel, _ = check(Joined(join), data(4, 3))
    shapes = {
        name: numbers.scale.shape for name, numbers in qmodel.qparams().items() if "first" in name or "scan" in name
    }
    assert sorted(shapes.values())[:1] == [()], shapes
    assert (2,) in shapes.values(), shapes
