"""Reads pre-quantized .onnx models: QDQ, operators on codes (QLinearConv, ...), and qjax's own.

A group DequantizeLinear, operator, QuantizeLinear is read as what ONNX Runtime makes of it at its default level of
optimization: one operator on codes, with one rounding. A group that ONNX Runtime computes in float is an error, because
no integers reproduce the bits of float sums; floats=True, or another target than ONNX Runtime, reads it as integers
anyway.

The bits are ONNX Runtime's on x86 under options of the session, which the graph's metadata lists
("onnxruntime_session"): session.x64quantprecision=1 (products of uint8 and int8 without VNNI; the target
onnxruntime_avx2 is the one without it), session.qdqisint8allowed=1 (int8 activations of QDQ models, which x86 otherwise
computes in float) and session.disable_double_qdq_remover=1 (without it, two neighbouring quantizers are merged into one
with another scale).
"""

import dataclasses
import importlib
import importlib.util

from qjax import targets
from qjax.assign import assign
from qjax.assign.retarget import retarget
from qjax.contrib.importers.onnx import close_quantizer
from qjax.contrib.importers.onnx.hints import Hints, annotated, hints_of
from qjax.contrib.importers.onnx.model import Model, model_of, parse
from qjax.contrib.importers.onnx.walk import Walk
from qjax.export.read_errors import ReadError, reading
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph, Tensor
from qjax.lower import ConversionError
from qjax.lower.batch import free_batch

_HANDLERS = (
    "quantizers",
    "products",
    "transposed",
    "elementwise",
    "functions",
    "selections",
    "moves",
    "image_moves",
    "folding",
)
_SIZES = (251, 257)
"""The two sizes used for a free batch; what differs between two readings depends on the batch."""

DEFAULT = "onnxruntime"


def read(
    data: bytes,
    *,
    target: str | targets.Target | None = None,
    floats: bool | None = None,
    metadata: bool = True,
) -> Graph:
    """The graph of a model.

    Args:
      data: the bytes of the file.
      target: whose rounding the graph has; None: that of a file which qjax wrote, else "onnxruntime".
      floats: whether to read as integers what ONNX Runtime adds up in float; the graph's metadata lists it. None: only
        for other targets than ONNX Runtime, for which its bits do not matter.
      metadata: whether to read a file that qjax wrote as the graph in its metadata, which is verified; False reads
        only its operators, as those of any other file.

    Raises:
      ReadError: a damaged file, data in another file, or operators without a form in integers: one error for all.
      ModuleNotFoundError: onnx is not installed.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ModuleNotFoundError("Reading .onnx files needs the package onnx: pip install onnx onnxruntime")
    with reading("the file's tables"):
        proto = parse(data)
        from qjax.contrib.importers.onnx import written_by_qjax

        graph = written_by_qjax.read(proto) if metadata and written_by_qjax.style_of(proto) else None
    if graph is not None:
        return graph if target is None else retarget(graph, target)
    for name in _HANDLERS:
        importlib.import_module(f"{__name__}.{name}")
    with reading("the file's tables"):
        model = model_of(proto)
        hints = hints_of(model.metadata)
    chosen = _target(target, hints)
    if floats is None:
        floats = not chosen.name.startswith(DEFAULT)
    with reading("the graph of its operators"):
        graph, in_floats = _read(model, hints, floats, chosen.accumulator.pairs)
    with reading(f"the graph under {chosen.name!r}", clear=ValueError):
        return annotated(_targeted(graph, chosen, in_floats), hints)


def _targeted(graph: Graph, target: targets.Target, in_floats: set[str]) -> Graph:
    """The graph under the target, but with ONNX Runtime's float formulas in the nodes that it does not fuse."""
    made = assign(graph, target)
    if not in_floats or not target.name.startswith(DEFAULT):
        return made
    names = {"window_sum": "average_pool"}
    formulas = {names.get(op, op): formula for op, formula in close_quantizer.FLOAT_FORMULAS.items()}
    other = assign(graph, target.replace(**formulas))
    nodes = tuple(b if a.name in in_floats else a for a, b in zip(made.nodes, other.nodes, strict=True))
    tensors = {**made.tensors, **_own(other, in_floats)}
    return remove_dead(made.replace(nodes=nodes, tensors=tensors, quantized=graph))


def _own(graph: Graph, names: set[str]) -> dict[str, Tensor]:
    return {name: graph.tensors[name] for n in graph.nodes if n.name in names for name in n.constants.values()}


def _target(target: str | targets.Target | None, hints: Hints) -> targets.Target:
    if target is not None:
        return targets.get(target)
    if hints.target is None:
        return targets.get(DEFAULT)
    if hints.target not in targets.names():
        raise ReadError(f"the model was made for the target {hints.target!r}, which is unknown here: name another one.")
    return targets.get(hints.target)


def _read(model: Model, hints: Hints, floats: bool, pairs: bool) -> tuple[Graph, set[str]]:
    found: set[str] = set()

    def reading(size: int) -> Graph:
        walk = Walk(model, size, hints, close_quantizer, floats=floats, pairs=pairs)
        graph = walk.run()
        found.update(walk.in_formula)
        return graph

    if not _is_free(model):
        return reading(1), found
    first = reading(_SIZES[0])
    try:
        free = free_batch(first, reading(_SIZES[1]), *_SIZES)
    except ConversionError as error:
        raise ReadError(f"the model's batch is free: {error}") from None
    return dataclasses.replace(free, metadata=first.metadata), found


def _is_free(model: Model) -> bool:
    """Whether the batch has no fixed size.

    Raises:
      ReadError: other sizes are free as well, but a graph only has one.
    """
    first = {port.dims[0] for port in model.inputs if port.dims and isinstance(port.dims[0], str)}
    symbols: dict[str, str] = {}
    for port in model.inputs:
        for axis, size in enumerate(port.dims or ()):
            if isinstance(size, int):
                continue
            # The first axis of every input is the batch, under any name.
            batch = axis == 0 or size in first
            symbols.setdefault(
                "" if batch else size or f"{port.name}[{axis}]", f"axis {axis} of {port.name!r} ({size})"
            )
    if len(symbols) > 1:
        raise ReadError(
            f"several sizes of the model's inputs are free: {', '.join(symbols.values())}; a graph has one, the batch. "
            "Fix the others: python -m onnxruntime.tools.make_dynamic_shape_fixed."
        )
    return bool(symbols)
