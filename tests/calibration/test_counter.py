"""63-bit counters against Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.calibration.counter import LIMIT, Counter, add, exceeded, scatter, to_host, zero_counter


def counter_of(values: list[int], shape: tuple[int, ...] | None = None) -> Counter:
    words = np.array(values, np.uint64).reshape(shape or (len(values),))
    return Counter(jnp.asarray((words >> np.uint64(32)).astype(np.uint32)), jnp.asarray(words.astype(np.uint32)))


@pytest.mark.exhaustive
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), st.integers(0, LIMIT - 2**36))
def test_additions_carry(increments: list[int], start: int) -> None:
    counter, expected = counter_of([start]), start
    for increment in increments:
        counter = jax.jit(add)(counter, jnp.asarray([increment], jnp.uint32))
        expected += increment
    assert [int(v) for v in to_host(counter)] == [expected]
    assert not exceeded(counter)


def test_a_count_beyond_the_limit_never_comes_back() -> None:
    counter = counter_of([LIMIT - 1, 5])
    assert not exceeded(counter)
    for _ in range(3):
        counter = add(counter, jnp.asarray([2**32 - 1, 1], jnp.uint32))
    assert exceeded(counter)
    assert int(to_host(counter)[0]) >= LIMIT
    assert int(to_host(counter)[1]) == 8


@pytest.mark.exhaustive
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.just(3), st.sampled_from([2, 64]))
def test_scatter_is_exact(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    # Large enough that every limb carries, small enough that a row's sum stays below the limit.
    values = [int(v) for v in rng.integers(0, LIMIT // columns, rows * columns)]
    index = rng.integers(0, columns, (rows, columns)).astype(np.int32)
    expected = [[0] * columns for _ in range(rows)]
    for r in range(rows):
        for j in range(columns):
            expected[r][int(index[r, j])] += values[r * columns + j]
    counter = counter_of(values, (rows, columns))
    for run in (scatter, jax.jit(scatter)):
        got = to_host(run(counter, jnp.asarray(index)))
        assert [[int(v) for v in row] for row in got] == expected


def test_zero_counter() -> None:
    assert np.array_equal(to_host(zero_counter((2, 3))), np.zeros((2, 3), np.uint64))
