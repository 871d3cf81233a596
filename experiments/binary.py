"""What a network gains from binary codes and weights, and what it loses: `python -m experiments.binary`.

One network on the digits of scikit-learn, its inner layers with 8 bits, with ternary weights and binary codes, and
binary. Each is trained in float, quantized, trained on and converted; its C is compiled for this machine and, where
compiler and emulator are installed, for two microcontrollers.
"""

import argparse
import dataclasses
import shutil
import tempfile
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import qjax
from experiments.data import Digits, digits
from experiments.firmware.boards import BOARDS
from experiments.firmware.build import Measured, run
from experiments.models.binary import KINDS, BinaryCNN
from experiments.training import Schedule, accuracy, one_hot, scores, train
from qjax.contrib.lab.machine import made_on

TARGET = "tflite_micro"
MICROCONTROLLERS = ("mps2-an386", "mps3-an547")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of network. differ: outputs of the graph that are not those of the quantized model, of `compared`.

    microseconds: of one image in this process. firmware: by `MICROCONTROLLERS`; none where the tools are not installed.
    """

    kind: str
    float_accuracy: float
    accuracy: float
    differ: int
    compared: int
    microseconds: float
    firmware: list[Measured]


def measured(kind: str, data: Digits, epochs: int, width: int, seed: int = 0) -> Row:
    """Trains, converts and runs one kind of network."""
    model = BinaryCNN(kind, width, rngs=nnx.Rngs(seed))
    targets = one_hot(data.train_labels)
    train(model, data.train_images, targets, Schedule(epochs), seed=seed, title=f"{kind}: float")
    sample = data.train_images[:64]
    floats = accuracy(scores(model, data.test_images), data.test_labels)
    qmodel = qjax.quantize(model, qjax.Recipe(target=TARGET), sample)
    qjax.calibrate(qmodel, [sample])
    schedule = Schedule(max(epochs // 3, 1), learning_rate=3e-4)
    train(qmodel, data.train_images, targets, schedule, seed=seed, title=f"{kind}: quantized")
    graph = qjax.convert(qmodel, sample)
    wanted = np.asarray(qjax.exact(qmodel, sample)(qmodel, data.test_images))
    shipped = np.asarray(graph(data.test_images))
    return Row(
        kind,
        floats,
        accuracy(shipped, data.test_labels),
        int(np.sum(shipped != wanted)),
        shipped.size,
        _microseconds(graph, data.test_images[:1]),
        _firmware(graph),
    )


def _microseconds(graph: Any, image: np.ndarray) -> float:
    """Of one call of the emitted C, the best of many."""
    native, codes = graph.native(1), np.asarray(graph.quantize(image))
    assert np.array_equal(native.run(codes), np.asarray(graph.run(codes)))
    return 1e6 * min(timeit.repeat(lambda: native.run(codes), number=20, repeat=50)) / 20


def _firmware(graph: Any) -> list[Measured]:
    if shutil.which("arm-none-eabi-gcc") is None or shutil.which("qemu-system-arm") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        return [run(graph, BOARDS[name], Path(folder) / name, simd="cortex_m") for name in MICROCONTROLLERS]


def table(rows: Sequence[Row]) -> str:
    """One line a kind."""
    heads = ["inner layers", "float, %", "integers, %", "differ from training", "microseconds"]
    heads += [f"{BOARDS[name].processor}: instructions" for name in MICROCONTROLLERS] + ["flash, bytes"]
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for row in rows:
        board = ["not installed"] * (len(MICROCONTROLLERS) + 1)
        if row.firmware:
            board = [*(f"{each.instructions:,}" for each in row.firmware), f"{row.firmware[0].flash:,}"]
        shares = f"{100 * row.float_accuracy:.1f}", f"{100 * row.accuracy:.1f}"
        lines.append([row.kind, *shares, f"{row.differ} of {row.compared:,}", f"{row.microseconds:.0f}", *board])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.binary", description=__doc__)
    parser.add_argument("--epochs", type=int, default=30, help="of the float training (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table onto this page")
    arguments = parser.parse_args()
    data = digits()
    rows = [measured(kind, data, arguments.epochs, arguments.width) for kind in arguments.kinds]
    text = table(rows)
    print(text, end="")
    if arguments.page:
        before, start, rest = arguments.page.read_text().partition("<!-- binary -->\n")
        _, end, after = rest.partition("<!-- end binary -->")
        if not (start and end):
            raise ValueError(f"{arguments.page}: expected the marks <!-- binary --> and <!-- end binary -->.")
        arguments.page.write_text(f"{before}{start}{text}\n{made_on()}\n{end}{after}")
    return int(any(row.differ or any(each.differ for each in row.firmware) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
