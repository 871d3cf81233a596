"""Sweeps: call a function for every combination of some values, save row by row, and resume after a crash.

sweep(measure, {"bits": [2, 4], "seed": [0, 1]}, rows="rows.jsonl")    ->    4 rows, one for each call
"""

import csv
import io
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from qjax.export import files
from qjax.support import progress as lines
from qjax.support.version import __version__

Point = dict[str, Any]
Row = dict[str, Any]
SECONDS, ERROR = "seconds", "error"
"""Columns that a sweep adds: the time of a row, and the message of a function that failed."""


class SweepError(ValueError):
    """A sweep that cannot start or continue; the message tells what was expected, what came, and the cure.

    Examples:
      >>> from qjax.contrib.lab import SweepError, sweep
      >>> try:
      ...     sweep(lambda bits: {"codes": bits}, {"bits": [2]}, processes=0)
      ... except SweepError as error:
      ...     print(error)
      processes: expected 1 or more, got 0.
    """


class Rows(Sequence[Row]):
    """The rows of a sweep, in the order of the combinations. Each has the values of its point and the results.

    Args:
      rows: column -> value, for each row.
      axes: the columns that were swept.
      failed: rows whose function raised an exception; they have the column "error" and no results.

    Examples:
      >>> from qjax.contrib.lab import sweep
      >>> rows = sweep(lambda bits: {"codes": 2**bits}, {"bits": [2, 4]})
      >>> [row["codes"] for row in rows.where(bits=4)]
      [16]
    """

    def __init__(self, rows: Iterable[Row], axes: Sequence[str], failed: Iterable[Row] = ()) -> None:
        self._rows, self.axes, self.failed = list(rows), tuple(axes), list(failed)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, **values: Any) -> "Rows":
        """The rows with these values of the axes, as in `rows.where(bits=4)`."""
        self._check(values)
        return Rows([row for row in self if all(row[name] == value for name, value in values.items())], self.axes)

    def mean(self, result: str, over: str | Sequence[str] = "seed") -> "Rows":
        """One row for each combination of the other axes: the mean of a result, its standard error, and the count.

        over: the axes to average. The standard error is NaN if there is only one row.

        Raises:
          SweepError: an unknown axis, or a row without this result as a number.
        """
        over = [over] if isinstance(over, str) else list(over)
        self._check(over)
        kept = [name for name in self.axes if name not in over]
        groups: dict[str, tuple[Point, list[float]]] = {}
        for row in self:
            value = row.get(result)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SweepError(f"mean: expected a number in the column {result!r}, got {value!r}.")
            point = {name: row[name] for name in kept}
            groups.setdefault(json.dumps(point), (point, []))[1].append(value)
        rows: list[Row] = []
        for point, values in groups.values():
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            rows.append({**point, result: statistics.fmean(values), "standard error": error, "count": len(values)})
        return Rows(rows, kept)

    def csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV, all or nothing."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        files.write(text.getvalue().encode(), path)

    def json(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as a JSON list of objects, all or nothing."""
        files.write((json.dumps(self._rows, indent=1) + "\n").encode(), path)

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self for name in row))

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.axes:
                raise SweepError(f"expected an axis of the sweep, one of {', '.join(self.axes)}; got {name!r}.")

    def __repr__(self) -> str:
        """The rows as a table in Markdown."""
        columns = self._columns()
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for row in self:
            cells = [row.get(name, "") for name in columns]
            lines.append("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")
        return "\n".join(lines)


def sweep(
    measure: Callable[..., Mapping[str, Any]],
    over: Mapping[str, Iterable[Any]],
    rows: str | os.PathLike[str] | None = None,
    *,
    processes: int = 1,
    progress: bool | None = None,
) -> Rows:
    """Call `measure(**point)` for every combination of the values, and return a table.

    A row is written to the disk before the next one begins. If the process is killed, the same call computes only the
    missing rows. The next call also retries a point that raised an exception.

    Args:
      measure: takes one value of each axis by name; returns results by name: numbers, texts, booleans, None.
      over: axis -> its values: JSON values (numbers, texts, booleans). The first axis varies slowest.
      rows: the file to which the rows are saved, one JSON object per line; None saves nothing.
      processes: how many run at a time. With more than one, `measure` must be a function of a module, because each
        process imports it.
      progress: whether a line of progress is shown; None: in a terminal.

    Returns:
      The rows. Points that failed are in `rows.failed`.

    Raises:
      SweepError: values that are not JSON, results that are no mapping of such values, a file of another sweep.

    Example:
      >>> from qjax.contrib.lab import sweep
      >>> table = sweep(
      ...     lambda bits, seed: {"steps": 2**bits + seed}, {"bits": [2, 4], "seed": [0, 1]}
      ... )
      >>> table.mean("steps")
      | bits | steps | standard error | count |
      | --- | --- | --- | --- |
      | 2 | 4.5 | 0.5 | 2 |
      | 4 | 16.5 | 0.5 | 2 |
    """
    points = _points(over)
    if processes < 1:
        raise SweepError(f"processes: expected 1 or more, got {processes}.")
    if processes > 1 and ("<" in measure.__qualname__ or measure.__module__ == "__main__"):
        raise SweepError(
            f"{measure.__qualname__!r} cannot be imported by other processes. Put it at the top of a module of its "
            "own, or use processes=1."
        )
    kept = _Kept(None if rows is None else Path(rows), measure, tuple(over))
    todo = [point for point in points if _key(point) not in kept.found]
    with _calls(measure, todo, processes) as results:
        for point, row in _shown(results, len(todo), progress):
            kept.add(point, row)
    found = [kept.found[_key(point)] for point in points]
    return Rows([row for row in found if ERROR not in row], tuple(over), [row for row in found if ERROR in row])


def _points(over: Mapping[str, Iterable[Any]]) -> list[Point]:
    axes = {name: list(values) for name, values in over.items()}
    for name, values in axes.items():
        if name in (SECONDS, ERROR):
            raise SweepError(f"the axis {name!r} has the name of a column that the sweep adds. Rename it.")
        if not values:
            raise SweepError(f"the axis {name!r}: expected at least one value, got none.")
        for value in values:
            _check_plain(value, f"axis {name!r}")
        if len({json.dumps(value) for value in values}) != len(values):
            raise SweepError(f"the axis {name!r} must not have the same value twice, got {values}.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _check_plain(value: Any, place: str) -> None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise SweepError(
            f"{place}: expected a number, a text, a boolean or None, got {type(value).__name__}. "
            "Convert arrays with float() or int()."
        )


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _measure_point(measure: Callable[..., Mapping[str, Any]], point: Point) -> Row:
    """The row of a point. An exception becomes a row too, so that one failure does not end a long sweep."""
    start = time.perf_counter()
    try:
        results = measure(**point)
    except Exception as error:
        return {**point, ERROR: f"{type(error).__name__}: {error}"}
    if not isinstance(results, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SweepError(f"measure: expected it to return a mapping of results, got {type(results).__name__}.")
    for name, value in results.items():
        if name in point or name in (SECONDS, ERROR):
            raise SweepError(f"measure: the result {name!r} has the name of an axis or of another column. Rename it.")
        _check_plain(value, f"result {name!r}")
    return {**point, **results, SECONDS: round(time.perf_counter() - start, 3)}


class _calls:
    """The rows of points as they finish: in this process, or in several that import the function."""

    def __init__(self, measure: Callable[..., Mapping[str, Any]], points: list[Point], processes: int) -> None:
        self._measure, self._points = measure, points
        # JAX runs threads, which a forked process would lack.
        spawned = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawned) if processes > 1 and points else None

    def __enter__(self) -> Iterator[tuple[Point, Row]]:
        if self._pool is None:
            return ((point, _measure_point(self._measure, point)) for point in self._points)
        jobs = {self._pool.submit(_measure_point, self._measure, point): point for point in self._points}
        return ((jobs[job], job.result()) for job in as_completed(jobs))

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _shown(results: Iterator[tuple[Point, Row]], count: int, enabled: bool | None) -> Iterator[tuple[Point, Row]]:
    for _ in lines.track(range(count), "sweep", enabled):
        yield next(results)


class _Kept:
    """The file of a sweep: a first line that identifies the sweep, then one line for each row."""

    def __init__(self, path: Path | None, measure: Callable[..., Any], axes: tuple[str, ...]) -> None:
        self.path, self.found = path, dict[str, Row]()
        self._head = {"sweep": f"{measure.__module__}.{measure.__qualname__}", "axes": list(axes), "qjax": __version__}
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        if not lines or not lines[0]:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write((json.dumps(self._head) + "\n").encode(), path)
            return
        self._check_head(lines[0])
        # A process that is killed while it writes leaves an incomplete last line, so that row is computed again.
        for line in lines[1:-1]:
            row = json.loads(line)
            if ERROR not in row:
                self.found[_key({name: row[name] for name in axes})] = row
        if lines[-1]:
            print(f"{path}: the last row is incomplete and is computed again.", file=sys.stderr)
            files.write("\n".join([*lines[:-1], ""]).encode(), path)

    def _check_head(self, line: str) -> None:
        try:
            head = json.loads(line)
        except json.JSONDecodeError:
            head = None
        if head != self._head:
            raise SweepError(
                f"{self.path}: expected the rows of {json.dumps(self._head)}, got a file that begins with "
                f"{line[:200]!r}. Another function, other axes or another version may give other rows: "
                "choose another file, or delete this one."
            )

    def add(self, point: Point, row: Row) -> None:
        self.found[_key(point)] = row
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
