"""`python -m benchmarks`: everything, in some minutes; `python -m benchmarks artifacts`: one part of it.

`scaling` (against batch, width and depth) and `growth` (against the number of nodes) run only where they are named.
`--page docs/benchmarks.md` writes the tables and pictures of primitive, steps, speed and kernels onto that page; with
`artifacts` alone it takes docs/artifacts.md.

Close what else runs: ratios of paired runs survive a busy machine, times do not. Exit code 1: an artifact's codes are
not those of its graph.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import artifacts, growth, kernels, page, primitive, scaling, speed, steps
from benchmarks.networks import NETWORKS
from benchmarks.report import show
from benchmarks.timing import Paired
from experiments.machine import machine

TIMINGS = {
    "primitive": primitive.primitive,
    "steps": steps.steps,
    "speed": speed.speed,
    "kernels": kernels.kernels,
}
PARTS = (*TIMINGS, "artifacts")
NAMED = (*PARTS, "scaling", "growth")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMED)}; none: all but the last two")
    parser.add_argument("--nodes", nargs="+", type=int, default=list(growth.SIZES), help="of growth's chains")
    parser.add_argument("--seconds", type=float, help="per comparison (3; of artifacts 1, 0 for no times)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results.json")
    parser.add_argument("--quick", action="store_true", help="one small network, no times: do artifacts run?")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="of artifacts")
    parser.add_argument("--page", type=Path, help="a page that gets the tables")
    args = parser.parse_args(argv)
    parts: list[str] = args.parts or list(PARTS)
    if unknown := sorted(set(parts) - set(NAMED)):
        parser.error(f"expected parts out of {', '.join(NAMED)}, got {', '.join(unknown)}")
    document: dict[str, object] = {"machine": machine()}
    timed: dict[str, list[Paired]] = {}
    for name in [part for part in TIMINGS if part in parts]:
        timed[name] = TIMINGS[name](3.0 if args.seconds is None else args.seconds)
        show(name, timed[name])
        document[name] = [result.document() for result in timed[name]]
    if timed and args.page is not None:
        page.write(args.page, timed)
    if "scaling" in parts:
        points = list(scaling.scaling(0.5 if args.seconds is None else args.seconds))
        scaling.show(points)
        scaling.picture(args.out / "scaling.png", points)
        document["scaling"] = [dataclasses.asdict(point) for point in points]
    if "growth" in parts:
        grown = list(growth.growth(args.nodes))
        growth.show(grown)
        document["growth"] = [result.document() for result in grown]
    differ = 0
    if "artifacts" in parts:
        settings = artifacts.QUICK if args.quick else artifacts.Settings()
        if args.seconds is not None:
            settings = dataclasses.replace(settings, seconds=args.seconds)
        if args.networks:
            settings = dataclasses.replace(settings, networks=tuple(args.networks))
        sections = list(artifacts.artifacts(settings, Console(width=200)))
        differ = sum(section.differ for section in sections)
        document["versions"] = artifacts.versions()
        document["artifacts"] = [section.document() for section in sections]
        if args.page is not None and not timed:
            artifacts.onto_page(args.page, sections)
        print(f"{differ} codes of the artifacts differ from their graphs'.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
