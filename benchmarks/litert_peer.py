"""A float `.tflite` file of a network, or one that LiteRT's own quantizer makes of it: a program of its own.

`python -m benchmarks.litert_peer NETWORK KIND PATH`; KIND is float, static or dynamic. It needs `ai-edge-quantizer` and
`litert-converter` (`make rivals`), which may end with a segmentation fault.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.deployed_networks import made
from experiments.real.edge import float_file, quantized_file
from experiments.real.methods import SETTINGS
from qjax.export import files

KINDS = ("float", "static", "dynamic")
ROOT = Path(__file__).parents[1]


def write(name: str, kind: str, path: Path) -> None:
    """The file for a batch of one.

    Raises:
      RuntimeError: the program ended with an error; its last line.
    """
    folders = [str(ROOT / ".rivals"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    command = [sys.executable, "-m", "benchmarks.litert_peer", name, kind, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] if done.returncode > 0 else []
        raise RuntimeError(" ".join([f"the program ended with code {done.returncode}.", *said]))


def main(name: str, kind: str, path: str) -> None:
    """Write it here."""
    model, data = made(name)
    batches: list[tuple[Any, ...]] = [(example[None],) for example in data]
    content = float_file(model, batches[0])
    if kind != "float":
        content = quantized_file(content, batches, SETTINGS["W8A8"], kind)
    files.write(content, Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
