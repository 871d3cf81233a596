"""`python -m benchmarks`: everything, in some minutes; `python -m benchmarks artifacts`: one part of it.

`gradients` (steps whose backward pass is in integers), `scaling` (against batch, width and depth), `processes` (against
the number of processes), `growth` (against the number of nodes), `depth` (first calls of deep encoders) and
`accelerator` (on a GPU or TPU) run only where they are named.
`--docs docs` writes what each part found onto its page, when the part is done. Close what else runs: ratios of paired
runs survive a busy machine, times do not. Exit code 1: codes differ where they must not.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import (
    accelerator,
    artifacts,
    deployed,
    depth,
    first_calls,
    growth,
    kernels,
    native,
    onnx_styles,
    page,
    primitive,
    processes,
    scaling,
    speed,
    steps,
)
from benchmarks.networks import NETWORKS
from benchmarks.report import ratios
from benchmarks.timing import Failed, Result, apart
from qjax.contrib.lab.machine import machine


@dataclasses.dataclass(frozen=True)
class Found:
    """What a part found: for results.json and for its page; differ: how many codes do."""

    document: Any
    text: str
    differ: int = 0
    picture: Callable[[Path], None] | None = None


def _timed(
    name: str, measure: Callable[[float, Sequence[str]], Sequence[Result]], names: Sequence[str], *, alone: bool = False
) -> Callable[[argparse.Namespace], Found]:
    """One part; alone: every name in a process of its own."""

    def run(args: argparse.Namespace) -> Found:
        seconds = 3.0 if args.seconds is None else args.seconds
        chosen = [name for name in names if not args.only or name in args.only]
        results = apart(measure, seconds, chosen) if alone else measure(seconds, chosen)
        ratios(results).show(name)
        differ = sum(result.differ for result in results if isinstance(result, Failed))
        return Found(
            [result.document() for result in results],
            ratios(results).markdown(),
            differ,
            lambda path: page.draw_ratios(path, results),
        )

    return run


def _artifacts(args: argparse.Namespace) -> Found:
    settings = artifacts.QUICK if args.quick else artifacts.Settings()
    if args.seconds is not None:
        settings = dataclasses.replace(settings, seconds=args.seconds)
    if args.only:
        settings = dataclasses.replace(settings, networks=tuple(name for name in NETWORKS if name in args.only))
    sections = list(artifacts.artifacts(settings, Console(width=200)))
    document = {"versions": artifacts.versions(), "sections": [section.document() for section in sections]}
    return Found(document, artifacts.page_text(sections), sum(section.differ for section in sections))


def _deployed(args: argparse.Namespace) -> Found:
    names = [name for name in deployed.NAMES if not args.only or name in args.only]
    rows = apart(deployed.deployed, 3.0 if args.seconds is None else args.seconds, names)
    table = deployed.table(rows)
    table.show("files of networks that people ship / ONNX Runtime's float32")
    return Found(
        deployed.document(rows),
        table.markdown(),
        deployed.differ(rows),
        lambda path: page.draw_ratios(path, deployed.drawn(rows)),
    )


def _scaling(args: argparse.Namespace) -> Found:
    points = list(scaling.scaling(0.5 if args.seconds is None else args.seconds))
    table = scaling.table(points)
    table.show("scaling")
    document = [dataclasses.asdict(point) for point in points]
    return Found(document, table.markdown(), picture=lambda path: scaling.picture(path, points))


def _processes(args: argparse.Namespace) -> Found:
    names = [name for name in NAMES["processes"] if not args.only or name in args.only]
    results = list(processes.processes(names))
    table = processes.table(results)
    table.show("processes: as many examples for each")
    return Found([result.document() for result in results], table.markdown())


def _growth(args: argparse.Namespace) -> Found:
    results = list(growth.growth(args.nodes))
    table = growth.table(results)
    table.show("growth: seconds of the processor (milliseconds a node)")
    return Found([result.document() for result in results], table.markdown())


def _first_calls(args: argparse.Namespace) -> Found:
    console = Console()
    results: list[first_calls.First] = []
    for result in first_calls.first_calls([name for name in first_calls.MODELS if name in args.only]):
        results.append(result)
        console.print(f"{result.model}: {result.call}: {result.seconds:.1f} s", soft_wrap=True)
    table = first_calls.table(results)
    table.show("first calls: seconds of the processor")
    return Found([dataclasses.asdict(result) for result in results], table.markdown())


def _accelerator(args: argparse.Namespace) -> Found:
    names = [name for name in NAMES["accelerator"] if not args.only or name in args.only]
    rows, results = accelerator.accelerator(3.0 if args.seconds is None else args.seconds, names, args.wait)
    tables = (accelerator.table(rows), ratios(results))
    for shown, title in zip(tables, ("outputs that differ from the CPU's", "accelerator"), strict=True):
        shown.show(title)
    document = {"bits": [dataclasses.asdict(row) for row in rows], "times": [result.document() for result in results]}
    return Found(document, "\n".join(one.markdown() for one in tables), sum(row.differ for row in rows))


def _depth(args: argparse.Namespace) -> Found:
    results: list[tuple[int, first_calls.First]] = []
    for layers, result in depth.depth():
        results.append((layers, result))
        print(f"{layers} layers: {result.call}: {result.seconds:.1f} s")
    table = depth.table(results)
    table.show("first calls against depth: seconds of the processor")
    document = [{"layers": layers, **dataclasses.asdict(result)} for layers, result in results]
    return Found(document, table.markdown(), picture=lambda path: depth.picture(path, results))


NAMES = {
    "primitive": primitive.NAMES,
    "steps": tuple(steps.MODELS),
    "gradients": tuple(steps.MODELS),
    "speed": tuple(speed.NETWORKS),
    "kernels": kernels.NAMES,
    "native": native.NETWORKS,
    "styles": tuple(onnx_styles.NETWORKS),
    "artifacts": tuple(NETWORKS),
    "deployed": deployed.NAMES,
    "first_calls": tuple(first_calls.MODELS),
    "processes": tuple(processes.EXAMPLES),
    "accelerator": (accelerator.BITS, *accelerator.CASES),
}
"""What `--only` chooses from."""

PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "primitive": _timed("primitive", primitive.primitive, NAMES["primitive"]),
    "steps": _timed("steps", steps.steps, NAMES["steps"], alone=True),
    "speed": _timed("speed", speed.speed, NAMES["speed"], alone=True),
    "kernels": _timed("kernels", kernels.kernels, NAMES["kernels"]),
    "native": _timed("native", native.native, NAMES["native"]),
    "styles": _timed("styles", onnx_styles.styles, NAMES["styles"], alone=True),
    "artifacts": _artifacts,
    "deployed": _deployed,
    "first_calls": _first_calls,
    "scaling": _scaling,
    "processes": _processes,
    "growth": _growth,
    "depth": _depth,
    "gradients": _timed("gradients", steps.gradients, NAMES["gradients"], alone=True),
    "accelerator": _accelerator,
}
ASKED = ("gradients", "scaling", "processes", "growth", "depth", "accelerator")
"""Those that run only where they are named."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(PARTS)}; none: all but those that run only where they are named",
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=list(growth.SIZES), help="of growth's chains")
    parser.add_argument("--seconds", type=float, help="per comparison (3; of artifacts 1, 0 for no times)")
    parser.add_argument("--wait", type=float, default=accelerator.WAIT, help="seconds to compile for an accelerator")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="models, networks or cases of the parts")
    parser.add_argument("--quick", action="store_true", help="artifacts: one small network, no times: do they run?")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results.json and the pictures")
    parser.add_argument("--docs", type=Path, help="a folder whose pages get what the parts found")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"expected parts out of {', '.join(PARTS)}, got {', '.join(unknown)}")
    parts = [part for part in PARTS if part in args.parts or (not args.parts and part not in ASKED)]
    if args.only:
        known = {name for part in parts for name in NAMES.get(part, ())}
        if unknown := sorted(set(args.only) - known):
            parser.error(f"--only: expected names out of {'; '.join(sorted(known))}. Got {'; '.join(unknown)}")
        parts = [part for part in parts if set(args.only) & set(NAMES.get(part, ()))]
    if args.docs is not None:
        if args.only or args.quick:
            parser.error("--docs wants whole tables: leave out --only and --quick")
        try:
            page.check(args.docs, parts)
        except ValueError as error:
            parser.error(str(error))
    document: dict[str, object] = {"machine": machine()}
    args.out.mkdir(parents=True, exist_ok=True)
    differ = 0
    for part in parts:
        found = PARTS[part](args)
        differ += found.differ
        document[part] = found.document
        (args.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        text = found.text
        if found.picture is not None:
            found.picture(args.out / f"{part}.png" if args.docs is None else page.picture_of(args.docs, part))
            text += f"\n![{part}](figures/{part}.png)\n"
        if args.docs is not None:
            page.put(args.docs, part, text)
    print(f"{differ:,} codes differ where they must not.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
