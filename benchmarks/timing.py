"""Paired, interleaved timing: machines drift, so both sides are measured in turn and compared pair by pair."""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Paired:
    """Seconds of each run of two functions, taken in turn."""

    name: str
    subject: np.ndarray
    reference: np.ndarray

    @property
    def ratio(self) -> float:
        """Median over pairs of subject / reference."""
        return float(np.median(self.subject / self.reference))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the ratio."""
        low, high = np.quantile(self.subject / self.reference, (0.25, 0.75))
        return float(low), float(high)

    def row(self) -> tuple[str, str, str, str, str]:
        """Name, medians in milliseconds, ratio, its quartiles."""
        low, high = self.quartiles
        return (
            self.name,
            f"{1e3 * float(np.median(self.subject)):.3f}",
            f"{1e3 * float(np.median(self.reference)):.3f}",
            f"{self.ratio:.2f}",
            f"{low:.2f} .. {high:.2f}",
        )

    def document(self) -> dict[str, Any]:
        """The same for JSON, in seconds."""
        return {
            "name": self.name,
            "subject_s": float(np.median(self.subject)),
            "reference_s": float(np.median(self.reference)),
            "ratio": self.ratio,
            "ratio_quartiles": self.quartiles,
            "pairs": len(self.subject),
        }


@dataclasses.dataclass(frozen=True)
class Failed:
    """A comparison that could not be made, in the place of one; differ: codes that are not equal and must be."""

    name: str
    reason: str
    differ: int = 0

    def row(self) -> tuple[str, str, str, str, str]:
        """As that of `Paired`."""
        return self.name, "-", "-", "-", self.reason

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "failed": self.reason}


Result = Paired | Failed


Found = TypeVar("Found")


def apart(
    measure: Callable[[float, Sequence[str]], Sequence[Found]], seconds: float, names: Iterable[str]
) -> list[Found]:
    """Each name in a process of its own: what one leaves in the memory slows the next one down.

    measure: a function of a module, `(seconds, [name]) -> results`.
    """
    found: list[Found] = []
    # a process that crashes is an error here, and not one that is waited for
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in names:
            found += pool.submit(measure, seconds, [name]).result()
    return found


def thread_time() -> float:
    """Seconds of the processor for this thread: of calls that start no other one."""
    return time.thread_time()


def paired(
    name: str,
    subject: Call,
    reference: Call,
    *,
    seconds: float = 2.0,
    least: int = 15,
    rest: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Paired:
    """Run both in turn, changing who goes first, for about `seconds`; each run is repeated to last 2 ms at least.

    The functions return JAX arrays, which are waited for. What they compile is compiled before the first run counts.
    rest: seconds of quiet before each run, which then lasts as long at least, behind one that does not count.
    clock: what one run takes.
    """
    repeats = [_repeats(call, max(0.002, rest), clock) for call in (subject, reference)]
    times: tuple[list[float], list[float]] = ([], [])
    calls, end, first = (subject, reference), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or len(times[0]) < least:
        for side in (first, 1 - first):
            if rest:
                time.sleep(rest)
                jax.block_until_ready(calls[side]())
            times[side].append(_run(calls[side], repeats[side], clock))
        first = 1 - first
    return Paired(name, np.asarray(times[0]), np.asarray(times[1]))


def _run(call: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (clock() - start) / repeats


def _repeats(call: Call, least: float, clock: Callable[[], float] = time.perf_counter) -> int:
    for _ in range(3):
        jax.block_until_ready(call())
    return max(1, int(least / _run(call, 3, clock)))
