"""Reads pre-quantized .tflite models: int8, int16 with int8 weights, and old ones of uint8.

A .tflite file contains scales but no rounding, so the same file has different codes in LiteRT's reference kernels, its
optimised ones, XNNPACK and TFLite Micro: the target decides which of them the graph equals. A float input that is only
read by a QUANTIZE becomes codes (the graph quantizes like that operator), and so does a DEQUANTIZE at the end.

A file that qjax wrote contains the graph itself in its metadata "qjax" (see `written_by_qjax`). Other files are read
without flatbuffers or TensorFlow.
"""

import dataclasses
import importlib
from collections.abc import Sequence

from qjax import targets
from qjax.assign.retarget import retarget
from qjax.contrib.importers.tflite import written_by_qjax
from qjax.contrib.importers.tflite.kernels import refused, targeted, with_tables
from qjax.contrib.importers.tflite.variables import metadata_of, without_variables
from qjax.contrib.importers.tflite.walk import Walk, needed
from qjax.export.read_errors import ReadError, reading
from qjax.export.tflite_schema.file import METADATA
from qjax.export.tflite_schema.model import Model, parse
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph
from qjax.lower import ConversionError
from qjax.lower.batch import free_batch, independent
from qjax.support.errors import Problems

_HANDLERS = (
    "products",
    "clamps",
    "arithmetic",
    "shapes",
    "moves",
    "slices",
    "joins_and_splits",
    "lookups",
    "recurrent",
    "functions",
    "floats",
    "float_chains",
    "whole_numbers",
    "selections",
)
_SIZES = (251, 257)
"""Two readings are made with this many times the file's batch; their differences depend on the batch."""

DEFAULT = "tflite_reference"


def read(
    data: bytes,
    *,
    target: str | targets.Target | None = None,
    outputs: Sequence[str] | None = None,
    metadata: bool = True,
    signature: str | None = None,
) -> Graph:
    """The graph of a model.

    The batch is free if every operator treats its examples separately (and the first axis is 1, or of any size
    according to the file); otherwise it has the size that the file states.

    Args:
      data: the bytes of the file.
      target: whose rounding the graph has; None: that of a file which qjax wrote, else "tflite_reference".
      outputs: names of tensors of the file that become the graph's outputs, instead of the model's own: the part of the
        model that computes them.
      metadata: whether to use what qjax wrote into a file; False reads only its operators.
      signature: the name of one of the file's signatures, whose subgraph is read; None: the first subgraph, which must
        be the only one that callers can choose.

    Raises:
      ReadError: a damaged file, no such signature, or operators without integers here: one error that lists all.
      ValueError: no such output.
    """
    for name in _HANDLERS:
        importlib.import_module(f"{__name__}.{name}")
    with reading("the file's tables"):
        model = parse(data, signature)
    if metadata and outputs is None and signature is None and METADATA in model.metadata:
        graph = written_by_qjax.read(model)
        return graph if target is None else retarget(graph, target)
    chosen = targets.get(DEFAULT if target is None else target)
    with reading("its variables"):
        model, states, problems = without_variables(with_int32_places(model))
    wanted = _wanted_outputs(model, outputs)
    if outputs is not None:
        read = {*wanted, *(index for operator in needed(model, wanted) for index in operator.inputs)}
        model = dataclasses.replace(model, inputs=tuple(index for index in model.inputs if index in read))
    with reading("the shapes of its tensors"):
        model = with_shapes(model, wanted)
    with reading("the graph of its operators"):
        graph, walk = _read(model, wanted, chosen, problems, signature)
    if outputs is None:
        graph = graph.replace(metadata={**graph.metadata, **metadata_of(states, walk.names)})
    with reading(f"the graph under {chosen.name!r}", clear=ValueError):
        graph = remove_dead(with_tables(graph, walk.unit_tables, chosen))
        return targeted(graph, walk.marks, walk.functions, chosen)


