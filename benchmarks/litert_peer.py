"""A float `.tflite` file of a network, or one that LiteRT's own quantizer makes of it: a program of its own.

`python -m benchmarks.litert_peer NETWORK KIND PATH`; KIND is float, static or dynamic. It needs `ai-edge-quantizer` and
`litert-converter` (`make rivals`). The converter may end with a segmentation fault, and so may LiteRT on its files:
so the file is run once here, too.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.deployed_networks import made
from experiments.real.edge import codes, float_file, quantized_file
from experiments.real.methods import SETTINGS
from qjax.export import files
from qjax.runtimes import load

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
        what = "running" if path.exists() else "writing"
        said = [line for line in done.stderr.splitlines() if "Error" in line][-1:] if done.returncode > 0 else []
        raise RuntimeError(" ".join([f"{what} it ended with code {done.returncode}.", *said]))


def main(name: str, kind: str, path: str) -> None:
    """Write it here."""
    model, data = made(name)
    batches: list[tuple[Any, ...]] = [(example[None],) for example in data]
    content = float_file(model, batches[0])
    if kind != "float":
        content = quantized_file(content, batches, SETTINGS["W8A8"], kind)
    files.write(content, Path(path))
    call_of(Path(path), data[:1])()


def call_of(path: Path, x: np.ndarray) -> Callable[[], np.ndarray]:
    """A call of a file with one input and one output, on one thread; x: floats."""
    interpreter: Any = load("ai_edge_litert.interpreter", "LiteRT", "ai-edge-litert").Interpreter(
        model_path=str(path), num_threads=1
    )
    interpreter.allocate_tensors()
    (port,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()
    given = codes(x, port)

    def call() -> np.ndarray:
        interpreter.set_tensor(port["index"], given)
        interpreter.invoke()
        return np.array(interpreter.get_tensor(output["index"]))

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
