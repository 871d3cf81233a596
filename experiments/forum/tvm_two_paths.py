"""One layer, two answers: TVM on arm_cpu rounded once or twice. `python -m experiments.forum.tvm_two_paths`.

TVM lowered q_multiply_shift to NEON (SQRDMULH, then SRSHL) where the innermost axis is vectorized by four, and to one
64-bit rounding elsewhere. So a layer of 8 outputs and the same layer with a ninth disagree in the 8 that they share.
"""

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance.runtimes.neon import Neon
from conformance.runtimes.tvm import Tvm
from qjax.numerics import Multiplier, effective_scale, quantize_multiplier, requantize

ROWS, FEATURES, OUTPUTS = 512, 64, 9
SHARED = 8
"""Outputs of the small layer: a multiple of four. The great one has one more."""
WIDE: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def layer(seed: int = 0) -> tuple[np.ndarray, Multiplier]:
    """Accumulators (ROWS, OUTPUTS) of an int8 dense layer, and its constants."""
    rng = np.random.default_rng(seed)
    x, kernel = rng.integers(-128, 128, (ROWS, FEATURES)), rng.integers(-127, 128, (FEATURES, OUTPUTS))
    acc = (x @ kernel + rng.integers(-2000, 2000, OUTPUTS)).astype(np.int32)
    scales = (np.float32(s) for s in (0.02, 0.003, 0.011))
    return acc, quantize_multiplier(effective_scale(*scales))


@dataclasses.dataclass(frozen=True)
class Paths:
    """What each path gives, before the clamp to int8, and who computed it."""

    default: np.ndarray
    neon: np.ndarray
    source: str


def emulated(acc: np.ndarray, constants: Multiplier) -> Paths:
    """The rules of the two paths, by their names in qjax."""
    default, neon = (np.asarray(requantize(acc, constants, rule=r, **WIDE)) for r in ("single_round", "neon"))
    return Paths(default, neon[:, :SHARED], "qjax's rules single_round and neon; no TVM and no NEON here")


def living(acc: np.ndarray, constants: Multiplier) -> Paths | None:
    """The same layers compiled by TVM for AArch64 and executed; with NEON alone, only its path; None without either."""
    m, s = (np.reshape(np.asarray(c), (1,)).astype(np.int32) for c in constants)
    try:
        neon, tvm = Neon(), Tvm()
        instructions = neon.requantize("neon", acc[:, :SHARED], int(m[0]), int(s[0]))
        machine = neon.version().split(" (")[0]
    except ModuleNotFoundError:
        return None
    try:
        default = tvm.requantize_arm(acc[None], m, s)[0]
        small = tvm.requantize_arm(acc[None, :, :SHARED], m, s)[0]
        source = f"{tvm.version()} with its old NEON lowering registered, AArch64 code run by {machine}"
    except ModuleNotFoundError:
        rule = np.asarray(requantize(acc, constants, rule="single_round", **WIDE))
        return Paths(rule, instructions, f"NEON run by {machine}, and qjax's rule single_round; no TVM here")
    if not np.array_equal(small, instructions):
        raise SystemExit("claim failed: TVM's layer of 8 outputs is not SQRDMULH and SRSHL")
    return Paths(default, small, source)


def carried(acc: np.ndarray, constants: Multiplier) -> np.ndarray:
    """Where the first rounding goes up to a tie of the second, which then goes up again: the only cause there is.

    With p = acc * M and r = -s the first rounding gives h = floor(p / 2^31 + 1/2). It went up if h * 2^31 > p, and h is
    a tie of the division by 2^r if its last r bits are 10...0.
    """
    multiplier, shift = (int(np.asarray(c)) for c in constants)
    p = acc.astype(np.int64) * multiplier
    high, right = (p + 2**30) >> 31, -shift
    return (high * 2**31 > p) & (high % 2**right == 2 ** (right - 1))


def examples(acc: np.ndarray, constants: Multiplier, paths: Paths, count: int = 6) -> Table:
    multiplier, shift = (int(np.asarray(c)) for c in constants)
    table = Table(title=f"The first of them: M = {multiplier}, s = {shift}")
    for name in ("row", "output", "accumulator", "acc * M / 2^31", "SQRDMULH", "/ 2^-s", "DEFAULT", "NEON"):
        table.add_column(name, justify="right")
    for row, column in np.argwhere(paths.default[:, :SHARED] != paths.neon)[:count].tolist():
        exact = int(acc[row, column]) * multiplier
        high = (exact + 2**30) >> 31
        cells = f"{exact / 2**31:.6f}", f"{high}", f"{high / 2**-shift}"
        answers = paths.default[row, column], paths.neon[row, column]
        table.add_row(*map(str, (row, column, acc[row, column], *cells, *answers)))
    return table


def frequencies(count: int = 65536) -> tuple[Table, bool]:
    """How often the two differ for a given shift, against 2^(s-1)."""
    table = Table(title=f"How often, over {count:,} random accumulators of 24 bits and multipliers")
    for name in ("shift", "outputs that differ", "2^(s-1) of all", "explained by the carry"):
        table.add_column(name, justify="right")
    rng, good = np.random.default_rng(1), True
    for shift in (0, -1, -2, -3, -4, -6, -8):
        acc = rng.integers(-(2**23), 2**23, count).astype(np.int32)
        m = Multiplier(rng.integers(2**30, 2**31, count).astype(np.int32), np.full(count, shift, np.int32))
        once, twice = (np.asarray(requantize(acc, m, rule=r, **WIDE)) for r in ("single_round", "neon"))
        p = acc.astype(np.int64) * m.multiplier
        high = (p + 2**30) >> 31
        tie = (high % 2**-shift == 2 ** (-shift - 1)) if shift else np.zeros(count, bool)
        cause = (high * 2**31 > p) & tie
        expected = count * 2.0 ** (shift - 1) if shift else 0
        good &= np.array_equal(once != twice, cause) and abs(np.sum(cause) - expected) <= 6 * expected**0.5
        table.add_row(str(shift), f"{np.sum(once != twice):,}", f"{expected:,.0f}", f"{np.sum(cause):,}")
    return table, good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.tvm_two_paths", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for TVM and NEON")
    args = parser.parse_args(argv)
    console = Console(width=110)
    acc, constants = layer()
    rules = emulated(acc, constants)
    paths = (None if args.emulate else living(acc, constants)) or rules

    differ = paths.default[:, :SHARED] != paths.neon
    clipped = np.clip(paths.default[:, :SHARED], -128, 127) != np.clip(paths.neon, -128, 127)
    console.print(f"int8 dense layer, {ROWS} rows, {FEATURES} inputs. Computed by: {paths.source}.")
    console.print(
        f"With {SHARED} outputs the path is NEON, with {OUTPUTS} it is DEFAULT. Of the {differ.size:,} outputs that "
        f"both layers compute {np.sum(differ)} differ, {np.sum(clipped)} after the clamp to int8; each by one."
    )
    console.print(examples(acc, constants, paths))
    table, frequencies_hold = frequencies()
    console.print(table)

    gap = paths.neon.astype(np.int64) - paths.default[:, :SHARED]
    claims = {
        "qjax's rules give the bits of both paths": np.array_equal(paths.default, rules.default)
        and np.array_equal(paths.neon, rules.neon),
        "some outputs differ, each by +1": bool(differ.any()) and set(gap[differ].tolist()) == {1},
        "exactly where a carry of the first rounding makes a tie": np.array_equal(
            differ, carried(acc[:, :SHARED], constants)
        ),
        "with probability 2^(s-1) for s < 0, never for s = 0": frequencies_hold,
    }
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