def _wanted_outputs(model: Model, outputs: Sequence[str] | None) -> list[int]:
    if outputs is None:
        if not model.outputs:
            raise ReadError("the model has no outputs. Name the tensors to compute: read(..., outputs=[...]).")
        return list(model.outputs)
    if isinstance(outputs, str) or not outputs:
        raise ValueError(f"read: outputs must be a list of names of tensors, got {outputs!r}.")
    found: list[int] = []
    computed = {index for operator in model.operators for index in operator.outputs}
    for name in outputs:
        named = [t.index for t in model.tensors if t.name == name and t.index in computed]
        if len(named) != 1:
            known = ", ".join(repr(model.tensors[index].name) for index in sorted(computed)[:40])
            raise ValueError(f"read: no operator computes {name!r}, or several do. The computed tensors are {known}.")
        found += named
    return found


def _read(
    model: Model, wanted: list[int], target: targets.Target, found: Problems, signature: str | None
) -> tuple[Graph, Walk]:
    walk = Walk(model, wanted)
    graph = walk.run()
    problems = found.lines + walk.problems.lines
    if model.subgraphs > 1 and signature is None:
        if len(set(model.signatures.values())) > 1:
            names = ", ".join(map(repr, model.signatures))
            problems.append(f"the file has the signatures {names}. Choose the one to read: read(..., signature=...)")
        else:
            problems.append(f"{model.subgraphs} subgraphs. Leave control flow (IF, WHILE) out of the model")
    problems += refused(walk.marks, target)
    if problems:
        listed = "\n".join(f"  {line}." for line in problems)
        raise ReadError(f"{len(problems)} parts of the model have no integers here:\n{listed}")
    return _free_batch(model, wanted) or graph, walk


def _free_batch(model: Model, wanted: list[int]) -> Graph | None:
    """The graph with a free batch, or None if the examples of a batch are not treated separately."""
    batched, size = _batched(model, wanted)
    if not batched:
        return None
    graphs: list[Graph] = []
    for scale in _SIZES:
        walk = Walk(model, wanted, scale, batched)
        try:
            graphs.append(walk.run())
        except ReadError:
            return None
        if walk.problems:
            return None
    try:
        free = free_batch(graphs[0], graphs[1], *(size * scale for scale in _SIZES))
    except ConversionError:
        return None
    return free if independent(free) else None


def _batched(model: Model, wanted: list[int]) -> tuple[frozenset[int], int]:
    """The inputs whose first axis is the batch, and the size that the file states for it."""
    read = {index for operator in needed(model, wanted) for index in operator.inputs}
    inputs = [model.tensors[index] for index in model.inputs if index in read]
    idle = [model.tensors[index] for index in model.inputs if index not in read]
    free = [t for t in inputs if t.signature and t.signature[0] == -1]
    chosen = free or [t for t in inputs if len(t.shape) > 1 and t.shape[0] == 1]
    sizes = {t.shape[0] for t in chosen}
    if len(sizes) != 1 or not min(sizes):
        return frozenset(), 1
    size = sizes.pop()
    return frozenset(t.index for t in (*chosen, *idle) if t in chosen or t.shape[:1] == (size,)), size


def with_shapes(model: Model, wanted: list[int]) -> Model:
    """The model with the shapes that its operators determine, for tensors whose shape the file does not state."""
    computed = {index for operator in needed(model, wanted) for index in operator.outputs}
    if all(model.tensors[index].shaped == "yes" for index in computed):
        return model
    walk = Walk(model, wanted)
    walk.run()
    tensors = tuple(t if t.shaped == "yes" else dataclasses.replace(t, shape=walk.shape_of(t)) for t in model.tensors)
    return dataclasses.replace(model, tensors=tensors)


def with_int32_places(model: Model) -> Model:
    """The model with int32 results of ARG_MAX and ARG_MIN, because int32 fits every index along an axis."""
    wide = {
        index
        for operator in model.operators
        if operator.name in ("ARG_MAX", "ARG_MIN")
        for index in operator.outputs
        if model.tensors[index].dtype == "int64"
    }
    if not wide:
        return model
    tensors = (dataclasses.replace(t, dtype="int32") if t.index in wide else t for t in model.tensors)
    return dataclasses.replace(model, tensors=tuple(tensors))
