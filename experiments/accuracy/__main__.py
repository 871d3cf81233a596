"""Accuracy of float, post-training and trained quantization on real networks: `python -m experiments.accuracy`.

Each network is trained once in float per seed and kept. Every method starts from those weights, with the same data,
order of batches, epochs and batch size; the last epoch counts, and nothing is selected on the test images. The first
and the last layer have 8 bits. `--rows FILE` keeps every row, and a later run makes only what is missing. `--quick`
takes the two small networks for digits.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from orbax import checkpoint

import qjax
from experiments.accuracy import page
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.methods import METHODS, OURS, SETTINGS, UNTRAINED, Start
from experiments.accuracy.networks import TASKS, Task
from experiments.accuracy.row import Row, keep, read
from experiments.accuracy.taps import depthwise_by_taps
from experiments.accuracy.train import accuracy, fit, scores, steps_of
from qjax.contrib.lab.machine import made_on

FLOAT_EPOCHS = {"fashion": 10, "digits": 60}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--networks", nargs="+", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    made.add_argument("--quick", action="store_true", help="the networks for digits")
    made.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="NAME", help=", ".join(METHODS))
    made.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="WnAm")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, help="epochs of the quantized training: 10, or 60 for digits")
    made.add_argument("--validate", action="store_true", help="evaluate on held-out training images")
    made.add_argument("--folder", type=Path, default=Path("out/accuracy"), help="folder of the float models")
    made.add_argument("--rows", type=Path, metavar="FILE", help="store every row there, and compute only missing ones")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the tables to this file, as Markdown")
    made.add_argument("--known", action="store_true", help="compute no row, only show those of --rows")
    made.add_argument("--verbose", action="store_true", help="also print the traceback of every failure")
    return made


def float_model(name: str, task: Task, data: Data, seed: int, folder: Path) -> Any:
    """The float model of a seed, from the folder if it is there."""
    epochs = FLOAT_EPOCHS[task.data]
    path = (folder / f"{name.replace(' ', '_')}-{seed}-{epochs}-{len(data.train_images)}").absolute()
    model = task.make(rngs=nnx.Rngs(seed))
    with checkpoint.StandardCheckpointer() as keeper:
        if path.exists():
            nnx.update(model, keeper.restore(path, nnx.state(model)))
        else:
            schedule = optax.cosine_decay_schedule(task.rate, steps_of(data.train_images, epochs))
            with depthwise_by_taps(model):
                fit(model, data.train_images, data.train_labels, optax.adam(schedule), epochs=epochs, seed=seed)
            keeper.save(path, nnx.state(model))
    model.eval()
    return model


def judge(row: Row, start: Start, data: Data) -> None:
    """Run the method, and judge the model and its graph by the test images."""
    outcome = METHODS[row.method](start)
    given = scores(outcome.model, data.test_images) if outcome.run is None else outcome.run(data.test_images)
    row.accuracy, row.loss = accuracy(given, data.test_labels), outcome.loss
    if row.method in OURS:
        graph = qjax.convert(outcome.model, data.test_images[:1])
        parts = [np.asarray(graph(data.test_images[i : i + 500])) for i in range(0, len(data.test_images), 500)]
        shipped = np.concatenate(parts)
        row.graph = accuracy(shipped, data.test_labels)
        row.decisions = int((shipped.argmax(-1) != given.argmax(-1)).sum())


def show(row: Row) -> None:
    """One line."""
    numbers = "" if row.accuracy is None else f"{row.accuracy:6.2f} %"
    if row.graph is not None:
        numbers += f"   graph {row.graph:6.2f} %, {row.decisions} decisions differ"
    print(f"{row.network:14} {row.setting:6} seed {row.seed} {row.method:26}", numbers, row.error, flush=True)


def rows_of(name: str, args: argparse.Namespace, known: dict[Any, Row]) -> list[Row]:
    """Every row of a network."""
    task = TASKS[name]
    data = DATA[task.data]()
    data = data.validation() if args.validate else data
    epochs = args.epochs or FLOAT_EPOCHS[task.data]
    found: list[Row] = []
    for seed in range(args.seeds):
        model = float_model(name, task, data, seed, args.folder)
        base = Row(name, "float", "float", seed, 0, accuracy(scores(model, data.test_images), data.test_labels))
        base.float_accuracy = base.accuracy
        base.made = made_on()
        show(base)
        found.append(base)
        for method in args.methods or METHODS:
            settings = ["float"] if method == "float, trained on" else args.settings
            for setting in settings:
                row = Row(name, method, setting, seed, 0 if method in UNTRAINED else epochs)
                old = known.get(row.key)
                if old is None or old.error:
                    begin = time.perf_counter()
                    row.float_accuracy = base.accuracy
                    try:
                        judge(row, Start(model, data, SETTINGS.get(setting), epochs, seed + 1000, task.rate), data)
                    except Exception as error:  # the table says which method fails, and why
                        row.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                        if args.verbose:
                            traceback.print_exc()
                    row.seconds, row.made = time.perf_counter() - begin, made_on()
                    keep(args.rows, row)
                    jax.clear_caches()
                    old = row
                show(old)
                found.append(old)
    return found


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    known = read(args.rows)
    if args.known:
        found = list(known.values())
    else:
        names = args.networks or [name for name, task in TASKS.items() if task.quick or not args.quick]
        if args.quick:
            names = [name for name in names if TASKS[name].quick]
        found = [row for name in names for row in rows_of(name, args, known)]
    print(page.text(found))
    if args.page is not None:
        page.write(args.page, found)
    return found


if __name__ == "__main__":
    sys.exit(int(any(row.error for row in main())))
