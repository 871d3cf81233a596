"""One model under several runtimes: where they part, and why. `python -m experiments.compare_targets`.

Trains a small residual network on scikit-learn's digits, quantizes it after training, converts it once per target, and
compares pairs of the graphs on the test images with `qjax.compare`.
"""

import argparse
import itertools
import time

import numpy as np
from flax import nnx
from rich.console import Console

import qjax
from experiments.data import digits
from experiments.machine import machine
from experiments.models import ResNet
from experiments.training import Schedule, one_hot, train
from qjax.summary import table

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


def main(argv: list[str] | None = None) -> dict[tuple[str, str], object]:
    parser = argparse.ArgumentParser(prog="python -m experiments.compare_targets", description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="names of targets, at least two")
    parser.add_argument("--images", type=int, default=500, help="how many of the test images")
    args = parser.parse_args(argv)
    console, start = Console(width=160, highlight=False, soft_wrap=True), time.perf_counter()
    qmodel, sample, images = quantized(args.epochs, args.seed)
    graphs = {name: qjax.convert(qmodel, sample, target=name) for name in args.targets}
    rows: list[tuple[object, ...]] = []
    reports: dict[tuple[str, str], object] = {}
    for left, right in itertools.combinations(args.targets, 2):
        report = qjax.compare(graphs[left], graphs[right], images[: args.images])
        reports[left, right] = report
        output, first = report.outputs[0].end_to_end, report.first
        rows.append(
            (
                left,
                right,
                "none" if first is None else first.name,
                len(report.diverging),
                sum(node.own.count for node in report.nodes),
                output.count,
                report.predictions,
            )
        )
        if (left, right) in SHOWN:
            console.print(f"{report}\n", markup=False)
    header = (
        "a",
        "b",
        "first divergence",
        "nodes",
        "codes that part",
        f"of {output.compared:,} outputs",
        "predictions",
    )
    console.print(table(header, rows), markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s on {machine()}", markup=False)
    return reports


if __name__ == "__main__":
    main()
