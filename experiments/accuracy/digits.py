"""Accuracy on scikit-learn's digits, several seeds: float, post-training and trained quantization, W8A8 to W2A2.

`python -m experiments.accuracy.digits`. Every layer has the bits of its configuration, the first and the last
included, and so have the images; the class scores leave at 8 bits. One split for all runs; the last epoch
counts; nothing is selected on the test images (settings were tried with --validate). "float, trained on" is a control:
the float model after the epochs and the targets that quantization-aware training gets, without any quantization.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import qjax
from experiments.data import Digits, digits
from experiments.models import CNN, MLP
from experiments.training import Schedule, accuracy, one_hot, scores, train
from qjax.contrib.lab.machine import machine

MODELS: dict[str, Callable[..., Any]] = {"MLP": MLP, "CNN": CNN}
BITS = (8, 4, 3, 2)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How both trainings go."""

    float_schedule: Schedule
    quantized_schedule: Schedule
    teacher: float
    """The part of the targets that the float model's probabilities are, rather than the labels."""


SETTINGS = Settings(Schedule(100), Schedule(100), teacher=1.0)


def recipe_of(bits: int) -> qjax.Recipe:
    """Weights and activations of that many bits everywhere."""
    return qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1), activations=qjax.QSpec(bits=bits, symmetric=False))


def run_seed(
    make: Callable[..., Any], seed: int, data: Digits, bits: tuple[int, ...], settings: Settings
) -> dict[str, float]:
    """Accuracies of one seed by the name of the run."""
    images, labels = data.train_images, one_hot(data.train_labels)

    def judge(model: Any) -> float:
        return accuracy(scores(model, data.test_images), data.test_labels)

    model = make(rngs=nnx.Rngs(seed))
    train(model, images, labels, settings.float_schedule, seed=seed)
    found = {"float": judge(model)}
    probabilities = np.asarray(jax.nn.softmax(scores(model, images)))
    targets = settings.teacher * probabilities + (1 - settings.teacher) * labels

    control = nnx.clone(model)
    train(control, images, targets, settings.quantized_schedule, seed=seed + 1000)
    found["float, trained on"] = judge(control)
    for b in bits:
        qmodel = qjax.quantize(model, recipe_of(b), images)
        qmodel.eval()
        found[f"W{b}A{b} PTQ"] = judge(qmodel)
        train(qmodel, images, targets, settings.quantized_schedule, seed=seed + 1000)
        found[f"W{b}A{b} QAT"] = judge(qmodel)
    return found


def table_of(results: dict[str, dict[str, list[float]]]) -> Table:
    """Mean accuracies in percent, and mean and standard deviation of the paired difference to float, in points."""
    table = Table(title="Digits, mean over seeds")
    for column in ("model", "run", "accuracy", "- float", "std", "per seed"):
        table.add_column(column, justify="left" if column in ("model", "run") else "right")
    for model, runs in results.items():
        base = np.asarray(runs["float"])
        for run, values in runs.items():
            difference = 100 * (np.asarray(values) - base)
            spread = f"{difference.std(ddof=1):.2f}" if len(base) > 1 else ""
            table.add_row(
                model,
                run,
                f"{100 * np.mean(values):.2f}",
                f"{difference.mean():+.2f}",
                spread,
                " ".join(f"{d:+.1f}" for d in difference),
            )
        table.add_section()
    return table


def main(argv: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(prog="python -m experiments.accuracy.digits", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=list(BITS))
    parser.add_argument("--epochs", type=int, default=None, help="instead of the settings', for both trainings")
    parser.add_argument("--validate", action="store_true", help="judge by training images held out, not the test split")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"))
    args = parser.parse_args(argv)
    settings, data = SETTINGS, digits()
    if args.epochs is not None:
        float_, quantized = (
            dataclasses.replace(s, epochs=args.epochs) for s in (settings.float_schedule, settings.quantized_schedule)
        )
        settings = dataclasses.replace(settings, float_schedule=float_, quantized_schedule=quantized)
    if args.validate:
        data = data.validation()
    console, start = Console(), time.perf_counter()
    results: dict[str, dict[str, list[float]]] = {}
    for name in args.models:
        for seed in range(args.seeds):
            found = run_seed(MODELS[name], seed, data, tuple(args.bits), settings)
            for run, value in found.items():
                results.setdefault(name, {}).setdefault(run, []).append(value)
            console.print(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s")
    console.print(table_of(results))
    args.out.mkdir(parents=True, exist_ok=True)
    document = {
        "judged_by": "validation" if args.validate else "test",
        "accuracy": results,
        "settings": dataclasses.asdict(settings),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(),
    }
    (args.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
