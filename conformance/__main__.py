"""`python -m conformance`: the matrix of runtimes and operations.

python -m conformance [PATTERN ...]       compare; rows whose runtime or operation contains a pattern
python -m conformance --recorded          from the recordings only, as a machine without the runtimes would
python -m conformance --record RUNTIME    write the recording of an installed runtime
"""

import argparse
import sys
from collections.abc import Sequence

from conformance import golden
from conformance.cpu import is_this
from conformance.matrix import Result, compare
from conformance.rows import ADAPTERS, ROWS
from qjax.support.progress import track
from qjax.support.tables import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if every claimed row holds."""
    parser = argparse.ArgumentParser("python -m conformance", description=__doc__, formatter_class=_Formatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="only rows that contain one of these")
    parser.add_argument("--recorded", action="store_true", help="do not run any runtime")
    parser.add_argument("--record", metavar="RUNTIME", choices=sorted(ADAPTERS), help="write a recording")
    options = parser.parse_args(arguments)
    if options.record:
        return _record(options.record)
    chosen = [row for row in ROWS if _matches(f"{row.key} {row.target}", options.patterns)]
    if not chosen:
        print(f"No row contains any of {options.patterns}. Runtimes: {', '.join(ADAPTERS)}.", file=sys.stderr)
        return 2
    results: list[Result] = []
    for row in track(chosen, "matrix: row"):
        results.append(compare(row, ADAPTERS[row.runtime], live=not options.recorded))
    print(report(results))
    return 0 if all(result.passed for result in results) else 1


def report(results: Sequence[Result]) -> str:
    """The matrix as a table, with a line that sums it up."""
    header = ("runtime", "operation", "target", "rule", "compared", "differ", "answers", "version")
    rows = [
        (r.row.runtime, r.row.op, r.row.target, r.row.rule, r.compared, _count(r), r.source, r.version) for r in results
    ]
    by_runtime = [_of_runtime(name, results) for name in dict.fromkeys(r.row.runtime for r in results)]
    short = table(("runtime", "rows", "compared", "differ", "answers", "version"), by_runtime)
    noted: dict[str, list[str]] = {}
    for r in results:
        if r.row.note:
            noted.setdefault(r.row.note, []).append(r.row.key)
    notes = [f"{', '.join(keys)}: {note}." for note, keys in noted.items()]
    claimed = [r for r in results if r.row.exact]
    failed = [r for r in claimed if not r.passed]
    summary = (
        f"{len(claimed) - len(failed)} of {len(claimed)} rows that claim equality hold, "
        f"{sum(r.compared for r in claimed)} codes compared; {len(results) - len(claimed)} rows claim none"
    )
    return "\n".join([table(header, rows), *notes, "", short, summary])


def _of_runtime(name: str, results: Sequence[Result]) -> tuple[object, ...]:
    """The rows of one runtime that claim equality, summed."""
    own = [r for r in results if r.row.runtime == name and r.row.exact]
    versions = dict.fromkeys(r.version for r in own)
    sources = dict.fromkeys(r.source for r in own)
    differ = sum(r.mismatches for r in own)
    return name, len(own), sum(r.compared for r in own), differ, ", ".join(sources), ", ".join(versions)


def _count(result: Result) -> str:
    if result.source == "missing":
        return "not installed, no recording"
    count = f"at least {result.mismatches}" if result.source == "golden" and result.mismatches else result.mismatches
    return str(count) if result.row.exact else f"{count} (not claimed)"


def _record(runtime: str) -> int:
    adapter = ADAPTERS[runtime]()
    chosen = [row for row in ROWS if row.runtime == runtime]
    elsewhere = sorted({row.cpu for row in chosen if not is_this(row.cpu)})
    if elsewhere:
        print(f"{runtime}: expected a CPU with {', '.join(elsewhere)}; this one computes other codes.", file=sys.stderr)
        return 2
    rows = {row.key: golden.Answers.of(row.theirs(adapter)) for row in chosen}
    path = golden.save(runtime, golden.Recording(adapter.version(), rows))
    print(f"{path}: {len(rows)} rows, {path.stat().st_size} bytes, {adapter.version()}")
    return 0


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(pattern.lower() in text.lower() for pattern in patterns)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
