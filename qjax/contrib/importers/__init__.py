"""Readers: turn pre-quantized models of other tools into graphs like any other.

    graph = qjax.read("model.tflite", target="xnnpack");  codes = graph.run(...)

Each format is one module or package here with `read(data, target=..., **options)`, which is imported on first use. A
reader trusts nothing in the file and executes nothing.
"""

import importlib
import os
from typing import Any

from qjax import targets
from qjax.contrib.profiles.contents import detect_format
from qjax.export import artifact, files
from qjax.export.integer_graph import IntegerGraph
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from qjax.support.names import check_options
from qjax.support.progress import stage

MAX_FILE = 2 * 2**30

FORMATS = ("onnx", "tflite")


def read(
    path: str | os.PathLike[str],
    target: str | targets.Target | None = None,
    *,
    format: str | None = None,
    max_bytes: int = MAX_FILE,
    **options: Any,
) -> IntegerGraph:
    """A pre-quantized .tflite or .onnx model as a graph like any other.

    Args:
      path: a .tflite or .onnx file.
      target: whose rounding the graph has; None: that of the file (if qjax wrote it), else the format's own runtime:
        onnxruntime, tflite_reference.
      format: "onnx" or "tflite"; None: by the file's content.
      max_bytes: a larger file is refused before it is read.
      options: those of the format's own `read`.

    Raises:
      FileNotFoundError: there is no such file.
      ReadError: a damaged file, or one with operators that have no integers here; the message lists all of them.

    Examples:
      ```python
      graph.emit("tflite", "model.tflite")  # or any quantized .tflite or .onnx file
      again = qjax.read("model.tflite")
      assert jnp.array_equal(again(x), graph(x))
      ```
    """
    with stage("read"):
        return IntegerGraph(read_graph(path, target, format=format, max_bytes=max_bytes, **options))


def read_graph(
    path: str | os.PathLike[str],
    target: str | targets.Target | None = None,
    *,
    format: str | None = None,
    max_bytes: int = MAX_FILE,
    **options: Any,
) -> Graph:
    """`read` without the `IntegerGraph` around the graph."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"read: expected one of the formats {', '.join(FORMATS)}, got {format!r}.")
    name = os.fspath(path)
    data = files.read(name, max_bytes, "a .tflite or .onnx model", ReadError)
    if data[:1] and data[8:].startswith(artifact.START):
        raise ReadError(f"{name}: this is a qjax artifact; qjax.load(path) reads it.")
    chosen = targets.get(target) if target is not None else None
    reader = importlib.import_module(f"qjax.contrib.importers.{format or detect_format(data)}")
    check_options("read", [read, reader.read], options)
    try:
        return reader.read(data, target=chosen, **options)
    except ReadError as error:
        # Preserve the reader's own cause, if it has one.
        raise ReadError(f"{name}: {error}") from error.__cause__
