"""Emitters: they write a finished graph as a file for another program.

Each format is one module or package here with `emit(graph, path, **options)`. It is imported on first use, so qjax does
not require the libraries that write the formats.
"""

import importlib
import os
from typing import Any

from qjax.graph.ir import Graph
from qjax.names import did_you_mean
from qjax.ops import island
from qjax.progress import stage

FORMATS = ("c", "onnx", "stablehlo", "tflite")
HOLDS_REALS = ("stablehlo", "onnx", "c")
"""The formats that have a place for float islands; the last two for those with certain bits, see `export.ieee`."""


def emit(graph: Graph, format: str, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a graph in one of `FORMATS`; options: those of the format's own `emit`.

    Raises:
      ValueError: an unknown format, or a graph that the format cannot hold; the message names the nodes and the cure.
      ModuleNotFoundError: the library that writes the format is missing; the message says what to install.
    """
    if format not in FORMATS:
        raise ValueError(
            f"emit: expected one of the formats {', '.join(FORMATS)}, got {format!r}.{did_you_mean(format, FORMATS)}"
        )
    islands = [node.name for node in graph.nodes if node.op == island.NAME]
    if islands and format not in HOLDS_REALS:
        raise ValueError(
            f"emit: {format} files hold integers only, and these nodes are float islands: {', '.join(islands)}. Drop "
            f"their qjax.FLOAT or qjax.Dynamic, or emit {', '.join(HOLDS_REALS)}."
        )
    with stage(f"emit: {format}"):
        importlib.import_module(f"qjax.export.emit.{format}").emit(graph, path, **options)
