"""Functions of integers as tables over the integers; codes that say too little of what they stand for."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

TIMESCALE = (10000.0 ** (np.arange(8) / 8)).astype(np.float32)


class Of(nnx.Module):
    """function(x, positions), with what it may read as state."""

    def __init__(self, function, **state):
        self.function = function
        for name, value in state.items():
            setattr(self, name, value)

    def __call__(self, x, positions):
        return self.function(self, x, positions)


def angles(positions, timescale=TIMESCALE):
    return jnp.broadcast_to(positions[..., None].astype(jnp.float32), (*positions.shape, 8)) / timescale[None, None]


def sines(model, x, positions):
    return x * 0.0 + jnp.sin(angles(positions))


def rotary(model, x, positions):
    both = jnp.concatenate([angles(positions), angles(positions)], axis=-1)[:, :, None, ::2]
    return x[:, :, None] * jnp.cos(both) + x[:, :, None, ::-1] * jnp.sin(both), jnp.exp(
        -0.5 * positions.astype(jnp.float32)
    )


def outer(model, x, positions):
    return x * jnp.sin(jnp.einsum("bl,c->blc", positions.astype(jnp.float32), 1 / model.timescale[...]))


def outer_of_integers(model, x, positions):
    """The product itself makes floats of the integers."""
    with jax.numpy_dtype_promotion("standard"):
        angles_of = jnp.einsum("bl,c->blc", positions, 1 / model.timescale[...])
    return x * jnp.sin(angles_of)


def batch(low=0, high=2048):
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    return x, jnp.asarray(np.linspace(low, high - 1, 12, dtype=np.int32).reshape(2, 6))


def quantized(function, sample, *ranges, **state):
    return qjax.quantize(Of(function, **state), qjax.Recipe(integers=ranges), sample)


def cosine(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(y)]).astype(np.float64) for y in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2048, 8192])
@pytest.mark.filterwarnings("ignore:Output .* never leave", "ignore:.*a single number")
def test_the_sine_of_many_positions_is_one_table(count):
    sample = batch(0, 6)
    qmodel = quantized(sines, sample, qjax.integers("positions", 0, count))
    graph = qjax.convert(qmodel, sample)
    given = batch(0, count)
    np.testing.assert_array_equal(graph(*given), qjax.exact(qmodel, sample)(qmodel, *given))
    np.testing.assert_array_equal(graph(*given), qmodel(*given))
    assert cosine(graph(*given), qmodel.model(*given)) > 0.999
    beyond = given[0], given[1] + 1
    for forward in (graph, qmodel):
        with pytest.raises(ValueError, match=f"expected integers from 0 to {count - 1}, got 1 to {count}"):
            forward(*beyond)


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (rotary, {}),
        (outer, {"timescale": nnx.Variable(jnp.asarray(TIMESCALE))}),
        (outer, {"timescale": nnx.Param(jnp.asarray(TIMESCALE))}),
        (outer_of_integers, {"timescale": nnx.Variable(jnp.asarray(TIMESCALE))}),
    ],
)
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Output .* never leave")
def test_the_range_of_the_calibrated_integers_is_that_of_the_table(function, state):
    qmodel = quantized(function, batch(-3, 6), **state)
    with pytest.raises(ValueError, match="expected integers from -3 to 5, got 0 to 2047"):
        qmodel(*batch())
    qjax.calibrate(qmodel, [batch(), batch(0, 12)])
    graph, given = qjax.convert(qmodel, batch()), batch(-3, 2048)
    found = graph(*given)
    for got, exact in zip(*map(jax.tree.leaves, (found, qjax.exact(qmodel, batch())(qmodel, *given))), strict=True):
        np.testing.assert_array_equal(got, exact)
    assert cosine(found, qmodel.model(*given)) > 0.999
    assert not any("sin" in row.primitive or row.form == "table" for row in qjax.explain(qmodel, batch()).rows)
    if state and isinstance(state["timescale"], nnx.Param):
        gradient = nnx.grad(lambda m: jnp.sum(m(*given)))(qmodel)
        assert np.abs(np.asarray(gradient.model.timescale[...])).max() > 0


def coordinates(model, x, positions):
    """Positions on a plane, as image models rotate by them, in the convention that repeats every angle."""
    parts = [
        jnp.repeat(jnp.einsum("bl,c->blc", positions[..., i].astype(jnp.float32), 1 / TIMESCALE[:2]), 2, axis=-1)
        for i in range(2)
    ]
    return x * jnp.sin(jnp.concatenate(parts, axis=-1))


def coordinates_as_floats(model, x, positions):
    plane = positions.astype(jnp.float32)
    parts = [jnp.repeat(plane[..., i, None] / TIMESCALE[None, None, :2], 2, axis=-1) for i in range(2)]
    return x * jnp.sin(jnp.concatenate(parts, axis=-1))


@pytest.mark.parametrize("function", [coordinates, coordinates_as_floats])
def test_coordinates_of_positions(function):
    x, _ = batch()
    plane = jnp.stack(jnp.divmod(jnp.arange(12, dtype=jnp.int32), 4), axis=-1).reshape(2, 6, 2)
    qmodel = quantized(function, (x, plane), qjax.integers("positions", 0, 512))
    assert {found.name for found in qmodel.plan.integers} == {"input/1", "input/1[0]", "input/1[1]"}
    assert all((found.low, found.high) == (0, 512) for found in qmodel.plan.integers)
    with pytest.raises(ValueError, match="expected integers from 0 to 511"):
        qmodel(x, 400 * plane)
    given = (x, 40 * plane)
    qjax.calibrate(qmodel, [given])
    graph = qjax.convert(qmodel, (x, plane))
    np.testing.assert_array_equal(graph(*given), qjax.exact(qmodel, (x, plane))(qmodel, *given))
    assert cosine(graph(*given), function(None, *given)) > 0.999
    assert not any("sin" in row.primitive or row.form == "table" for row in qjax.explain(qmodel, (x, plane)).rows)


@pytest.mark.exhaustive
def test_columns_have_ranges_of_their_own():
    """A table of hours: the numbers of users beside them would make it too large."""
    x, _ = batch()
    columns = jnp.stack([jnp.arange(12, dtype=jnp.int32) * 2, 10**7 * jnp.arange(12, dtype=jnp.int32)], -1)
    columns = columns.reshape(2, 6, 2)

    def hours(model, x, positions):
        return x * jnp.sin(angles(positions[..., 0])) + 1e-9 * positions[..., 1:].astype(jnp.float32)

    qmodel = quantized(hours, (x, columns))
    (found,) = qmodel.plan.integers
    assert (found.name, found.low, found.high) == ("input/1[0]", 0, 23)
    declared = quantized(hours, (x, columns), qjax.integers("positions[0]", 0, 24))
    assert [(found.name, found.high) for found in declared.plan.integers] == [("input/1[0]", 24)]
    graph = qjax.convert(declared, (x, columns))
    np.testing.assert_array_equal(graph(x, columns), qjax.exact(declared, (x, columns))(declared, x, columns))


@pytest.mark.parametrize(
    "move",
    [
        lambda x: jnp.repeat(x, 2, axis=-1),
        lambda x: x.reshape(2, 6, 2, 4),
        lambda x: x.reshape(2, 6, 1, 2, 4, 1),
        lambda x: x.reshape(2, 12, 4),
        lambda x: x.reshape(12, 8),
    ],
    ids=["repeated", "heads", "ones", "same rank", "joined"],
)
@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.filterwarnings("ignore:Output .* never leave")
@pytest.mark.sampled(4)
def test_reshapes_around_the_function(move, where):
    def function(model, x, positions):
        phase = angles(positions)
        return move(x) * (jnp.sin(move(phase)) if where == "before" else move(jnp.sin(phase)))

    sample = batch(0, 24)
    qmodel = quantized(function, sample, qjax.integers("positions", 0, 2048))
    given = batch(0, 2048)
    qjax.calibrate(qmodel, [given])
    graph = qjax.convert(qmodel, sample, batch="fixed")
    if not qmodel.plan.integers:
        # the positions' own axis is joined with the others before the sine: no table of integers has these rows
        assert where == "before"
        assert function(None, *given).shape in ((2, 12, 4), (12, 8))
        return
    exact = qjax.exact(qmodel, sample, batch="fixed")(qmodel, *given)
    np.testing.assert_array_equal(graph(*given), exact)
    assert cosine(graph(*given), function(None, *given)) > 0.999


def test_an_affine_step_of_integers_needs_no_table():
    given = batch(0, 64)
    qmodel = quantized(lambda model, x, positions: x[..., 0] - 0.25 * positions.astype(jnp.float32), given)
    assert not qmodel.plan.integers


def test_what_differs_from_position_to_position_is_no_function_of_the_integer():
    phase = np.linspace(0, 6, 48, dtype=np.float32).reshape(1, 6, 8)
    with pytest.warns(UserWarning, match="between .*% of its input's neighbouring codes"):
        qmodel = quantized(lambda model, x, positions: x * jnp.sin(angles(positions) + phase), batch())
    assert not qmodel.plan.integers
    (row,) = (row for row in qjax.explain(qmodel, batch()).rows if row.problem)
    assert row.form == "table"
    assert [t.name for t in qjax.statistics(qmodel, [batch()]).tensors if t.steep] == ["rescale"]


def test_errors_of_ranges_say_what_to_declare():
    with pytest.raises(ValueError, match="expected low < high for 'positions'"):
        qjax.integers("positions", 4, 4)
    with pytest.raises(ValueError, match=r"expected an integer input.*got 'position'.*'positions'"):
        quantized(sines, batch(), qjax.integers("position", 0, 4096))
    with pytest.raises(ValueError, match=r"is NaN at 0, but every integer from 0 to 2047 needs a value"):
        quantized(lambda model, x, positions: x * jnp.log(angles(positions) - 1.0), batch())
    with pytest.raises(ValueError, match="needs a table of 4194304x8 numbers, more than 16777216"):
        quantized(sines, batch(), qjax.integers("positions", 0, 2**22))


def test_a_quantizer_that_loses_its_tensor_is_a_warning():
    x = jnp.where(jnp.arange(2**17) == 7, 300.0, 0.5 * jnp.sin(jnp.arange(2.0**17))).reshape(2, -1)
    sample = x, x[:, :1].astype(jnp.int32)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        qjax.quantize(Of(lambda model, x, _: jnp.tanh(x)), qjax.Recipe(), sample)
    (warning,) = found
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert re.match(
        r"Quantizer 'input/0' keeps 0\.0 dB of its tensor's last batch; expected at least 10 dB with 8 bits",
        str(warning.message),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = qjax.Recipe(activations=qjax.QSpec(bits=2), output_bits=2)
        qjax.quantize(Of(lambda model, x, _: jnp.tanh(x)), few, batch())


class Timed(nnx.Module):
    """The embedding of a diffusion model's time, a number from 0 to 1, in front of a layer."""

    def __init__(self):
        self.dense = nnx.Linear(32, 8, rngs=nnx.Rngs(0))

    def __call__(self, time):
        frequencies = jnp.exp(-jnp.log(1e4) * jnp.arange(16, dtype=jnp.float32) / 16)
        phase = (1000.0 * time)[:, None] * frequencies[None]
        return self.dense(jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1))


