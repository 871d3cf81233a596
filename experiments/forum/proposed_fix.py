"""What the repair proposed for TVM computes: `python -m experiments.forum.proposed_fix`.

Proposed: SQDMULH, which truncates, then SRSHL for s < 0; SQRDMULH, which rounds, for s = 0. It removes the double
rounding: the result is that of one rounding, ties up. It is not rounding to nearest even, which PyTorch uses.
"""

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance.runtimes.neon import Neon
from qjax.numerics import Multiplier, Rounding, requantize, rounding_right_shift, saturating_rounding_doubling_high_mul

SHIFTS = range(-31, 1)
MULTIPLIERS = np.arange(32, 64, dtype=np.int32) * np.int32(2**25)
"""Every multiplier of six bits: few bits make many ties."""
ACCUMULATORS = np.arange(-(2**11), 2**11, dtype=np.int32)
RULES = {"single_round": "one rounding, ties up", "neon": "TVM's NEON path", "nearest_even": "ties to even"}
WIDE: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def proposed(acc: np.ndarray, m: Multiplier) -> np.ndarray:
    """SRSHL(SQDMULH(acc, M), s) for s < 0, SQRDMULH(acc, M) for s = 0. The shift is one number."""
    shift = int(m.shift)
    if shift == 0:
        return np.asarray(saturating_rounding_doubling_high_mul(acc, m.multiplier))
    truncated = ((acc.astype(np.int64) * m.multiplier) >> 31).astype(np.int32)
    return np.asarray(rounding_right_shift(truncated, np.int32(-shift), Rounding.NEAREST_UP))


@dataclasses.dataclass
class Count:
    """Of the records of one kind: how many, and in how many the repair differs from each rule."""

    compared: int = 0
    differ: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(RULES, 0))

    def add(self, fix: np.ndarray, rules: dict[str, np.ndarray], chosen: np.ndarray) -> None:
        self.compared += int(np.sum(chosen))
        for name, codes in rules.items():
            self.differ[name] += int(np.sum((codes != fix) & chosen))


def count(acc: np.ndarray, multiplier: np.ndarray, kinds: dict[str, Count], neon: Neon | None) -> int:
    """Adds every shift to `kinds`; returns how often the real instructions differ from the repair computed here."""
    wrong = 0
    for shift in SHIFTS:
        m = Multiplier(multiplier, np.int32(shift))
        fix = proposed(acc, m)
        each = Multiplier(multiplier, np.full(multiplier.shape, shift, np.int32))
        rules = {rule: np.asarray(requantize(acc, each, rule=rule, **WIDE)) for rule in RULES}
        p, t = acc.astype(np.int64) * multiplier, 31 - shift
        tie = p % 2**t == 2 ** (t - 1)
        high = (p + 2**30) >> 31
        carry = ~tie & (high * 2**31 > p) & (high % 2**-shift == 2**-shift // 2) & (shift < 0)
        for name, chosen in {"product is a tie": tie, "carry makes a tie": carry, "all others": ~tie & ~carry}.items():
            kinds[name].add(fix, rules, chosen)
        if neon is not None:
            wrong += int(np.sum(neon.requantize("proposed_fix", acc, multiplier, shift) != fix))
    return wrong


def new_kinds() -> dict[str, Count]:
    return {name: Count() for name in ("product is a tie", "carry makes a tie", "all others")}


def table_of(title: str, kinds: dict[str, Count]) -> Table:
    table = Table(title=title, caption="records in which the repair gives another result than ...")
    table.add_column("records where the")
    table.add_column("compared", justify="right")
    for rule, meaning in RULES.items():
        table.add_column(f"{rule}\n({meaning})", justify="right")
    for name, kind in kinds.items():
        table.add_row(name, f"{kind.compared:,}", *(f"{kind.differ[rule]:,}" for rule in RULES))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.proposed_fix", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for NEON")
    args = parser.parse_args(argv)
    console, neon = Console(width=110), None if args.emulate else Neon()
    source = "no NEON here: the repair is computed from qjax's functions alone"
    if neon is not None:
        try:
            source = f"the repair also run as instructions by {neon.version().split(' (')[0]}"
        except ModuleNotFoundError:
            neon = None

    exhaustive, random = new_kinds(), new_kinds()
    acc, multiplier = (a.copy() for a in np.broadcast_arrays(ACCUMULATORS[:, None], MULTIPLIERS))
    wrong = count(acc, multiplier, exhaustive, neon)
    rng = np.random.default_rng(0)
    wide = (rng.integers(-(2**31), 2**31, 32768) >> rng.integers(0, 24, 32768)).astype(np.int32)
    wrong += count(wide, rng.integers(2**30, 2**31, 32768).astype(np.int32), random, neon)

    title = "Exhaustive: each accumulator of 12 bits, multiplier of 6 bits and shift from -31 to 0"
    console.print(table_of(title, exhaustive))
    console.print(table_of("Random: accumulators of 8 to 32 bits, multipliers of 31 bits, the same shifts", random))
    if neon is not None:
        source += f"; {wrong} of {sum(k.compared for k in [*exhaustive.values(), *random.values()]):,} differ"
    console.print(source + ".")

    ties, carries = exhaustive["product is a tie"], exhaustive["carry makes a tie"]
    everything = [*exhaustive.values(), *random.values()]
    claims = {
        "the repair is single_round: ties up, once": not any(k.differ["single_round"] for k in everything),
        "it changes what TVM's NEON path gives exactly where a carry makes a tie": all(
            k.differ["neon"] == (k.compared if name == "carry makes a tie" else 0)
            for kinds in (exhaustive, random)
            for name, k in kinds.items()
        )
        and carries.compared > 0,
        "it is not nearest_even: half of the ties differ, and nothing else": 2 * ties.differ["nearest_even"]
        == ties.compared
        and not any(
            k.differ["nearest_even"] for kinds in (exhaustive, random) for n, k in kinds.items() if "product" not in n
        ),
    }
    if neon is not None:
        claims["the instructions give the same bits"] = wrong == 0
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
