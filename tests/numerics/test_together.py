"""Derivations of many cases as one computation: the results, and how often the function is traced."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.softfloat import Real
from qjax.numerics.together import derived


@dataclasses.dataclass(frozen=True)
class Case:
    scale: Any
    bias: Any
    settings: Any


def alive(case):
    return jnp.asarray(case.scale).reshape(-1)[0] != np.float32(-1)


def quotients(calls):
    def derive(case):
        calls.append(case)
        ratio = Real.of(case.bias) / Real.of(case.scale)
        found = {"ratio": ratio.to_float32(), "low": ratio.to_int32(), "known": np.int32(len(case.settings))}
        return found, case.settings

    return derive


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.01, 9, shape).astype(np.float32)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_one_trace_a_kind_and_the_bits_of_the_host():
    settings = [{"a": [1]}, {"a": [1]}, {"a": [True]}, {"a": [1]}, {"a": [1]}]
    shapes = [(3,), (3,), (3,), (5,), (3,)]
    arrays = [(numbers(seed=i), numbers(*shape, seed=9 + i)) for i, shape in enumerate(shapes)]

    def run(arrays):
        cases = [Case(scale, bias, setting) for (scale, bias), setting in zip(arrays, settings, strict=True)]
        return [found for found, _ in derived(quotients(calls), cases, alive)]

    calls: list[Case] = []
    expected = run(arrays)
    assert len(calls) == 5
    calls.clear()
    assert_equal(jax.jit(run)(arrays), expected)
    # 1 and True are two settings, (5,) is a shape of its own
    assert len(calls) == 3


def test_vectors_of_several_sizes_are_one_computation_where_elements_are_independent():
    shared = numbers(seed=1)
    biases = [numbers(size, seed=size) for size in (7, 2, 7, 3)]
    scales = [numbers(seed=20 + i) for i in range(4)]

    def run(shared, scales, biases):
        cases = [Case(scale, bias, ()) for scale, bias in zip(scales, biases, strict=True)]
        cases += [Case(shared, bias, ()) for bias in biases[:2]]
        return [found for found, _ in derived(quotients(calls), cases, alive, lambda case: True)]

    calls: list[Case] = []
    expected = run(shared, scales, biases)
    calls.clear()
    results = jax.jit(run)(shared, scales, biases)
    assert len(calls) == 1
    for found, wanted in zip(results, expected, strict=True):
        assert np.array_equal(found["ratio"], wanted["ratio"])
        assert np.array_equal(found["low"], wanted["low"])


def test_a_known_vector_is_not_joined_with_longer_ones():
    known = numbers(4, seed=3)
    scales = [numbers(4, seed=20 + i) for i in range(2)]

    def run(scales):
        return [
            found for found, _ in derived(quotients([]), [Case(s, known, ()) for s in scales], alive, lambda _: True)
        ]

    assert_equal(jax.jit(run)(scales), run(scales))


def test_kinds_that_differ_in_their_first_part_alone_are_one_behind_it():
    biases = [numbers(size, seed=size) for size in (7, 2, 7, 3)]
    scales = [numbers(seed=20 + i) for i in range(4)]
    factors = [None, np.float32(3), None, np.float32(0.1)]

    def uniform(case):
        bias = case.bias if case.settings is None else case.bias * case.settings
        return Case(case.scale, bias, ())

    def derive(case):
        calls.append(case)
        case = case if isinstance(case.settings, tuple) else uniform(case)
        return (Real.of(case.bias) / Real.of(case.scale)).to_int32()

    def run(scales, biases):
        cases = [Case(*case) for case in zip(scales, biases, factors, strict=True)]
        return derived(derive, cases, alive, lambda case: True, uniform)

    calls: list[Case] = []
    expected = run(scales, biases)
    calls.clear()
    results = jax.jit(run)(scales, biases)
    assert len(calls) == 1
    assert calls[0].bias.shape == (19,)
    assert all(np.array_equal(found, wanted) for found, wanted in zip(results, expected, strict=True))


def test_which_arrays_are_the_same_is_part_of_the_kind():
    def derive(case):
        return "one" if case.scale is case.bias else "two"

    @jax.jit
    def run(a, b):
        kinds.extend(derived(derive, [Case(a, b, ()), Case(a, a, ()), Case(b, b, ())], alive))
        return a

    kinds: list[str] = []
    run(numbers(), numbers())
    assert kinds == ["two", "one", "one"]


def test_known_arrays_are_told_apart_by_their_bytes():
    @jax.jit
    def run(scales):
        cases = [Case(s, np.float32(b), ()) for s, b in zip(scales, (1, 1, 2), strict=True)]
        return [found["ratio"] for found, _ in derived(quotients(calls), cases, alive)]

    calls: list[Case] = []
    scales = [np.float32(2), np.float32(4), np.float32(8)]
    assert [float(x) for x in run(scales)] == [0.5, 0.25, 0.25]
    assert len(calls) == 2


def test_under_vmap():
    def run(scales):
        cases = [Case(s, np.float32(3), ()) for s in scales]
        return [found["ratio"] for found, _ in derived(quotients([]), cases, alive)]

    scales = [numbers(4, seed=i) for i in range(3)]
    batched = jax.jit(jax.vmap(run))(scales)
    for i in range(4):
        assert_equal([x[i] for x in batched], run([s[i] for s in scales]))
