"""One model under several runtimes: where they part, and why. `python -m experiments.compare_targets`.

Trains a small residual network on scikit-learn's digits, quantizes it after training, converts it once per target, and
compares pairs of the graphs on the test images with `qjax.compare`.
"""

import argparse
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import qjax
from experiments.data import digits
from experiments.models import ResNet
from experiments.training import Schedule, one_hot, train
from qjax.contrib.lab.machine import machine

TARGETS = (
    "nearest_even",
    "tflite_micro",
    "tflite_optimized_x86",
    "tflite_xnnpack",
    "onnxruntime",
    "torch_qnnpack",
    "torch_fbgemm",
    "tosa",
)
SHOWN = (("tflite_micro", "tflite_xnnpack"), ("tflite_xnnpack", "onnxruntime"))
"""The pairs whose whole report is printed."""


def quantized(epochs: int, seed: int) -> tuple[qjax.QuantizedModel, np.ndarray, np.ndarray]:
    """The network after post-training quantization, a sample for the conversion, and the test images."""
    data = digits()
    images = data.train_images
    model = ResNet(rngs=nnx.Rngs(seed))
    train(model, images, one_hot(data.train_labels), Schedule(epochs), seed=seed, title="float training")
    qmodel = qjax.quantize(model, qjax.Recipe(), images[:16])
    qjax.calibrate(qmodel, [images[i : i + 256] for i in range(0, 1024, 256)])
    qmodel.eval()
    return qmodel, images[:16], data.test_images


def kinds(report: Any) -> str:
    """The kinds of causes over all nodes, most frequent first."""
    found: Counter[str] = Counter()
    for node in report.nodes:
        for cause in node.causes:
            found[cause.kind] += cause.count
    return ", ".join(f"{n:,} {kind}" for kind, n in found.most_common())


def main(argv: list[str] | None = None) -> dict[tuple[str, str], Any]:
    parser = argparse.ArgumentParser(prog="python -m experiments.compare_targets", description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="names of targets, at least two")
    parser.add_argument("--images", type=int, default=500, help="how many of the test images")
    args = parser.parse_args(argv)
    console, start = Console(width=160, highlight=False, soft_wrap=True), time.perf_counter()
    qmodel, sample, images = quantized(args.epochs, args.seed)
    graphs = {name: qjax.convert(qmodel, sample, target=name) for name in args.targets}
    summary = Table(box=box.SIMPLE)
    for column in ("a", "b", "first divergence", "nodes", "codes", "outputs", "predictions", "causes"):
        summary.add_column(
            column, justify="right" if column in ("nodes", "codes", "outputs", "predictions") else "left"
        )
    reports: dict[tuple[str, str], Any] = {}
    for left, right in itertools.combinations(args.targets, 2):
        report = qjax.compare(graphs[left], graphs[right], images[: args.images])
        reports[left, right] = report
        output, first = report.outputs[0].end_to_end, report.first
        counts = len(report.diverging), sum(n.own.count for n in report.nodes), output.count, report.predictions
        begins = "none" if first is None else first.name
        summary.add_row(left, right, begins, *(f"{n:,}" for n in counts), kinds(report))
        if (left, right) in SHOWN:
            console.print(f"{report}\n", markup=False)
    console.print(summary)
    console.print(f"{time.perf_counter() - start:.0f} s on {machine()}", markup=False)
    return reports


if __name__ == "__main__":
    main()
