"""Opens a model file of any kind as a graph."""

import os
import stat

from qjax import read, targets
from qjax.cli.errors import Refused, refusing
from qjax.export import artifact
from qjax.export.integer_graph import IntegerGraph, load

_TFLITE = b"TFL3"
SUFFIXES = (".qjax", ".onnx", ".tflite")


def open_model(path: str, target: str | None = None) -> IntegerGraph:
    """Open the graph in a .qjax, .onnx or .tflite file, under a target (None: the file's own).

    Raises:
      Refused: there is no such file, its kind is unknown, it is damaged, or the target is unknown.
    """
    with refusing():
        if target is not None:
            targets.get(target)
        if kind(path) != "qjax":
            return read(path, target)
        graph = load(path)
    with refusing(path):
        return graph if target is None else graph.retarget(target)


def kind(path: str) -> str:
    """The kind of a file, "qjax", "onnx" or "tflite": by its content if that is conclusive, otherwise by its name."""
    # Check the kind of file before opening it, because opening a pipe would wait forever.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Refused(f"{path}: expected a model file, got a folder, a pipe or a device: give the path of a file.")
    with open(path, "rb") as file:
        head = file.read(64)
    if (len(head) > 8 and artifact.START.startswith(head[8:])) or head[8:].startswith(artifact.START):
        return "qjax"
    if head[4:8] == _TFLITE:
        return "tflite"
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise Refused(f"{path}: expected a model, {', '.join(SUFFIXES)}; its content is none of them.")
    return suffix[1:]


def is_model(path: str) -> bool:
    """Whether a file name is a model's and not an array's."""
    return os.path.splitext(path)[1].lower() not in (".npy", ".npz")
