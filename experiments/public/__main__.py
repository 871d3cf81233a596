"""Converts unchanged models of other projects to integers: `python -m experiments.public`.

Every model is quantized, calibrated and converted with the inputs and outputs that it has. The integer graph runs at
two batch sizes and is compared with `qjax.exact` and, node by node, with the fake-quantized model. Weights and data
are random and sizes are small, because the question is which programs convert, and with which bits.

The Flax models of transformers need the package: `pip install "transformers<5"`. Flax's examples need a checkout of
github.com/google/flax: `--examples FOLDER/examples`. The language models of google-tunix need
`pip install --no-deps google-tunix jaxtyping wadler-lindig einops`. Those of bonsai need a checkout of
github.com/jax-ml/bonsai: `--bonsai FOLDER`; those of Scenic one of github.com/google-research/scenic: `--scenic
FOLDER`. MaxText and FlaxDiff need `pip install maxtext flaxdiff`. The page lists the collections that are missing.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments.public import bonsai, examples, flaxdiff, hub, keras_models, maxtext, page, scenic, tunix
from experiments.public.models import Source
from experiments.public.row import Row, run

TIMEOUT = 3600


COLLECTIONS = {
    "transformers": "transformers",
    "examples": "Flax's examples",
    "tunix": "google-tunix",
    "bonsai": "jax-ml/bonsai",
    "keras": "Keras 3",
    "maxtext": "MaxText",
    "flaxdiff": "FlaxDiff",
    "scenic": "google-research/scenic",
}
"""Title of each collection by its name on the command line."""

DEFAULT = ("transformers", "examples", "tunix")
"""What docs/public-models.md shows; the others are on other pages."""

_INSTALLED = {
    "transformers": hub.source,
    "tunix": tunix.source,
    "keras": keras_models.source,
    "maxtext": maxtext.source,
    "flaxdiff": flaxdiff.source,
}


_CHECKOUTS = dict(zip(page.CHECKOUTS, (examples.source, bonsai.source, scenic.source), strict=True))


def sources(folders: Mapping[str, Path | None], asked: Sequence[str] = DEFAULT) -> tuple[dict[str, Source], list[str]]:
    """The collections that are there by title, and a line for each that is not; folders: of the checkouts by name."""
    found: dict[str, Source] = {}
    missing: list[str] = []
    for name in asked:
        title = COLLECTIONS[name]
        if name in _CHECKOUTS and folders.get(name) is None:
            missing.append(f"{title}: no --{name} FOLDER")
            continue
        try:
            if (given := folders.get(name)) is not None:
                found[title] = _CHECKOUTS[name](given)
            else:
                found[title] = _INSTALLED[name]()
        except ModuleNotFoundError as error:
            missing.append(f"{title}: {error}")
    return found, missing


def run_apart(name: str, options: list[str]) -> Row:
    """`run` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "experiments.public", "--only", name, "--row", str(path), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            return Row(name, error=f"not done after {TIMEOUT} s")
        if not path.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return Row(name, error=f"the process ended with {done.returncode}: {last}")
        return Row(**json.loads(path.read_text()))


def row_file(name: str, folder: Path) -> Path:
    """Where `--rows` keeps a model's row."""
    return folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"


def known(name: str, folder: Path | None) -> Row | None:
    """The row of an earlier run, if it is there and did not fail."""
    if folder is None or not row_file(name, folder).exists():
        return None
    row = Row(**json.loads(row_file(name, folder).read_text()))
    return None if row.error else row


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m experiments.public", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", metavar="NAME", help="only these models; `--list` shows the names")
    made.add_argument("--list", action="store_true", help="list the models' names")
    made.add_argument("--collections", nargs="+", choices=COLLECTIONS, help=f"only these; else {', '.join(DEFAULT)}")
    made.add_argument("--examples", type=Path, metavar="FOLDER", help="the examples in a checkout of google/flax")
    made.add_argument("--bonsai", type=Path, metavar="FOLDER", help="a checkout of jax-ml/bonsai")
    made.add_argument("--scenic", type=Path, metavar="FOLDER", help="a checkout of google-research/scenic")
    made.add_argument("--no-exact", action="store_true", help="do not compile `qjax.exact`, which takes longest")
    made.add_argument("--target", default="nearest_even", help="the target whose rounding the integers follow")
    made.add_argument("--rows", type=Path, metavar="FOLDER", help="store every row there, and repeat only failed ones")
    made.add_argument("--page", type=Path, help="write the table to this file, as Markdown")
    made.add_argument("--verbose", action="store_true", help="also print every warning, and failures in full")
    made.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    command = parser()
    args = command.parse_args(argv)
    folders: dict[str, Path | None] = {name: getattr(args, name) for name in _CHECKOUTS}
    found, missing = sources(folders, args.collections or DEFAULT)
    every = {name: build for source in found.values() for name, build in source.items()}
    if args.list:
        print("\n".join(every))
        return []
    names = args.only or list(every)
    for name in names:
        if name not in every:
            command.error(f"unknown model {name!r}. " + " ".join(missing))
    if args.row is not None:
        (name,) = names
        row = run(name, every[name], exact=not args.no_exact, target=args.target)
        args.row.write_text(json.dumps(dataclasses.asdict(row)))
        return [row]
    options = ["--target", args.target]
    options += ["--collections", *args.collections] if args.collections else []
    options += ["--no-exact"] if args.no_exact else []
    for name, folder in folders.items():
        options += [f"--{name}", str(folder)] if folder is not None else []
    console, rows = Console(width=200, highlight=False, soft_wrap=True), {}
    for name in names:
        row = known(name, args.rows) or run_apart(name, options)
        rows[name] = row
        if args.rows is not None:
            args.rows.mkdir(parents=True, exist_ok=True)
            row_file(name, args.rows).write_text(json.dumps(dataclasses.asdict(row)))
        outcome = row.error or f"ok, cosine {row.cosine:.4f}, {len(row.warnings)} warnings"
        console.print(f"{name}: {outcome}, {row.seconds:.0f} s", markup=False)
        for text in (*row.warnings, row.message) if args.verbose else ():
            console.print(text + "\n", markup=False)
        if args.page is not None:
            groups = {title: [rows[name] for name in source if name in rows] for title, source in found.items()}
            left = [name for name in every if name not in rows]
            written = args.page.with_suffix(".new")
            written.write_text(page.page(groups, [*missing, *left], args))
            os.replace(written, args.page)
    console.print(page.summary(list(rows.values())), markup=False)
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(int(any(row.error or row.exact_mismatches for row in main())))
