"""Emitters: they write a finished graph as a file for another program.

    graph.emit("onnx", "model.onnx")    graph.emit("tflite", "model.tflite")    graph.emit("c", "folder")

Each format is one module or package with `emit(graph, path, **options)`. It is imported on first use, so qjax does
not require the libraries that write the formats.
"""

import importlib
import os
from typing import Any

from qjax.graph.ir import Graph
from qjax.graph.recompute import check_computed
from qjax.support.extensions import EMITTERS
from qjax.support.names import check_options, did_you_mean
from qjax.support.progress import stage


def emit(graph: Graph, format: str, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a graph in one of `EMITTERS`; options: those of the format's own `emit`.

    Raises:
      TypeError: an option that the format does not have.
      ValueError: an unknown format, or a graph that the format cannot represent; the message names the nodes and the
        cure.
      ModuleNotFoundError: the library that writes the format is missing; the message names what to install.
    """
    if format not in EMITTERS:
        raise ValueError(
            f"emit: expected one of the formats {', '.join(sorted(EMITTERS))}, got {format!r}."
            f"{did_you_mean(format, EMITTERS)}"
        )
    with stage(f"emit: {format}"):
        # A graph may have been changed by hand, and emitters plan memory by what it states.
        check_computed(graph)
        module = importlib.import_module(EMITTERS[format])
        # an emitter passes options on to one of the other two
        takes = [f for f in (module.emit, *(getattr(module, name, None) for name in ("to_bytes", "build"))) if f]
        check_options(f"emit: {format}", takes, options)
        module.emit(graph, path, **options)
