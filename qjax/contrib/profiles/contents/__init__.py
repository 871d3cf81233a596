"""Lists the operators of a file, for `qjax.profiles` to judge.

A graph is judged by the file that the profile's emitter writes.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from qjax import ops
from qjax.assign.retarget import retarget
from qjax.contrib.profiles import Operator, Profile, Verdict, Violation, check_operators, get
from qjax.export.emit import onnx as onnx_emitter
from qjax.export.emit import tflite as tflite_emitter
from qjax.graph.ir import Graph
from qjax.support.errors import Problems, Unsupported

PTE_FORM: Mapping[str, Any] = {"style": "qdq", "portable": "floats"}
"""The emitter's options for the ONNX model that a .pte is made of."""


def detect_format(data: bytes) -> str:
    """The format of a file by its content: bytes 4 to 8 identify a .tflite file; anything else is tried as ONNX."""
    return "tflite" if data[4:8] == b"TFL3" else "onnx"


def check_file(data: bytes, profile: str | Profile) -> Verdict:
    """Judge the bytes of a .tflite or .onnx file, of any origin.

    Raises:
      ReadError: the file is damaged. ValueError: an unknown profile, or a file of another format than its own.
    """
    known, format = get(profile), detect_format(data)
    if format != _judged(known):
        raise ValueError(
            f"profile {known.name!r}: expected a .{_judged(known)} file, got .{format}. Read it and check the graph: "
            f"qjax.read(path).check({known.name!r})."
        )
    return check_operators(known, _reader(format).operators_of_bytes(data))


def check_graph(
    graph: Graph,
    profile: str | Profile,
    *,
    trained: bool = True,
    scheme: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Verdict:
    """Judge the file that the profile's emitter writes for a graph.

    A graph that the format cannot represent breaks the rule "file".

    Args:
      trained, scheme: see `profiles.check_operators`. options: of the emitter; None: those of the profile.

    Raises:
      ValueError: an unknown profile. ModuleNotFoundError: the library that writes the format is missing.
    """
    known, expected = get(profile), f"a .{get(profile).format} file of this device"
    try:
        operators, problems = operators_of_graph(graph, known, known.options if options is None else options)
    except ValueError as error:
        return Verdict(known, (Violation("file", "the graph", expected, str(error), ""),))
    verdict = check_operators(known, operators, trained=trained, scheme=scheme)
    unwritten = [Violation("file", p.what, expected, p.why, f"{p.cure}.", "", p.where) for p in problems]
    return dataclasses.replace(verdict, violations=(*unwritten, *verdict.violations))


def operators_of_graph(
    graph: Graph, profile: Profile, options: Mapping[str, Any]
) -> tuple[list[Operator], Sequence[Unsupported]]:
    """The operators of the file that the profile's emitter writes, and what it cannot write.

    Raises:
      ValueError: the format cannot represent the graph.
    """
    islands = Problems()
    for node in graph.nodes:
        if ops.get(node.op).reals and not profile.floats:
            islands.add(repr(node.name), "a float island", "Drop their qjax.FLOAT or qjax.Dynamic", node.location)
    if islands:
        return [], islands.found
    reader = _reader(_judged(profile))
    if profile.format == "pte":
        options = {**options, **PTE_FORM}
    if profile.format == "tflite":
        data, problems = tflite_emitter.attempt(graph, **options)
        return (reader.operators_of_bytes(data) if data else []), problems.found
    if not graph.target.startswith("onnxruntime"):
        # The profile judges operators, which do not depend on the target; it may be for a device that takes no ONNX.
        graph = retarget(graph, "onnxruntime")
    return reader.operators_of(onnx_emitter.to_model(graph, **options), _places(graph)), []


def _judged(profile: Profile) -> str:
    """The format whose operators are judged; for a .pte it is ONNX, because a .pte is made of a QDQ model."""
    return "onnx" if profile.format == "pte" else profile.format


def _reader(format: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{format}")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"profiles of .{format} files need the package {error.name}: pip install {error.name}", name=error.name
        ) from error


def _places(graph: Graph) -> Mapping[str, tuple[str, str | None]]:
    """Name of a node or of its output -> the node and the user's line."""
    own = {node.output: (node.name, node.location) for node in graph.nodes}
    return own | {node.name: (node.name, node.location) for node in graph.nodes}
