"""The benchmark's arithmetic: pairs, medians, ratios."""

import time

import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Paired, paired


def test_the_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians():
    result = Paired("x", np.array([1.0, 8.0, 3.0]), np.array([1.0, 2.0, 6.0]))
    assert result.ratio == 1.0
    assert result.quartiles == (0.75, 2.5)
    assert result.row() == ("x", "3000.000", "2000.000", "1.00", "0.75 .. 2.50")


def test_sides_are_measured_in_turn():
    calls: list[str] = []

    def call(name: str):
        def run():
            calls.append(name)
            time.sleep(0.003)
            return jnp.zeros(())

        return run

    result = paired("x", call("a"), call("b"), seconds=0.0, least=4)
    assert len(result.subject) == len(result.reference) == 4
    assert calls[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert result.subject.min() >= 0.003
