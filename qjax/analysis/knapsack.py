"""Chooses one option for every unit, with the least total cost within limits on two resources; the solution is exact.

It is dynamic programming over the Pareto frontier: after each unit, combinations that another one beats in every
respect are dropped. At the end every useful trade-off of resources against cost remains. Resources are integers. Costs
are added from the first unit to the last, so dropping `a >= b` is safe in floating point too: rounding is monotone, so
`a + c >= b + c`.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

LIMIT = 20_000
"""The most combinations kept per unit. A larger frontier is thinned, and then the result may not be the best."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a unit: what it uses of each resource, and its cost."""

    size: int
    mac_bits: int
    cost: float


@dataclasses.dataclass(frozen=True)
class Combination:
    """One option per unit: their indices, and the sums."""

    size: int
    mac_bits: int
    cost: float
    picks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The combinations that no other one beats, by rising size; exact: whether none was thinned out."""

    combinations: tuple[Combination, ...]
    exact: bool


def frontier(
    units: Sequence[Sequence[Option]],
    *,
    size: int | None = None,
    mac_bits: int | None = None,
    by: tuple[bool, bool] = (True, True),
    limit: int = LIMIT,
) -> Frontier:
    """The combinations within the limits that no other one equals or beats in cost and in the counted resources.

    Args:
      size, mac_bits: the most that a combination may use; None is no limit.
      by: whether size, and whether mac_bits, count when two combinations are compared. A limited resource must count.
      limit: how many combinations to keep after each unit.
    """
    if any(not options for options in units):
        raise ValueError("frontier: every unit needs at least one option.")
    caps = (size, mac_bits)
    least = [[min(o.size for o in options), min(o.mac_bits for o in options)] for options in units]
    rest = [[sum(part[axis] for part in least[index + 1 :]) for axis in (0, 1)] for index in range(len(units))]
    found, exact = [Combination(0, 0, 0.0, ())], True
    for options, later in zip(units, rest, strict=True):
        grown = [
            Combination(c.size + o.size, c.mac_bits + o.mac_bits, c.cost + o.cost, (*c.picks, index))
            for c in found
            for index, o in enumerate(options)
        ]
        grown = [
            c
            for c in grown
            if all(
                cap is None or taken + more <= cap
                for cap, taken, more in zip(caps, (c.size, c.mac_bits), later, strict=True)
            )
        ]
        found = _remove_dominated(grown, by)
        if len(found) > limit:
            found, exact = _thin(found, by, limit), False
    return Frontier(tuple(found), exact)


def _remove_dominated(combinations: list[Combination], by: tuple[bool, bool]) -> list[Combination]:
    """Sweep by rising size; `macs` and `costs` are the staircase of the combinations kept: rising and falling."""

    def key(c: Combination) -> tuple[float, ...]:
        first = (c.size if by[0] else 0, c.mac_bits if by[1] else 0)
        # Of equal combinations, take the smaller one, also in resources that do not count, and then the first.
        return (*first, c.cost, c.size, c.mac_bits, *c.picks)

    kept: list[Combination] = []
    macs: list[int] = []
    costs: list[float] = []
    for c in sorted(combinations, key=key):
        taken = c.mac_bits if by[1] else 0
        at = bisect.bisect_right(macs, taken)
        if at and costs[at - 1] <= c.cost:
            continue
        end = at
        while end < len(macs) and costs[end] >= c.cost:
            end += 1
        if at and macs[at - 1] == taken:
            at -= 1
        macs[at:end], costs[at:end] = [taken], [c.cost]
        kept.append(c)
    return kept


def _thin(combinations: list[Combination], by: tuple[bool, bool], limit: int) -> list[Combination]:
    """The cheapest of every stretch, and those that use least of each resource, so that a limit stays reachable."""
    count = max(2, limit // 2)
    edges = [len(combinations) * i // count for i in range(count + 1)]
    chosen = {min(range(a, b), key=lambda i: combinations[i].cost) for a, b in itertools.pairwise(edges)}
    for axis in (lambda c: c.size, lambda c: c.mac_bits):
        chosen.add(min(range(len(combinations)), key=lambda i: (axis(combinations[i]), combinations[i].cost)))
    return [combinations[i] for i in sorted(chosen)]
