"""The frontier against every combination there is."""

import itertools

import numpy as np
import pytest

from qjax.analysis.knapsack import Option, frontier


def everything(units, size, mac_bits):
    """(size, mac_bits, cost) of every combination within the limits."""
    for picks in itertools.product(*units):
        cost = 0.0
        for option in picks:
            cost += option.cost
        total = sum(o.size for o in picks), sum(o.mac_bits for o in picks)
        if (size is None or total[0] <= size) and (mac_bits is None or total[1] <= mac_bits):
            yield (*total, cost)


def unbeaten(points, by):
    """Those that no other one equals or beats in what counts, by looking at all pairs."""
    kept = [(p[0] * by[0], p[1] * by[1], p[2]) for p in points]
    return {p for p in kept if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in kept)}


@pytest.mark.parametrize("seed", range(60))
def test_frontier_is_what_brute_force_leaves(seed):
    rng = np.random.default_rng(seed)
    ties = rng.integers(2)

    def option():
        cost = rng.integers(0, 4) if ties else rng.random()
        return Option(int(rng.integers(1, 9)), int(rng.integers(1, 9)), float(cost))

    units = [[option() for _ in range(rng.integers(1, 5))] for _ in range(rng.integers(1, 6))]
    size, mac_bits = (None if rng.random() < 0.5 else int(rng.integers(1, 30)) for _ in range(2))
    by = (size is not None or bool(rng.integers(2)), mac_bits is not None)
    found = frontier(units, size=size, mac_bits=mac_bits, by=by)
    points = list(everything(units, size, mac_bits))
    assert found.exact
    assert {(c.size * by[0], c.mac_bits * by[1], c.cost) for c in found.combinations} == unbeaten(points, by)
    for c in found.combinations:
        picked = [unit[i] for unit, i in zip(units, c.picks, strict=True)]
        assert (c.size, c.mac_bits) == (sum(o.size for o in picked), sum(o.mac_bits for o in picked))


def test_a_thinned_frontier_says_so_and_stays_within_the_limits():
    rng = np.random.default_rng(7)
    units = [[Option(int(rng.integers(1, 999)), 0, float(rng.random())) for _ in range(4)] for _ in range(8)]
    cap = sum(min(o.size for o in unit) for unit in units) + 700
    exact, thin = (frontier(units, size=cap, by=(True, False), limit=limit) for limit in (20_000, 6))
    best = [min(f.combinations, key=lambda c: c.cost) for f in (exact, thin)]
    assert exact.exact
    assert not thin.exact
    assert best[0].cost <= best[1].cost
    assert all(c.size <= cap for c in thin.combinations)
    # the least there is stays reachable
    least = frontier(units, size=cap - 700, by=(True, False), limit=6)
    assert [c.size for c in least.combinations] == [cap - 700]


def test_nothing_fits_and_nothing_to_choose_from():
    assert frontier([[Option(5, 0, 0.0)]], size=4).combinations == ()
    with pytest.raises(ValueError, match="at least one option"):
        frontier([[]])
