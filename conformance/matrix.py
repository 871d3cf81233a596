"""The matrix: runtime by operation, each row the same integers through the runtime and through qjax.

A row's answers come from the living runtime where it is installed, and otherwise from a recording of it: see
`golden`. `compare` counts codes that differ; nothing is tolerated.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from conformance import golden, single
from conformance.accumulators import Records
from conformance.case import Case, Runtime
from conformance.cpu import Cpu, is_this
from qjax import targets
from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.requantize import requantize

Source = Literal["live", "golden", "missing"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the matrix.

    runtime: the key of the adapter. op: what is computed, with its variant. target: the name of qjax's target.
    exact: whether the claim is equality; a row that claims none reports its count all the same.
    cases: makes the inputs. note: what the reader must know, such as a restriction of the inputs.
    cpu: where the runtime computes this; on another CPU the recording answers.
    """

    runtime: str
    op: str
    target: str
    cases: Callable[[], Sequence[Case]]
    exact: bool = True
    note: str = ""
    cpu: Cpu = "any"

    @property
    def key(self) -> str:
        """The name of the row in a recording."""
        return f"{self.runtime} | {self.op}"

    @property
    def rule(self) -> str:
        """The rule or formula that the target names for the operation."""
        return single.rule(self.cases()[0], targets.get(self.target))

    def ours(self) -> np.ndarray:
        """qjax's answers, all outputs in one vector."""
        target = targets.get(self.target)
        return _joined(single.run(case, target) for case in self.cases())

    def theirs(self, runtime: Runtime) -> np.ndarray:
        """The runtime's answers."""
        return _joined(runtime.run(case) for case in self.cases())


@dataclasses.dataclass(frozen=True)
class InputRow(Row):
    """One line about a way to make codes of floats that no target uses. quantization: its name."""

    quantization: InputQuantization = "reciprocal"

    @property
    def rule(self) -> str:
        """The name of the formula."""
        return self.quantization

    def ours(self) -> np.ndarray:
        """qjax's answers."""
        target = targets.Target("quantize", quantize=self.quantization)
        return _joined(single.run(case, target) for case in self.cases())


@dataclasses.dataclass(frozen=True)
class RecordRow:
    """One line about a rule of requantization alone, on records of accumulator, multiplier and shift."""

    runtime: str
    op: str
    target: str
    rule: str
    records: Callable[[], Records]
    exact: bool = True
    note: str = ""
    cpu: Cpu = "any"

    @property
    def key(self) -> str:
        """The name of the row in a recording."""
        return f"{self.runtime} | {self.op}"

    def ours(self) -> np.ndarray:
        """qjax's answers, all records in one vector."""
        limits = np.iinfo(np.int32)
        acc, m, s = self.records()
        return np.asarray(requantize(acc, Multiplier(m, s), rule=self.rule, qmin=int(limits.min), qmax=int(limits.max)))

    def theirs(self, runtime: Any) -> np.ndarray:
        """The runtime's answers."""
        return np.asarray(runtime.requantize(self.rule, *self.records()))


AnyRow = Row | RecordRow


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a row.

    source: where the runtime's answers came from; "missing": there are none to compare with. mismatches: of a
    recording, whose answers are a digest, at least that many.
    """

    row: AnyRow
    source: Source
    version: str
    compared: int
    mismatches: int

    @property
    def passed(self) -> bool:
        """Whether the row's claim holds; a row without answers proves nothing and does not pass."""
        return self.source != "missing" and (not self.row.exact or self.mismatches == 0)


def compare(row: AnyRow, adapter: Callable[[], Any], *, live: bool = True) -> Result:
    """Run one row.

    adapter: makes the runtime; an ImportError says that it is not installed. live: False reads the recording only, as
      does a row that another CPU would compute.
    """
    found = _live(row, adapter) if live and is_this(row.cpu) else None
    if found is not None:
        return found
    recorded = golden.load(row.runtime)
    if recorded is None or row.key not in recorded.rows:
        return Result(row, "missing", "", 0, 0)
    ours = row.ours()
    try:
        mismatches = recorded.rows[row.key].mismatches(ours)
    except ValueError as error:
        raise ValueError(f"{row.key}: {error} Record again: python -m conformance --record {row.runtime}") from None
    return Result(row, "golden", recorded.version, ours.size, mismatches)


def _live(row: AnyRow, adapter: Callable[[], Any]) -> Result | None:
    try:
        runtime = adapter()
        version = _version(runtime)
    except ImportError:
        return None
    ours, theirs = row.ours(), row.theirs(runtime)
    if ours.shape != theirs.shape:
        raise ValueError(f"{row.key}: expected {ours.size} answers, got {theirs.size} from {version}.")
    return Result(row, "live", version, ours.size, int(np.count_nonzero(ours != theirs)))


@functools.cache
def _version(runtime: Any) -> str:
    return runtime.version()


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])
