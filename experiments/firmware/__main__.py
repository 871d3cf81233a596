"""The networks of MLPerf Tiny as firmware for Cortex-M, run under QEMU: `python -m experiments.firmware`.

Weights are random: sizes and instructions do not depend on them. Every board must give the codes of qjax's interpreter,
in plain C, in C with vectors, and with `--cmsis-nn FOLDER` by the kernels of CMSIS-NN. `--graph FILE` runs a graph of
your own. Instructions are counted by the emulator; they are no cycles.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import qjax
from experiments.firmware import cmsis_nn
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


@dataclasses.dataclass(frozen=True)
class Row:
    """One network on one board. forms: of the code, by the heading of its columns."""

    network: str
    forms: dict[str, Measured]

    @property
    def place(self) -> list[str]:
        first = next(iter(self.forms.values()))
        return [self.network, f"{first.board} ({first.processor})"]


def tables(rows: Sequence[Row]) -> str:
    """Instructions and differing codes; then the memory. One line a network and board."""
    heads = list(dict.fromkeys(form for row in rows for form in row.forms))
    counts, memory = [["network", "board", "codes that differ"]], [["network", "board"]]
    counts[0] += [f"instructions, {form}" for form in heads]
    memory[0] += [f"flash, {form}" for form in heads] + ["arena"] + [f"stack, {form}" for form in heads]
    for row in rows:
        found = row.forms.values()
        codes = f"{sum(m.differ for m in found):,} of {sum(m.codes for m in found):,}"
        counts.append([*row.place, codes, *(f"{m.instructions:,}" for m in found)])
        # CMSIS-NN takes its memory for itself, and qjax's forms the same arena
        arena = next(iter(found)).arena
        numbers = [*(m.flash for m in found), arena, *(m.stack for m in found)]
        memory.append([*row.place, *(f"{number:,}" for number in numbers)])
    return f"{_markdown(counts)}\n{_markdown(memory)}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---", "---", *["--:"] * (len(head) - 2)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body))


def onto_page(path: Path, text: str, kernels: Path | None = None) -> None:
    """Put the tables and the tools' versions between the marks of a page."""
    before, start, rest = path.read_text().partition("<!-- firmware -->\n")
    _, end, after = rest.partition("<!-- end firmware -->")
    if not (start and end):
        raise ValueError(f"{path}: expected the marks <!-- firmware --> and <!-- end firmware -->.")
    tools = [
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        for tool in ("arm-none-eabi-gcc", "qemu-system-arm")
    ]
    tools += [] if kernels is None else [f"CMSIS-NN {cmsis_nn.commit(kernels)}"]
    path.write_text(f"{before}{start}{text}\nVersions: {'; '.join(tools)}.\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.firmware", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--boards", nargs="+", choices=BOARDS, default=list(BOARDS), metavar="BOARD")
    parser.add_argument("--target", default="tflite_micro", help="whose rounding (%(default)s)")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="a .qjax file, instead of the networks")
    parser.add_argument("--vectors", type=int, default=4, help="inputs per network (%(default)s)")
    parser.add_argument("--level", default="-O2", help="of the compiler's optimization (%(default)s)")
    parser.add_argument("--cmsis-nn", type=Path, metavar="FOLDER", help="a checkout of CMSIS-NN, to compare with")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep sources and firmware there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables onto this page")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        names = [arguments.graph.stem] if arguments.graph else arguments.networks
        for name in names:
            graph = qjax.load(arguments.graph) if arguments.graph else converted(name, arguments.target)
            forms: dict[str, tuple[Any, dict[str, Any]]] = {
                "plain": (graph, {}),
                "vectors": (graph, {"simd": "cortex_m"}),
            }
            if arguments.cmsis_nn:
                forms["CMSIS-NN"] = (graph.retarget("cmsis_nn"), {"kernels": arguments.cmsis_nn})
            for board in arguments.boards:
                found: dict[str, Measured] = {}
                for form, (given, options) in forms.items():
                    place = folder / f"{name.replace(' ', '-')}-{board}-{form}"
                    options = {"vectors": arguments.vectors, "level": arguments.level, **options}
                    found[form] = run(given, BOARDS[board], place, **options)
                rows.append(Row(name, found))
                print(f"{name}, {board}: {', '.join(f'{k} {m.instructions:,}' for k, m in found.items())}", flush=True)
    text = tables(rows)
    print(text, end="")
    if arguments.page:
        onto_page(arguments.page, text, arguments.cmsis_nn)
    return int(any(m.differ for row in rows for m in row.forms.values()))


if __name__ == "__main__":
    sys.exit(main())
