"""Random networks through every path that must agree: `python -m experiments.random_networks`.

A seed is a network, a recipe and a target. Its graph, the graph saved and loaded, the exact forward, the emitted C and
the emitted ONNX file (style "integer", in ONNX Runtime) must give the same codes. What qjax refuses with a message is
counted by message; any other error, and any code that differs, is a finding. `--seed N` runs one case and prints its
network; `--rows FILE` keeps a line of JSON per case and goes on where it was stopped.
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from experiments.random_networks.checks import ARTIFACTS, Row, run

CHUNK = 40
"""Cases per process: what XLA compiled stays in memory until its end."""
TIMEOUT = 900


def rows_in(path: Path) -> list[Row]:
    """The rows that are kept; a line that a kill cut short is none."""
    found: list[Row] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found


def keep(path: Path, row: Row) -> None:
    """Add one row; a line that a kill cut short is ended first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(dataclasses.asdict(row)).encode() + b"\n")


def tally(rows: list[Row]) -> str:
    """How many cases ended how, and every finding with its command."""
    kinds = collections.Counter(row.kind for row in rows)
    lines = [f"{len(rows)} networks: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))]
    for stage in ("graph", *ARTIFACTS):
        done = [row for row in rows if stage in row.compared]
        lines.append(f"  {stage}: {len(done)} networks, {sum(row.compared[stage] for row in done):,} numbers compared")
    refused = collections.Counter((stage, text) for row in rows for stage, text in row.refused.items())
    lines += [f"refused {n} times at {stage}: {text}" for (stage, text), n in refused.most_common()]
    for row in rows:
        lines += [f"FOUND --seed {row.seed} ({row.target}): {text}" for text in row.found]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m experiments.random_networks", description=__doc__)
    made.add_argument("--seed", type=int, nargs="+", help="these cases only, in this process, with their networks")
    made.add_argument("--count", type=int, default=10_000, help="cases 0 to COUNT - 1")
    made.add_argument("--steps", type=int, default=10, help="at most, of every network")
    made.add_argument("--target", help="this one, instead of the seed's")
    made.add_argument(
        "--stages", nargs="+", default=ARTIFACTS, choices=ARTIFACTS, help="what is compared with the graph"
    )
    made.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep every row there, and leave out those that are there"
    )
    made.add_argument("--tally", action="store_true", help="only count what --rows holds")
    made.add_argument("--sparse", action="store_true", help="with --seed: leave out what a long run leaves out")
    made.add_argument("--quiet", action="store_true", help="without the networks")
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    if args.seed is not None:
        return [_one(seed, args) for seed in args.seed]
    rows = rows_in(args.rows) if args.rows else []
    known = {row.seed for row in rows}
    wanted = [seed for seed in range(args.count) if seed not in known and not args.tally]
    for start in range(0, len(wanted), CHUNK):
        rows += _apart(wanted[start : start + CHUNK], args)
    print(tally(rows))
    return rows


def _one(seed: int, args: argparse.Namespace) -> Row:
    row = run(seed, args.target, args.stages, most=args.steps, sparse=args.sparse, verbose=not args.quiet)
    if args.rows is not None:
        keep(args.rows, row)
    if not args.quiet:
        print(f"{row.network}\n{row.recipe}\n{row.seconds}")
    print(
        f"--seed {seed} ({row.target}): {row.kind}; compared {row.compared}; refused {row.refused}; found {row.found}"
    )
    sys.stdout.flush()
    return row


def _apart(seeds: list[int], args: argparse.Namespace) -> list[Row]:
    """Cases in a process of their own, again for what is left where one of them ends it."""
    path = args.rows or Path(os.devnull)
    found: list[Row] = []
    while seeds:
        command = [sys.executable, "-m", "experiments.random_networks", "--quiet", "--sparse", "--rows", str(path)]
        command += [
            "--steps",
            str(args.steps),
            "--stages",
            *args.stages,
            *(["--target", args.target] if args.target else []),
        ]
        try:
            done = subprocess.run([*command, "--seed", *map(str, seeds)], timeout=TIMEOUT * len(seeds), check=False)
            why = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not done after {TIMEOUT * len(seeds)} s"
        found += [row for row in rows_in(path) if row.seed in seeds]
        seeds = [seed for seed in seeds if seed not in {row.seed for row in found}]
        if seeds:
            row = Row(seeds.pop(0), found=[why])
            keep(path, row)
            found.append(row)
    return found


if __name__ == "__main__":
    sys.exit(int(any(row.found for row in main())))
