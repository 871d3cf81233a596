"""The models of Keras 3 all the way to integers: `python -m experiments.keras_models`.

This is `experiments.public` with the collection of Keras alone; all of its options apply. `--rows FOLDER` keeps every
row, so that a run goes on where it was stopped.
"""

import sys
from collections.abc import Sequence

from experiments.public.__main__ import main as public
from experiments.public.row import Row


def main(argv: Sequence[str] | None = None) -> list[Row]:
    given = list(sys.argv[1:] if argv is None else argv)
    return public(["--collections", "keras", *given])


if __name__ == "__main__":
    sys.exit(int(any(row.error or row.exact_mismatches for row in main())))
