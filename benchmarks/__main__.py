"""`python -m benchmarks`: everything, in a few minutes.

Close what else runs: ratios of paired runs survive a busy machine, times do not.
"""

import argparse
import json
from pathlib import Path

from benchmarks import kernels, models
from benchmarks.report import show
from experiments.machine import machine


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="per comparison")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args(argv)
    parts = {"training": models.training, "inference": models.inference, "convolutions": kernels.kernels}
    document: dict[str, object] = {"machine": machine()}
    for name, part in parts.items():
        results = part(args.seconds)
        show(name, results)
        document[name] = [result.document() for result in results]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
