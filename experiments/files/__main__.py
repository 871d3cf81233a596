"""Reads quantized .tflite files of public repositories and compares qjax's codes with the runtimes'.

Put checkouts of repositories into a folder as OWNER/NAME, for example

    git clone https://github.com/mlcommons/tiny FOLDER/mlcommons/tiny

and run `python -m experiments.files FOLDER`. The page lists the repositories that it was made with.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.files import page
from experiments.files.row import Count, Row, described, run
from qjax.contrib.lab.machine import machine


def files_of(folder: Path) -> tuple[list[tuple[str, Path, Path]], dict[str, int]]:
    """(repository, its folder, file) for every different file of codes, and how many were left out, by reason."""
    found: list[tuple[str, Path, Path]] = []
    reasons: list[str] = ["for an Edge TPU", "float models", "duplicates", "that cannot be parsed"]
    left = dict.fromkeys(reasons, 0)
    seen: set[str] = set()
    for path in sorted(folder.glob("*/*/**/*.tflite")):
        root = folder.joinpath(*path.relative_to(folder).parts[:2])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        known = described(path)
        if known is None:
            left["that cannot be parsed"] += 1
        elif path.name.endswith("_edgetpu.tflite"):
            left["for an Edge TPU"] += 1
        elif not known[2]:
            left["float models"] += 1
        elif digest in seen:
            left["duplicates"] += 1
        else:
            found.append((root.relative_to(folder).as_posix(), root, path))
        seen.add(digest)
    return found, left


def commit_of(root: Path) -> str:
    """The commit of a checkout, shortened; nothing for a folder that is none."""
    if not (root / ".git").exists():
        return ""
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:10]


def row_of(text: str) -> Row:
    """A row as it was kept."""
    held = json.loads(text)
    for key in ("c", "onnx"):
        held[key] = Count(**held[key])
    return Row(**{**held, "counts": {name: Count(**count) for name, count in held["counts"].items()}})


def main(argv: list[str] | None = None) -> list[Row]:
    command = argparse.ArgumentParser(
        prog="python -m experiments.files", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("folder", type=Path, help="contains checkouts of repositories as OWNER/NAME")
    command.add_argument("--only", help="only files whose path contains this text")
    command.add_argument("--rows", type=Path, metavar="FOLDER", help="store rows there, and reuse stored rows")
    command.add_argument("--jobs", type=int, default=1, help="number of files in parallel")
    command.add_argument("--page", type=Path, help="write the table to this file, as Markdown")
    args = command.parse_args(argv)
    found, left = files_of(args.folder)
    chosen = [each for each in found if args.only is None or args.only in str(each[2])]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.rows or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def row(each: tuple[str, Path, Path]) -> Row:
            kept = folder / f"{hashlib.sha256(each[2].read_bytes()).hexdigest()[:20]}.json"
            made = row_of(kept.read_text()) if kept.exists() else run(*each)
            kept.write_text(json.dumps(dataclasses.asdict(made)))
            print(page.line(made), flush=True)
            return made

        rows = list(pool.map(row, chosen))
    if args.page is not None:
        written = args.page.with_suffix(".new")
        commits = {name: commit_of(root) for name, root, _ in chosen}
        written.write_text(page.page(rows, left, f"docs/{args.page.name}", machine(), commits))
        os.replace(written, args.page)
    print(page.summary(rows))
    return rows


if __name__ == "__main__":
    sys.exit(int(any(count.differ for row in main() for count in (*row.counts.values(), row.c, row.onnx))))
