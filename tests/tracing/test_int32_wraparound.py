"""Integers that wrap: casts to fewer bits, and arithmetic of uint32, in every artifact as in the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qjax
from qjax.runtimes import prepare

EDGES = np.array([0, 1, -1, 5, 127, 128, 129, 255, 256, 300, -128, -129, 32767, 32768, 65535, 65536, 70000], np.int32)
EXTREMES = np.array([2**31 - 1, -(2**31), -(2**31) + 200, 2**31 - 32768], np.int32)


class Chosen(nnx.Module):
    """A dense layer where a function of integers says so."""

    def __init__(self, function):
        self.function = function
        self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, numbers, x):
        return jnp.where(self.function(numbers)[:, None], self.dense(x), 0.0)


def chosen(function, numbers):
    x = np.asarray(jax.random.normal(jax.random.key(1), (len(numbers), 3)))
    qmodel = qjax.quantize(Chosen(function), qjax.Recipe(), (numbers, x))
    qjax.calibrate(qmodel, [(numbers, x)], progress=False)
    qmodel.eval()
    return qmodel, (numbers, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16])
@pytest.mark.parametrize("bound", [-5, 4, 44, 200, 30000])
def test_a_cast_to_fewer_bits_keeps_the_low_ones(dtype, bound):
    numbers = np.concatenate([EDGES, EXTREMES])
    qmodel, args = chosen(lambda i: i.astype(dtype).astype(jnp.int32) > bound, numbers)
    graph = qjax.convert(qmodel, args)
    wanted = np.asarray(qmodel(*args))
    assert np.array_equal(graph(*args), wanted)
    assert np.array_equal(qjax.exact(qmodel, args)(qmodel, *args), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("runtime", ["c", "onnxruntime", "stablehlo"])
def test_artifacts_keep_the_low_bits_too(runtime, tmp_path):
    def function(i):
        return (i.astype(jnp.int8) > 4) | (i.astype(jnp.uint16).astype(jnp.float32) > 32767.5)

    numbers = np.concatenate([EDGES, EXTREMES])
    qmodel, args = chosen(function, numbers)
    graph = qjax.convert(qmodel, args)
    codes = graph.quantize(*args)
    run = prepare(runtime, graph, str(tmp_path), len(numbers), {})
    (found,) = run([np.asarray(x) for x in codes])
    assert np.array_equal(found, graph.run(*codes))


@pytest.mark.filterwarnings("ignore:.*a single number")
def test_a_part_in_float_casts_as_jax_does():
    def function(i):
        return (i.astype(jnp.uint32) < 5) | (i.astype(jnp.int8).astype(jnp.float32) > 40.5)

    numbers = np.concatenate([EDGES, EXTREMES])
    x = np.ones((len(numbers), 3), np.float32)

    class Held(nnx.Module):
        def __call__(self, i):
            return function(i).astype(jnp.float32)

    class Net(nnx.Module):
        def __init__(self):
            self.held, self.dense = Held(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, i, x):
            return jnp.where(self.held(i)[:, None] > 0.5, self.dense(x), 0.0)

    qmodel = qjax.quantize(Net(), qjax.Recipe(overrides={"held": qjax.FLOAT}), (numbers, x))
    qmodel.eval()
    graph = qjax.convert(qmodel, (numbers, x))
    assert np.array_equal(graph(numbers, x), qmodel(numbers, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda i: i.astype(jnp.uint32) < 5,
        lambda i: (i.astype(jnp.uint32) + 1).astype(jnp.float32) > 5.0,
        lambda i: jnp.minimum(i.astype(jnp.uint32), 5).astype(jnp.int32) > 3,
        lambda i: jnp.flip(i.astype(jnp.uint32) * 3)[..., None].max(-1) > 3,
    ],
    ids=["compared", "as a float", "a minimum", "behind moves"],
)
def test_the_order_of_unsigned_results_is_refused(function):
    numbers = np.array([-1, 0, 3, 8], np.int32)
    with pytest.warns(UserWarning, match="convert will refuse it"):
        qmodel, args = chosen(function, numbers)
    with pytest.raises(qjax.ConversionError, match=r"of uint32 from 2\^31 on are negative.*astype\(jnp.int32\)"):
        qjax.convert(qmodel, args)
    assert any(row.form == "unsupported" for row in qjax.explain(Chosen(function), args).rows)


def test_arithmetic_of_unsigned_numbers_has_the_bits_of_int32():
    def function(i):
        mixed = (i.astype(jnp.uint32) * np.uint32(2654435761) + 12345) ^ np.uint32(0x9E3779B9)
        return (jnp.flip(mixed) & 0x80FF).astype(jnp.int32) > 255

    numbers = np.concatenate([EDGES, EXTREMES])
    qmodel, args = chosen(function, numbers)
    graph = qjax.convert(qmodel, args)
    assert np.array_equal(graph(*args), qmodel(*args))
    assert len(np.unique(np.asarray(function(numbers)))) == 2, "the test sees both"


class Positions(nnx.Module):
    """A step with a place that counts, and the row of a table there."""

    def __init__(self, axis, dtype):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        table = jax.random.normal(jax.random.key(2), (1, 8, 4))
        self.axis, self.dtype, self.table = axis, dtype, jnp.moveaxis(table, 1, axis)

    def __call__(self, state, x):
        starts = [0, 0, 0]
        starts[self.axis] = state["place"]
        sizes = [1 if axis == self.axis else size for axis, size in enumerate(self.table.shape)]
        row = jax.lax.dynamic_slice(self.table, jnp.array(starts, self.dtype), sizes)
        return self.dense(x + jnp.moveaxis(row, self.axis, 1)), {"place": state["place"] + 1}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.sampled(1)
def test_rows_of_a_table_at_a_place_that_counts(axis, dtype):
    x = jax.random.normal(jax.random.key(3), (2, 1, 4))
    first = {"place": jnp.zeros((), dtype)}
    qmodel = qjax.quantize(Positions(axis, dtype), qjax.Recipe(), (first, x))
    qjax.calibrate(qmodel, [({"place": jnp.asarray(i, dtype)}, x) for i in range(8)], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, (first, x), state=0)
    state, own = graph.state(batch=2), first
    for place in range(10):  # beyond the table the last row is read, as in JAX
        wanted, own = qmodel(own, x)
        found, state = graph.step(state, x)
        assert np.array_equal(found, wanted), place
        assert int(state["place"]) == int(own["place"]) == place + 1


@pytest.mark.exhaustive
def test_a_linen_decoder_counts_in_uint32():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            exists = self.has_variable("cache", "place")
            place = self.variable("cache", "place", lambda: jnp.array(0, jnp.uint32))
            table = jax.random.normal(jax.random.key(5), (1, 6, 8))
            if exists:
                x = x + jax.lax.dynamic_slice(table, jnp.array((0, place.value, 0)), (1, 1, 8))
                place.value = place.value + 1
            return nn.Dense(3)(nn.MultiHeadDotProductAttention(2, decode=True)(x))

    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    net = Decoder()
    model = qjax.stateful(qjax.from_linen(net, net.init(jax.random.key(1), x)), nnx.Cache)
    model.eval()
    state, batches = model.state(), []
    for token in range(6):
        batches.append((state, x[:, token : token + 1]))
        _, state = model(*batches[-1])
    qmodel = qjax.quantize(model, qjax.Recipe(), batches[0])
    qjax.calibrate(qmodel, batches, progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, batches[0], state=0)
    state, own = graph.state(batch=2), model.state()
    for token in range(6):
        given = x[:, token : token + 1]
        wanted, own = qmodel(own, given)
        found, state = graph.step(state, given)
        assert np.array_equal(found, wanted), token
