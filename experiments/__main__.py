"""`python -m experiments NAME ...`: studies of what rounding does, each with its prediction stated beforehand.

Writes NAME.json, NAME.png and NAME.md to a folder and exits with 1 when a measurement leaves its predicted band.
"""

import argparse
import sys
from pathlib import Path

from experiments.lab import registry


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(registry.STUDIES)}; none runs all")
    parser.add_argument("--full", action="store_true", help="all samples, sizes and seeds: minutes more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/experiments"), help="folder for the files")
    parser.add_argument("--list", action="store_true", help="name the studies and stop")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in registry.STUDIES]
    if unknown:
        parser.error(f"no study is called {', '.join(unknown)}; there are {', '.join(registry.STUDIES)}")
    if args.list:
        for name in registry.STUDIES:
            print(f"{name:18} {registry.get(name).title}")
        return 0
    # after the arguments are known to be right: it imports JAX
    from qjax.contrib.lab.running import run, write
    from qjax.contrib.lab.study import Settings

    left: list[str] = []
    for name in args.names or registry.STUDIES:
        result = run(registry.get(name), Settings(args.seed, args.full))
        write(result, args.out)
        left += [f"{name}: {prediction.name}" for prediction in result.left]
    print(f"written to {args.out}/", file=sys.stderr)
    for line in left:
        print(f"left its band: {line}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