def test_the_warning_names_the_tensors_that_need_more_bits():
    model, times = Timed(), jax.random.uniform(jax.random.key(0), (64,))
    with pytest.warns(UserWarning, match="neighbouring codes") as said:
        coarse = qjax.quantize(model, qjax.Recipe(), times)
    (message,) = (str(warning.message) for warning in said)
    assert "the function cos changes" in message
    assert "the function sin changes" in message
    (cure,) = re.findall(r"overrides=(\{.*\})\. ", message)
    overrides = eval(cure, {"qjax": qjax})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = qjax.quantize(model, qjax.Recipe(overrides=overrides), times)
    assert cosine(qjax.convert(coarse, times)(times), model(times)) < 0.9
    graph = qjax.convert(fine, times)
    assert cosine(graph(times), model(times)) > 0.999
    np.testing.assert_array_equal(graph(times), qjax.exact(fine, times)(fine, times))


def test_a_function_that_16_bits_do_not_save_is_not_told_to_take_them():
    wide = qjax.Override(activations=qjax.QSpec(bits=16))
    x = jax.random.uniform(jax.random.key(0), (64, 4), minval=-1e6, maxval=1e6)
    with pytest.warns(UserWarning, match=r"too few codes for the function\. Bound the input"):
        qjax.quantize(Of(lambda model, x, positions: jnp.sin(x)), qjax.Recipe(overrides={".*": wide}), (x, x[:, 0]))
