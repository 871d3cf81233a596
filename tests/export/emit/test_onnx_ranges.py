"""Integers with ranges as ONNX: narrow types, functions that are known by name, requantizations that are proven."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from qjax.export.emit import bounds
from qjax.export.emit.onnx import sums
from qjax.export.emit.onnx.builder import IR_VERSION, Builder, Library, element_type, opset_imports
from qjax.export.emit.onnx.named_calls import NAMED
from qjax.export.emit.onnx.tracing import trace
from qjax.export.emit.onnx.translate import Translator
from qjax.export.emit.onnx.views import View
from qjax.numerics import calls
from qjax.numerics.calls import named_call, within
from qjax.numerics.division import divide_to_even
from qjax.numerics.integer_softmax import leading
from qjax.numerics.reciprocal_root import lift, lifted_root
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.ops.epilogue import finish_sum
from tests.export.emit.onnx_runs import by_onnxruntime, nodes_of
from tests.export.emit.random_integers import random_program

Range = tuple[int, int]


def model_of(
    function: Callable[..., Any],
    feeds: Sequence[np.ndarray],
    ranges: Sequence[Range | None] | None = None,
    known: Sequence[np.ndarray] = (),
    *,
    for_runtime: bool,
) -> onnx.ModelProto:
    """A model of the function; known: its last arguments, constants whose numbers the translator knows."""
    names = [f"x{index}" for index in range(len(feeds))]
    library = Library(for_runtime=for_runtime)
    builder = Builder(library, names)
    t = Translator(builder)
    views = [View.full(name, x.dtype.name, x.shape) for name, x in zip(names, feeds, strict=True)]
    for index, found in enumerate(ranges or ()):
        if found is not None:
            views[index] = dataclasses.replace(views[index], low=found[0], high=found[1])
    for value in known:
        constant = t.literal(value) if value.size == 1 else View.full(builder.constant(value), "int32", value.shape)
        views.append(dataclasses.replace(constant, known=value))
    closed = trace(function, [(view.shape, view.dtype) for view in views])
    results = [t.settled(view) for view in t.run(closed, views)]
    outputs = [builder.op("Identity", t.materialized(view)) for view in results]
    ports = [
        helper.make_tensor_value_info(n, element_type(x.dtype), x.shape) for n, x in zip(names, feeds, strict=True)
    ]
    ends = [
        helper.make_tensor_value_info(n, element_type(v.dtype), v.shape) for n, v in zip(outputs, results, strict=True)
    ]
    graph = helper.make_graph(builder.live(outputs), "test", ports, ends)
    functions = list(library.functions.values())
    return helper.make_model(graph, functions=functions, opset_imports=opset_imports(), ir_version=IR_VERSION)


def agree(function: Callable[..., Any], feeds: Sequence[np.ndarray], **options: Any) -> onnx.ModelProto:
    """Both kinds of files give the numbers that JAX computes; returns the one for ONNX Runtime alone."""
    known = options.get("known", ())
    wanted = [np.asarray(y) for y in jax.tree.leaves(jax.jit(function)(*feeds, *known))]
    model = None
    for for_runtime in (False, True):
        model = model_of(function, feeds, for_runtime=for_runtime, **options)
        for level, found in by_onnxruntime(model, {f"x{i}": x for i, x in enumerate(feeds)}):
            for got, want in zip(found, wanted, strict=True):
                assert got.dtype == want.dtype
                assert np.array_equal(got, want), (level, for_runtime)
    assert model is not None
    return model


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in nodes_of(model)}


def wide(numbers: Sequence[int]) -> list[np.ndarray]:
    """Numbers of 62 bits as two words of int32, since a model's inputs are int32: high 2^31 + low."""
    array = np.asarray(numbers, np.int64)
    return [(array >> 31).astype(np.int32), (array & (2**31 - 1)).astype(np.int32)]


def joined(high: jax.Array, low: jax.Array, found: Range) -> jax.Array:
    """The number of two words, known to be in a range; inside of `enable_x64`."""
    return within((high.astype(jnp.int64) << 31) + low.astype(jnp.int64), *found)


