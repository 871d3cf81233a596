"""Accuracy against logic where training learns the bits of every weight: `python -m experiments.learned_bits`.

A network of three dense layers is trained in float. Then its bits are learned while the price of logic grows, and
every circuit on the way is counted by alkaid. HGQ2 does the same from the same weights: `make rivals`, and
`PYTHONPATH=.rivals` in front. `--rows FILE` keeps every training, and a later run makes only those that are missing.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from experiments.learned_bits import hgq, ours, page
from experiments.learned_bits.row import Row, keep, read
from experiments.learned_bits.tasks import TASKS

TOOLS: dict[str, Callable[[str, int, int], list[Row]]] = {
    "qjax": ours.search,
    "qjax, per weight": functools.partial(ours.search, tool="qjax, per weight", per="weight"),
    "qjax, per tensor": functools.partial(ours.search, tool="qjax, per tensor", per="tensor"),
    "HGQ2": hgq.search,
    "HGQ2, rate 0.01": functools.partial(hgq.search, tool="HGQ2, rate 0.01", rate=1e-2),
}
"""Name -> the search, called with the task, the seed, and how many epochs lie between two circuits."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.learned_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="NAME")
    made.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), metavar="NAME")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--circuits", type=int, default=10, help="how many of each training")
    made.add_argument("--rows", type=Path, metavar="FILE", help="keep every training there; make only what is missing")
    made.add_argument("--known", action="store_true", help="make no row: only show those of --rows")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the tables there, as Markdown")
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw the circuits there")
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    found = read(args.rows)
    known = {row.run for row in found}
    for name in args.tasks:
        for seed in range(args.seeds):
            for tool in args.tools:
                if args.known or (name, tool, seed) in known:
                    continue
                try:
                    rows = TOOLS[tool](name, seed, max(1, TASKS[name].epochs // args.circuits))
                except ImportError as error:
                    print(f"{name}, {tool}: {error}. See --help.", flush=True)
                    continue
                keep(args.rows, rows)
                found += rows
                print(f"{name}, {tool}, seed {seed}: {rows[-1].seconds:.0f} s", flush=True)
    print(page.text(found))
    if args.page is not None:
        page.write(args.page, found)
    if args.picture is not None:
        page.draw(args.picture, found)
    return found


if __name__ == "__main__":
    main()
