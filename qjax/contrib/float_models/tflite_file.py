"""Reads a float .tflite file into the common form; weights of float16 or of integers with scales become float32."""

from typing import Any

import numpy as np

from qjax.contrib.float_models import operators  # noqa: F401  # they register
from qjax.contrib.float_models.graph import OPERATORS, FloatGraph, Node, Port
from qjax.contrib.float_models.operators.tflite import PREFIX
from qjax.contrib.float_models.weights import Folding, needed, weights_of
from qjax.export.read_errors import ReadError, reading
from qjax.export.tflite_schema.model import VARIABLE, FileTensor, Model, Operator, parse
from qjax.support.errors import Problems, Unsupported
from qjax.support.names import Names

_CODES = ("int8", "uint8", "int16", "int4")
_VERSION = 22


def read(data: bytes, signature: str | None = None) -> tuple[FloatGraph, frozenset[str]]:
    """The graph of a file's first subgraph or of a signature; the second result is always empty.

    Raises:
      ReadError: the file is damaged. Unsupported: it is quantized, or has operators that are not supported.
    """
    with reading("the file's tables", Unsupported):
        model = parse(data, signature)
        if signature is None and len(set(model.signatures.values())) > 1:
            listed = ", ".join(map(repr, model.signatures))
            raise Unsupported(f"the file has the signatures {listed}", "Choose one: from_tflite(path, signature=...)")
        _refuse_unknown(model)
        return _graph(model), frozenset()


def _refuse_unknown(model: Model) -> None:
    """Raise one error with every operator and tensor that a float module cannot have."""
    computed = {index for operator in model.operators for index in operator.outputs}
    codes = [
        t
        for t in model.tensors
        if t.dtype in _CODES and t.scale.size and (t.index in computed or t.index in model.inputs)
    ]
    if codes:
        raise Unsupported(
            f"the file is quantized: its tensor {codes[0].name!r} holds {codes[0].dtype} with a scale",
            "Read it as integers: qjax.read(path); for training, convert the float model without optimizations",
        )
    problems = Problems()
    for operator in model.operators:
        title = f"{operator.name} {_name(model, operator)!r}"
        if f"{PREFIX}{operator.name}" not in OPERATORS:
            problems.add(title, "qjax has no such operator")
        elif operator.unusual:
            problems.add(title, operator.unusual)
    used = {index for operator in model.operators for index in (*operator.inputs, *operator.outputs)}
    for tensor in model.tensors:
        if tensor.index in used and tensor.unusual and tensor.unusual != VARIABLE:
            problems.add(f"tensor {tensor.name!r}", tensor.unusual)
    if problems:
        listed = "\n".join(f"  {line}." for line in problems.lines[:40])
        more = f"\n  ... and {len(problems.lines) - 40} more." if len(problems.lines) > 40 else ""
        raise Unsupported(
            f"{len(problems.lines)} parts of the model are not supported:\n{listed}{more}\n"
            "Leave these parts out of the model, or compute them after it"
        )


def _name(model: Model, operator: Operator) -> str:
    return model.tensors[operator.outputs[0]].name if operator.outputs else f"operator {operator.index}"


def _graph(model: Model) -> FloatGraph:
    taken = Names()
    names = {tensor.index: taken.fresh(tensor.name) for tensor in model.tensors}
    folding = Folding()
    for tensor in model.tensors:
        if tensor.span is not None:
            folding.add(names[tensor.index], _array(model, tensor))
        elif tensor.unusual == VARIABLE:
            folding.constants[names[tensor.index]] = np.zeros(tensor.shape, tensor.dtype)
    nodes = [
        Node(
            f"{PREFIX}{operator.name}",
            _name(model, operator).split(";")[0],
            tuple(names[index] if index >= 0 else "" for index in operator.inputs),
            tuple(names[index] for index in operator.outputs),
            dict(operator.options),
            _VERSION,
        )
        for operator in model.operators
    ]
    folding.count(nodes)
    kept = [node for node in nodes if not folding.fold(node)]
    inputs = tuple(_port(model.tensors[index], names) for index in model.inputs)
    outputs = tuple(_port(model.tensors[index], names) for index in model.outputs)
    if not outputs:
        raise ReadError("the model has no outputs.")
    kept = needed(kept, [port.name for port in outputs], {*folding.constants, *(port.name for port in inputs)})
    kept, parameters, constants, _ = weights_of(kept, folding, [port.name for port in outputs])
    return FloatGraph("tflite", tuple(kept), constants, parameters, inputs, outputs)


def _port(tensor: FileTensor, names: dict[int, str]) -> Port:
    dims = tuple(None if free == -1 else size for size, free in zip(tensor.shape, tensor.signature, strict=True))
    return Port(names[tensor.index], tensor.dtype, dims if tensor.shaped == "yes" else None)


def _array(model: Model, tensor: FileTensor) -> np.ndarray:
    """The numbers of a tensor; codes with scales as the float32 that they represent."""
    codes = model.array(tensor)
    if tensor.dtype not in _CODES or not tensor.scale.size:
        return codes
    if tensor.blocks is not None:
        scales: Any = np.repeat(model.block_scales(tensor), tensor.blocks[1], axis=1)
        return (codes.astype(np.float32) * scales).astype(np.float32)
    shape = [-1 if i == tensor.axis and tensor.scale.size > 1 else 1 for i in range(codes.ndim)]
    scale, zero = (np.reshape(v, shape) for v in (tensor.scale, tensor.zero_point))
    return ((codes.astype(np.int64) - zero).astype(np.float32) * scale).astype(np.float32)