# ---------------------------------------------------------------------------- functions that are known by name


def test_every_name_has_an_entry():
    assert set(NAMED) == calls.NAMED_FUNCTIONS


def test_a_function_keeps_its_name_only_inside():
    def shifted(x: jax.Array) -> jax.Array:
        return right_shift_with_headroom(jnp, x, np.int32(3), Rounding.NEAREST_EVEN)

    def names() -> list[str]:
        found = jax.make_jaxpr(lambda x: shifted(x))(jnp.ones(3, jnp.int32))
        return [eqn.params.get("name", "") for eqn in found.jaxpr.eqns]

    assert not any(named_call(name) for name in names())
    with calls.names_kept():
        assert [named_call(name) for name in names()] != [None]
    assert not any(named_call(name) for name in names())


@pytest.mark.parametrize("rounding", [r for r in Rounding if r is not Rounding.STOCHASTIC])
@pytest.mark.parametrize("found", [(0, 2**40), (-(2**40), 2**40), (0, 2**61), (-(2**61), 2**61)])
@pytest.mark.sampled(12)
def test_rounded_shifts(rounding, found):
    rng = np.random.default_rng(0)
    low, high = found
    numbers = [*range(max(low, -300), 300), low, low + 1, high - 1, high, *rng.integers(low, high, 300).tolist()]
    ties = [n << 11 for n in range(-40, 40) if low <= n << 11 <= high]
    words = wide([*numbers, *ties])
    for shift in (0, 1, 4, 12, 40):

        def by_number(a: jax.Array, b: jax.Array, shift: int = shift) -> jax.Array:
            with jax.enable_x64(True):
                x = joined(a, b, found)
                return right_shift_with_headroom(jnp, x, jnp.full_like(x, shift), rounding)

        model = agree(by_number, words)
        even = rounding is Rounding.NEAREST_EVEN and high <= 2**53
        assert ("Round" in operators(model)) == even

    def by_tensor(a: jax.Array, b: jax.Array, shift: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return right_shift_with_headroom(jnp, joined(a, b, found), within(shift, 1, 45).astype(jnp.int64), rounding)

    agree(by_tensor, [*words, rng.integers(1, 46, words[0].shape).astype(np.int32)])


def test_quotients_with_ties():
    pairs = [(a, b) for a, b in itertools.product(range(60), range(1, 20))]
    rng = np.random.default_rng(0)
    pairs += [(2**61, int(b)) for b in rng.integers(2**30, 2**31, 200)] + [(2**61, 2**30), (2**61, 2**31 - 1)]
    pairs += [(int(b) * int(q) + int(b) // 2, int(b)) for b, q in rng.integers(1, 2**30, (200, 2))]
    a, b = wide([a for a, _ in pairs]), wide([b for _, b in pairs])

    def quotient(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return divide_to_even(jnp, joined(a, b, (0, 2**61)), joined(c, d, (1, 2**31)))

    agree(quotient, [*a, *b])


@pytest.mark.parametrize("least", [1, 2**20, 2**60])
def test_roots_of_every_width(least):
    rng = np.random.default_rng(0)
    roots = [int(n) for n in rng.integers(1, 2**31, 300)] + [2**k + d for k in range(1, 31) for d in (-1, 0, 1)]
    squares = [n * n + d for n in [*roots, 2**31 - 1, 2**30] for d in (-1, 0, 1)]
    numbers = [n for n in [*squares, *(1 << k for k in range(62)), 2**62 - 1] if least <= n < 2**62]

    def root(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(True):
            lifted, half = lift(jnp, joined(a, b, (least, 2**62 - 1)))
            return lifted, half, lifted_root(jnp, lifted)

    model = agree(root, wide(numbers))
    assert "Sqrt" in operators(model)


@pytest.mark.parametrize("count", [1, 3, 64, 5000])
def test_leading_bits(count):
    rng = np.random.default_rng(0)
    most = count << 30
    numbers = [1, 2, most, most - 1, *(n for k in range(1, 44) for n in (2**k - 1, 2**k, 2**k + 1) if n <= most)]
    numbers += rng.integers(1, most + 1, 200).tolist()

    def parts(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.enable_x64(True):
            return leading(jnp, joined(a, b, (1, most)), count)

    agree(parts, wide(numbers))


# ---------------------------------------------------------------------------- requantizations of a sum


CHANNELS = 6


def sum_constants(rng: np.random.Generator, kind: str, zero_point: int) -> dict[str, np.ndarray]:
    """Constants of `finish_sum`: of reals, or ("ties") of a power of two, where every second accumulator is a tie."""
    if kind == "ties":
        values = {"shift": 1, "offset_high": 0, "offset_low": 0, "factor0": 1, "y_zero_point": zero_point}
        return {role: np.asarray(value, np.int32) for role, value in values.items()}
    signs = np.where(np.arange(CHANNELS) % 2 == 0, 1, -1) if kind == "signs" else 1
    return {
        "shift": rng.integers(36, 40, CHANNELS).astype(np.int32),
        "offset_high": rng.integers(-(2**12), 2**12, CHANNELS).astype(np.int32),
        "offset_low": rng.integers(0, 2**31, CHANNELS).astype(np.int32),
        "factor0": (rng.integers(2**29, 2**30, CHANNELS) * signs).astype(np.int32),
        "y_zero_point": np.asarray(zero_point, np.int32),
    }


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_up", "nearest_away", "floor", "toward_zero"])
@pytest.mark.parametrize("kind", ["reals", "signs", "ties"])
@pytest.mark.parametrize("zero_point", [0, -3])
def test_requantizations_of_a_sum(rounding, kind, zero_point):
    rng = np.random.default_rng(0)
    constants = sum_constants(rng, kind, zero_point)
    attributes = {"rounding": rounding, "qmin": -128, "qmax": 127, "dtype": "int8"}
    acc = np.concatenate([np.arange(-40000, 40000, 7), [-(2**31), 2**31 - 1, -1, 0, 1], np.arange(-300, 300)])
    acc = np.repeat(acc.astype(np.int32)[:, None], CHANNELS, axis=1)

    def finished(acc: jax.Array, *values: jax.Array) -> jax.Array:
        return finish_sum([acc], dict(zip(constants, values, strict=True)), attributes)

    model = agree(finished, [acc], known=tuple(constants.values()))
    assert operators(model).isdisjoint({"BitShift", "BitwiseAnd"}) == (
        rounding != "toward_zero" and (kind, rounding) != ("ties", "nearest_away")
    )


def form_of(factor: int, offset: int, shift: int, zero_point: int, rounding: Rounding) -> sums.Sum:
    one = np.ones(1, np.int64)
    return sums.Sum(one * factor, one * offset, one * shift, zero_point, rounding, -8, 7)


@pytest.mark.exhaustive
@given(
    st.integers(-9, 9),
    st.integers(-40, 40),
    st.integers(0, 4),
    st.integers(-3, 3),
    st.sampled_from([Rounding.NEAREST_EVEN, Rounding.NEAREST_UP, Rounding.NEAREST_AWAY, Rounding.FLOOR]),
)
def test_a_proven_form_is_the_same_on_every_accumulator(factor, offset, shift, zero_point, rounding):
    form = form_of(factor, offset, shift, zero_point, rounding)
    acc = np.arange(-300, 301)[:, None]
    wanted = form.codes(acc)
    places = form.places(-300, 300)
    # every change of the code has both of its sides among the places
    changes = acc[1:][wanted[1:] != wanted[:-1]]
    assert set(changes.tolist()) | {n - 1 for n in changes.tolist()} <= set(places.reshape(-1).tolist())
    exact, floored = sums.exact(form, (-300, 300)), sums.floored(form, (-300, 300))
    if exact is not None:
        assert np.array_equal(exact.codes(acc, form), wanted)
    if floored is not None:
        assert np.array_equal(floored.codes(acc), wanted)
    if rounding in (Rounding.NEAREST_EVEN, Rounding.NEAREST_UP, Rounding.FLOOR):
        assert exact is not None
    if rounding in (Rounding.NEAREST_UP, Rounding.FLOOR):
        assert floored is not None


def test_a_form_that_is_not_the_same_is_not_taken():
    # ties away from 0 on both sides of it: neither a floor nor ties to even
    form = form_of(1, 0, 1, 0, Rounding.NEAREST_AWAY)
    assert sums.exact(form, (-20, 20)) is None
    assert sums.floored(form, (-20, 20)) is None
    assert sums.floored(form, (0, 20)) is not None


# ---------------------------------------------------------------------------- ranges


@pytest.mark.exhaustive
@given(st.data())
def test_a_range_holds_every_result(data):
    name = data.draw(st.sampled_from(sorted(set(bounds._RULES) - {"select_n"})))
    ends = st.integers(-40, 40)
    ranges = [
        tuple(sorted(data.draw(st.tuples(ends, ends)))) for _ in range(1 if name in ("neg", "abs", "square") else 2)
    ]
    if name.startswith("shift"):
        ranges[1] = (abs(ranges[1][0]) % 7, abs(ranges[1][0]) % 7 + 2)
    found = bounds.of(name, ranges)
    function: dict[str, Callable[..., int]] = {
        "square": lambda x: x * x,
        "abs": lambda x: max(x, -x),
        "div": lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
        "shift_left": lambda x, n: x << n,
        "shift_right_arithmetic": lambda x, n: x >> n,
    }
    if found is None:
        assert name == "div"
        assert ranges[1][0] <= 0
        return
    for values in itertools.product(*(range(low, high + 1) for low, high in ranges)):
        result = function[name](*values) if name in function else bounds.fold(name, values, "int64")
        assert result is not None
        assert found[0] <= int(result) <= found[1]
    if name in ("lt", "le", "gt", "ge"):
        decided = bounds.decided(name, *ranges)
        pairs = itertools.product(*(range(low, high + 1) for low, high in ranges))
        results = {bounds.fold(name, pair, "int64") for pair in pairs}
        assert (results == {decided}) if decided is not None else len(results) == 2


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sums_that_leave_float64_or_wrap(dtype):
    rng = np.random.default_rng(0)
    for bits in (20, 30, 31, 45, 53, 62):
        numbers = rng.integers(-(2**bits), 2**bits, (7, 40))
        numbers[0], numbers[1] = 2**bits - 1, -(2**bits)
        words = [word.reshape(7, 40) for word in wide(numbers.reshape(-1).tolist())]

        def total(a: jax.Array, b: jax.Array) -> jax.Array:
            with jax.enable_x64(True):
                x = (a.astype(jnp.int64) << 31) + b.astype(jnp.int64)
                return jnp.sum(x.astype(dtype), axis=1, dtype=dtype)

        agree(total, words)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("found", [(0, 5), (-5, 5), (-1, 0), (-5, -1), (-(2**31), 2**31 - 1)])
def test_shifts_by_every_number(dtype, found):
    x = np.unique(np.clip([-(2**31), -5, -1, 0, 1, 5, 2**31 - 1], *found)).astype(np.int32)
    # more elements than decide between a division and a shift
    x = np.resize(x, (7, 700))

    def shifted(x: jax.Array) -> list[jax.Array]:
        with jax.enable_x64(True):
            wider = within(x, *found).astype(dtype)
            amounts = [jnp.asarray(n, dtype) for n in range(8 * np.dtype(dtype).itemsize)]
            return [wider >> n for n in amounts] + [wider << n for n in amounts]

    for feed in (x, x[:, :3]):
        agree(shifted, [feed])


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    rng = np.random.default_rng(seed)
    feeds = [rng.integers(-128, 128, (5, 9)).astype(np.int8) for _ in range(2)]
    agree(random_program(seed), feeds)
