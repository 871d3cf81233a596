"""Four ways to round an average of codes: `python -m experiments.forum.average_pool`.

Said of AdaptiveAvgPool2d: TVM truncated an integer division; adding 0.5 repairs it; PyTorch rounds to nearest even. All
sums that a window of uint8 codes can have are averaged in all ways, by the living runtimes where they are installed.
"""

import argparse
import dataclasses
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance import single
from conformance.case import Case, Grid, Runtime
from conformance.runtimes.litert import LiteRT
from conformance.runtimes.torch_cpu import TorchCpu
from experiments.forum import torch_programs
from qjax import targets

WINDOWS = (2, 3, 4, 6, 7)
RUN = (2, 3, 6)
"""Windows that the runtimes are asked for."""
SCALE = np.float32(0.1)
EVEN, ODD = 128, 113
"""Zero points; their parity decides what "even" means where the zero point is added before rounding."""
CHANNELS = 8

TORCH, QNNPACK = targets.get("torch_fbgemm"), targets.get("torch_qnnpack")
CONTIGUOUS = TORCH.replace(name="torch_contiguous", average_pool="torch_average_pool_contiguous")
TFLITE = targets.get("tflite_reference")


def images(window: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, window, window, CHANNELS), one for each sum that n codes can have, and these sums."""
    n, info = window * window, np.iinfo(dtype)
    sums = np.arange(info.min * n, info.max * n + 1)
    # the last channels repeat the greatest sum
    filled = np.append(sums, np.repeat(sums[-1:], -len(sums) % CHANNELS))
    codes = filled[:, None] // n + (np.arange(n) < (filled % n)[:, None])
    shape = (-1, CHANNELS, window, window)
    return np.ascontiguousarray(codes.reshape(shape).transpose(0, 2, 3, 1).astype(dtype)), sums


def case_of(op: str, window: int, zero_point: int, dtype: str = "uint8") -> Case:
    grid = Grid(np.asarray(SCALE), zero_point, dtype)
    known = {"axes": (1, 2)}
    if op == "average_pool":
        known = {"window": (window, window), "strides": (window, window), "padding": "VALID"}
    return Case(op, (images(window, dtype)[0],), (grid,), grid, attributes=known)


def averages(case: Case, window: int, answer: np.ndarray) -> np.ndarray:
    """One code for each sum, int64."""
    count = len(images(window, case.output.dtype)[1])
    return answer.reshape(-1)[:count].astype(np.int64)


def bias(codes: np.ndarray, sums: np.ndarray, n: int) -> float:
    """The mean of code - sum / n, in steps of the grid, over all sums."""
    return int(np.sum(codes * n - sums)) / (n * len(sums))


def is_tie(sums: np.ndarray, n: int) -> np.ndarray:
    return 2 * sums % (2 * n) == n


def nearest_even(sums: np.ndarray, n: int) -> np.ndarray:
    below, rest = sums // n, 2 * (sums % n)
    return below + ((rest > n) | ((rest == n) & (below % 2 == 1)))


def ways(window: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Codes and sums of each way to average; the first two as integer divisions, the others by qjax's formulas."""
    n, unsigned, signed = window * window, images(window, "uint8")[1], images(window, "int8")[1]
    torch, tflite = case_of("average_pool", window, EVEN), case_of("average_pool", window, 3, "int8")
    return {
        "truncated": (unsigned // n, unsigned),
        "0.5 added": ((unsigned + n // 2) // n, unsigned),
        "to even (torch)": (averages(torch, window, single.run(torch, TORCH)), unsigned),
        "away from code 0 (TFLite, int8)": (averages(tflite, window, single.run(tflite, TFLITE)), signed),
    }


def table_of_ways() -> tuple[Table, dict[str, bool]]:
    table = Table(title="Every sum of n codes once: in how many averages a way differs from nearest even; its bias")
    for name in ("window", "sums", "ties", "truncated", "0.5 added", "to even (torch)", "TFLite, int8"):
        table.add_column(name, justify="right")
    claims: dict[str, bool] = dict.fromkeys(
        (
            "truncation loses (n - 1) / 2n of a step on average",
            "0.5 added differs in every second tie, upwards: only windows of an even size have ties",
            "PyTorch's avg_pool2d with an even zero point is to nearest even",
            "TFLite's differ in every second tie, away from the code 0",
        ),
        True,
    )
    first, second, third, fourth = claims
    for window in WINDOWS:
        n, cells = window * window, []
        for name, (codes, sums) in ways(window).items():
            wrong, ties, mean = codes != nearest_even(sums, n), is_tie(sums, n), bias(codes, sums, n)
            cells.append(f"{np.sum(wrong):,}  {mean:+.4f}")
            odd_ties = np.sum(ties) / 2
            if name == "truncated":
                claims[first] &= abs(mean + (n - 1) / (2 * n)) < 1 / n
                counts = f"{len(sums):,}", f"{np.sum(ties):,}"
            elif name == "0.5 added":
                claims[second] &= bool(np.all(ties[wrong])) and abs(np.sum(wrong) - odd_ties) <= 1
                claims[second] &= bool(np.all(codes[wrong] * n > sums[wrong])) and bool(ties.any()) == (n % 2 == 0)
            elif name.startswith("to even"):
                claims[third] &= not wrong.any()
            else:
                claims[fourth] &= bool(np.all(ties[wrong])) and abs(np.sum(wrong) - odd_ties) <= 1
                claims[fourth] &= bool(np.all((np.abs(codes) * n > np.abs(sums))[wrong]))
        table.add_row(f"{window}x{window}", *counts, *cells)  # pyright: ignore[reportPossiblyUnboundVariable]
    return table, claims


@dataclasses.dataclass
class Function:
    """One function of a runtime, and qjax's answer to it."""

    name: str
    layout: str
    op: str
    target: targets.Target
    runtime: Runtime | None
    dtype: str = "uint8"

    def theirs(self, cases: list[Case]) -> list[np.ndarray]:
        """The runtime's codes; ImportError without it."""
        if self.runtime is not None:
            return [self.runtime.run(case) for case in cases]
        known = {"program": "adaptive_average", "engine": "fbgemm", "channels_last": False, "scale": float(SCALE)}
        calls = [{**known, "codes": case.inputs[0], "zero_point": case.output.zero_point} for case in cases]
        found = torch_programs.ask(calls)
        if found is None:
            raise ImportError("PyTorch is not installed")
        return found[1]


FUNCTIONS = (
    Function("avg_pool2d", "NCHW", "average_pool", CONTIGUOUS, TorchCpu("fbgemm", channels_last=False)),
    Function("avg_pool2d", "NHWC", "average_pool", TORCH, TorchCpu("fbgemm")),
    Function("adaptive_avg_pool2d", "NCHW", "average_pool", CONTIGUOUS, None),
    Function("adaptive_avg_pool2d", "NHWC", "mean", TORCH, TorchCpu("fbgemm")),
    Function("avg_pool2d, qnnpack", "NCHW", "average_pool", QNNPACK, TorchCpu("qnnpack", channels_last=False)),
    Function("avg_pool2d, qnnpack", "NHWC", "average_pool", QNNPACK, TorchCpu("qnnpack")),
    Function("adaptive_avg_pool2d, qnnpack", "NHWC", "mean", QNNPACK, TorchCpu("qnnpack")),
    Function("AVERAGE_POOL_2D, LiteRT", "NHWC", "average_pool", TFLITE, LiteRT("reference"), "int8"),
    Function("AVERAGE_POOL_2D, XNNPACK", "NHWC", "average_pool", TFLITE, LiteRT("xnnpack"), "int8"),
)


def table_of_functions(emulate: bool) -> tuple[Table, dict[str, bool], list[str]]:
    """Every function on all sums, for an even and an odd zero point, beside qjax's formula."""
    table = Table(
        title=f"All sums of windows 2x2, 3x3 and 6x6, zero points {EVEN} and {ODD}; ties that go to the even code"
    )
    for name in ("function", "layout", "averages", "qjax differs", f"to even, z = {EVEN}", f"z = {ODD}"):
        table.add_column(name, justify="left" if name in ("function", "layout") else "right")
    sources: set[str] = set()
    mismatches, answers = 0, {}
    for function in FUNCTIONS:
        keys = [(window, zero_point) for window in RUN for zero_point in (EVEN, ODD)]
        cases = [case_of(function.op, w, z - 128 if function.dtype == "int8" else z, function.dtype) for w, z in keys]
        ours = [single.run(case, function.target) for case in cases]
        theirs, live = ours, not emulate
        if live:
            try:
                theirs = function.theirs(cases)
                sources.add((function.runtime or TorchCpu("fbgemm")).version())
            except ImportError:
                live = False
        differ = compared = 0
        to_even = {EVEN: [0, 0], ODD: [0, 0]}
        for (window, zero_point), case, mine, found in zip(keys, cases, ours, theirs, strict=True):
            sums = images(window, function.dtype)[1]
            codes = averages(case, window, found)
            differ += int(np.sum(averages(case, window, mine) != codes))
            compared += len(sums)
            ties = is_tie(sums, window * window)
            to_even[zero_point][0] += int(np.sum(ties & (codes % 2 == 0)))
            to_even[zero_point][1] += int(np.sum(ties))
            answers[function.name, function.layout, window, zero_point] = codes
        mismatches += differ
        even = [f"{hits:,} of {count:,}" for hits, count in to_even.values()]
        table.add_row(
            function.name, function.layout, f"{compared:,}", f"{differ:,}" if live else "not installed", *even
        )

    def disagree(a: tuple[str, str], b: tuple[str, str], zero_point: int) -> bool:
        """Whether a and b differ in every tie and nowhere else."""
        return all(
            np.array_equal(
                answers[*a, w, zero_point] != answers[*b, w, zero_point], is_tie(images(w, "uint8")[1], w * w)
            )
            for w in RUN
        )

    def agree(a: tuple[str, str], b: tuple[str, str], zero_point: int) -> bool:
        return all(np.array_equal(answers[*a, w, zero_point], answers[*b, w, zero_point]) for w in RUN)

    nchw, nhwc = ("avg_pool2d", "NCHW"), ("avg_pool2d", "NHWC")
    claims = {
        **({"qjax's formulas give the codes of every runtime": mismatches == 0} if sources else {}),
        f"with z = {ODD} avg_pool2d gives other codes in NCHW than in NHWC: in every tie, nowhere else": disagree(
            nchw, nhwc, ODD
        ),
        f"with z = {EVEN} it does not": agree(nchw, nhwc, EVEN),
        f"with z = {ODD}, in NHWC, adaptive_avg_pool2d is not avg_pool2d": not agree(
            ("adaptive_avg_pool2d", "NHWC"), nhwc, ODD
        ),
        "qnnpack's layouts agree": all(
            agree(("avg_pool2d, qnnpack", "NCHW"), ("avg_pool2d, qnnpack", "NHWC"), z) for z in (EVEN, ODD)
        ),
    }
    return table, claims, sorted(sources)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.average_pool", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for PyTorch and LiteRT")
    args = parser.parse_args(argv)
    console = Console(width=120)
    ways_table, claims = table_of_ways()
    console.print(ways_table)
    functions_table, more, sources = table_of_functions(args.emulate)
    console.print(functions_table)
    console.print(f"Run by {', '.join(sources)}." if sources else "No runtime was asked: all codes are qjax's.")
    claims |= more
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
