"""The networks of MLPerf Tiny as firmware for Cortex-M, run under QEMU: `python -m experiments.firmware`.

Weights are random: sizes and instructions do not depend on them. Every board must give the codes of qjax's interpreter.
`--graph FILE` runs a graph of your own. Instructions are counted by the emulator; they are no cycles.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import qjax
from experiments.firmware.boards import BOARDS
from experiments.firmware.build import Measured, run
from experiments.models.autoencoder import DenseAutoencoder
from experiments.models.ds_cnn import DSCNN
from experiments.models.mobilenet import MobileNetV1
from experiments.models.resnet import CifarResNet

Made = tuple[nnx.Module, jax.Array]


def made(model: Callable[[nnx.Rngs], nnx.Module], *shape: int) -> Callable[[], Made]:
    """A network with random weights, and a batch of two normal inputs."""
    return lambda: (model(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, *shape)))


NETWORKS: dict[str, Callable[[], Made]] = {
    "autoencoder": made(lambda rngs: DenseAutoencoder(rngs=rngs), 640),
    "DS-CNN": made(lambda rngs: DSCNN(rngs=rngs), 49, 10),
    "ResNet-8": made(lambda rngs: CifarResNet(1, rngs=rngs), 32, 32, 3),
    "MobileNet V1 0.25": made(lambda rngs: MobileNetV1(0.25, classes=2, rngs=rngs), 96, 96, 3),
}
"""The networks of MLPerf Tiny at their published sizes."""


def converted(network: str, target: str) -> Any:
    """A network quantized to 8 bits, calibrated on its sample and converted."""
    model, x = NETWORKS[network]()
    model.eval()
    qmodel = qjax.quantize(model, qjax.Recipe(target=target), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    return qjax.convert(qmodel, x)


def table(rows: Sequence[tuple[str, Measured]]) -> str:
    """One line a network and board."""
    heads = ("network", "board", "codes that differ", "flash, bytes", "arena, bytes", "stack, bytes", "instructions")
    lines = [heads, ["---", "---", *["--:"] * (len(heads) - 2)]]
    for name, m in rows:
        numbers = (m.flash, m.arena, m.stack, m.instructions)
        codes = f"{m.differ:,} of {m.codes:,}"
        lines.append([name, f"{m.board} ({m.processor})", codes, *(f"{number:,}" for number in numbers)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def onto_page(path: Path, text: str) -> None:
    """Put the table and the tools' versions between the marks of a page."""
    before, start, rest = path.read_text().partition("<!-- firmware -->\n")
    _, end, after = rest.partition("<!-- end firmware -->")
    if not (start and end):
        raise ValueError(f"{path}: expected the marks <!-- firmware --> and <!-- end firmware -->.")
    tools = [
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        for tool in ("arm-none-eabi-gcc", "qemu-system-arm")
    ]
    path.write_text(f"{before}{start}{text}\nVersions: {'; '.join(tools)}.\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.firmware", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--boards", nargs="+", choices=BOARDS, default=list(BOARDS), metavar="BOARD")
    parser.add_argument("--target", default="tflite_micro", help="whose rounding (%(default)s)")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="a .qjax file, instead of the networks")
    parser.add_argument("--vectors", type=int, default=4, help="inputs per network (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep sources and firmware there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table onto this page")
    arguments = parser.parse_args()
    rows: list[tuple[str, Measured]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        names = [arguments.graph.stem] if arguments.graph else arguments.networks
        for name in names:
            graph = qjax.load(arguments.graph) if arguments.graph else converted(name, arguments.target)
            for board in arguments.boards:
                place = folder / f"{name.replace(' ', '-')}-{board}"
                rows.append((name, run(graph, BOARDS[board], place, vectors=arguments.vectors)))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows), end="")
    if arguments.page:
        onto_page(arguments.page, table(rows))
    return int(any(measured.differ for _, measured in rows))


if __name__ == "__main__":
    sys.exit(main())
