"""Train, quantize, convert, verify and ship a small residual network: `python -m experiments.demo`.

Float training, then per configuration: post-training quantization, quantization-aware training from the float
weights, conversion to integers, and a comparison of the training forward with the integers on the whole test split.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import qjax
from experiments import plots
from experiments.data import Digits, digits
from experiments.models import CNN, ResNet
from experiments.training import History, Schedule, accuracy, one_hot, parameter_bytes, scores, train
from qjax.contrib.lab.machine import machine
from qjax.export.artifact import artifact_size

CONFIGURATIONS = {"W8A8": 8, "W4A4": 4, "W2A2": 2}
EXACT = "W8A8"
"""The configuration whose last epoch trains through the integers."""
EXACT_BATCH = 128


def recipe_of(bits: int) -> qjax.Recipe:
    """Weights and activations of that many bits; the first and the last layer keep 8, as is usual."""
    if bits == 8:
        return qjax.Recipe()
    weights = qjax.QSpec(bits=bits, axis=-1)
    return qjax.Recipe(weights=weights, activations=qjax.QSpec(bits=bits, symmetric=False), first_last_bits=8)


@dataclasses.dataclass
class Row:
    """What the table says about one configuration. Counts are over the whole test split."""

    name: str
    float_accuracy: float
    ptq_accuracy: float
    qat_accuracy: float
    graph_accuracy: float
    codes_compared: int
    codes_that_differ: int
    outputs_compared: int
    fake_quant_outputs_that_differ: int
    exact_outputs_that_differ: int
    predictions_that_differ: int
    float_bytes: int
    constant_bytes: int
    file_bytes: int
    seconds: float


@dataclasses.dataclass
class ExactSteps:
    """Compares the forward of each training step with the graph converted from the same parameters."""

    sample: Any
    steps: int = 0
    outputs: int = 0
    different: int = 0

    def __call__(self, model: qjax.QuantizedModel, images: Any, class_scores: Any) -> None:
        shipped = np.asarray(qjax.convert(model, self.sample)(images))
        self.steps += 1
        self.outputs += shipped.size
        self.different += int(np.sum(shipped != np.asarray(class_scores)))


def run_configuration(
    name: str, bits: int, model: ResNet | CNN, data: Digits, args: argparse.Namespace, console: Console
) -> tuple[Row, qjax.QuantizedModel, History, ExactSteps | None]:
    """Everything about one configuration; saves `NAME.qjax`."""
    start = time.perf_counter()
    images, test, labels = data.train_images, data.test_images, data.test_labels
    sample = images[:16]

    # Post-training quantization: scales from the training images, weights as they are.
    qmodel = qjax.quantize(model, recipe_of(bits), sample)
    qjax.calibrate(qmodel, [images[i : i + 256] for i in range(0, 1024, 256)])
    qmodel.eval()
    ptq = accuracy(scores(qmodel, test), labels)
    console.print(f"{name}: after post-training quantization {ptq:.3f}")

    # Quantization-aware training: the same loop that trained the float model.
    targets, check = one_hot(data.train_labels), None
    history = train(
        qmodel,
        images,
        targets,
        Schedule(args.epochs, learning_rate=2e-3),
        seed=args.seed + 1,
        test=(test, labels),
        title=f"{name}: quantization-aware training",
    )
    forward = qjax.exact(qmodel, sample)
    if name == EXACT:
        check = ExactSteps(sample)
        last = train(
            qmodel,
            images,
            targets,
            Schedule(1, learning_rate=1e-4, batch_size=args.exact_batch),
            seed=args.seed + 2,
            forward=forward,
            on_step=check,
            test=(test, labels),
            title=f"{name}: the last epoch, through the integers",
        )
        history.loss += last.loss
        history.test_accuracy += last.test_accuracy
    trained = scores(qmodel, test)
    console.print(f"{name}: after training {accuracy(trained, labels):.3f}")

    # Integers: convert, ship, load what was shipped, and compare.
    path = args.out / ("model.qjax" if name == EXACT else f"{name}.qjax")
    qjax.convert(qmodel, sample).save(path)
    graph = qjax.load(path)
    report = qjax.verify(graph, qmodel, [test])
    shipped = np.asarray(graph(test))
    row = Row(
        name=name,
        float_accuracy=accuracy(scores(model, test), labels),
        ptq_accuracy=ptq,
        qat_accuracy=accuracy(trained, labels),
        graph_accuracy=accuracy(shipped, labels),
        codes_compared=report.compared,
        codes_that_differ=report.local,
        outputs_compared=shipped.size,
        fake_quant_outputs_that_differ=report.output_mismatches,
        exact_outputs_that_differ=int(np.sum(np.asarray(scores(qmodel, test, forward)) != shipped)),
        predictions_that_differ=report.predictions,
        float_bytes=parameter_bytes(model),
        constant_bytes=artifact_size(graph.ir),
        file_bytes=path.stat().st_size,
        seconds=round(time.perf_counter() - start, 1),
    )
    console.print(f"{name}: {report.examples} images verified, {row.seconds:.0f} s")
    return row, qmodel, history, check


def table_of(rows: list[Row], network: str, images: int) -> Table:
    """One column per configuration."""
    table = Table(
        title=f"{network} on scikit-learn's digits, {images} test images",
        caption="against the integer graph; * where a node's input codes agree",
    )
    table.add_column("")
    for row in rows:
        table.add_column(row.name, justify="right")
    lines = {
        "accuracy, float32": lambda r: f"{r.float_accuracy:.3f}",
        "accuracy, post-training": lambda r: f"{r.ptq_accuracy:.3f}",
        "accuracy, trained quantized": lambda r: f"{r.qat_accuracy:.3f}",
        "accuracy, integer graph": lambda r: f"{r.graph_accuracy:.3f}",
        "fake-quant: codes that differ*": lambda r: f"{r.codes_that_differ} of {r.codes_compared:,}",
        "fake-quant: outputs that differ": lambda r: f"{r.fake_quant_outputs_that_differ} of {r.outputs_compared:,}",
        "exact: outputs that differ": lambda r: f"{r.exact_outputs_that_differ} of {r.outputs_compared:,}",
        "predictions that differ": lambda r: f"{r.predictions_that_differ}",
        "bytes, float32 parameters": lambda r: f"{r.float_bytes:,}",
        "bytes, constants that ship": lambda r: f"{r.constant_bytes:,}",
        "bytes, saved file": lambda r: f"{r.file_bytes:,}",
    }
    for title, text in lines.items():
        table.add_row(title, *(text(row) for row in rows))
    return table


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the float and of each quantized training")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the images")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for model.qjax, results, picture")
    parser.add_argument(
        "--quick", action="store_true", help="3 epochs of a plain CNN, W8A8 and W4A4 only: does it run?"
    )
    args = parser.parse_args(argv)
    args.exact_batch = EXACT_BATCH
    configurations = dict(CONFIGURATIONS)
    if args.quick:
        args.epochs, args.exact_batch = min(args.epochs, 3), 5 * EXACT_BATCH
        del configurations["W2A2"]
    args.out.mkdir(parents=True, exist_ok=True)
    console, start, data = Console(), time.perf_counter(), digits()

    model = (CNN if args.quick else ResNet)(rngs=nnx.Rngs(args.seed))
    histories = {
        "float": train(
            model,
            data.train_images,
            one_hot(data.train_labels),
            Schedule(args.epochs),
            seed=args.seed,
            test=(data.test_images, data.test_labels),
            title="float training",
        )
    }
    console.print(f"float: {histories['float'].test_accuracy[-1]:.3f}, {time.perf_counter() - start:.0f} s")

    rows: list[Row] = []
    models: dict[str, qjax.QuantizedModel] = {}
    exact_steps = ExactSteps(None)
    for name, bits in configurations.items():
        row, models[name], histories[name], check = run_configuration(name, bits, model, data, args, console)
        rows.append(row)
        exact_steps = check or exact_steps

    console.print(table_of(rows, type(model).__name__, len(data.test_labels)))
    console.print(
        f"{EXACT}'s last epoch trained through the integers: at each of its {exact_steps.steps} steps the forward was "
        f"compared with the graph converted there; {exact_steps.different} of {exact_steps.outputs} outputs differ."
    )
    plots.demo_picture(args.out / "demo.png", histories, "W4A4", models["W4A4"], data.test_images)
    results = {
        "table": [dataclasses.asdict(row) for row in rows],
        "exact_training": {k: v for k, v in dataclasses.asdict(exact_steps).items() if k != "sample"},
        "seed": args.seed,
        "epochs": args.epochs,
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(),
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(
        f"{results['seconds']:.0f} s; wrote {', '.join(sorted(p.name for p in args.out.iterdir()))} to {args.out}"
    )
    return rows


if __name__ == "__main__":
    qjax.cache_compilations("out/compiled")  # the second demo compiles less
    main()
