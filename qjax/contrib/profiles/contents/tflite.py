"""The operators of a .tflite file, for `qjax.profiles`; it also works for files that qjax cannot read as a graph."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.contrib.profiles import PARAMETERS, Operator, Tensor
from qjax.export import document
from qjax.export.tflite_schema.file import METADATA
from qjax.export.tflite_schema.model import FileTensor, Model, parse

_WEIGHTS: Mapping[str, tuple[int, int | None]] = {
    "CONV_2D": (1, 2),
    "DEPTHWISE_CONV_2D": (1, 2),
    "FULLY_CONNECTED": (1, 2),
    "TRANSPOSE_CONV": (1, 3),
}
"""Operator -> the indices of the inputs that are the weight and the bias."""

_ENDS = {"QUANTIZE": 0, "DEQUANTIZE": 1}
"""Operators whose input (0) or output (1) is float, which does not count as an activation."""

_PARAMETERS = ("int32", "int64")


def operators_of_bytes(data: bytes) -> list[Operator]:
    """The operators in execution order.

    Raises:
      ReadError: the file is damaged.
    """
    model = parse(data)
    tensors = [_tensor(model, tensor) for tensor in model.tensors]
    places = _places(model)
    found: list[Operator] = []
    for operator in model.operators:
        inputs: tuple[Tensor | None, ...] = tuple(None if index < 0 else tensors[index] for index in operator.inputs)
        outputs = tuple(tensors[index] for index in operator.outputs)
        side = _ENDS.get(operator.name)
        if side == 0 and inputs[0] is not None and inputs[0].dtype == "float32":
            inputs = ()
        if side == 1:
            outputs = ()
        if operator.name == "TRANSPOSE_CONV" and len(inputs) > 2:
            # The first input of TRANSPOSE_CONV is the shape of its result.
            inputs = (inputs[2], inputs[1], None, *inputs[3:])
        # Axes and shapes are parameters of the operator, not activations.
        numbers = {i: t for i, t in enumerate(inputs) if t is not None and _parameter(operator.name, i, t)}
        inputs = tuple(None if i in numbers else t for i, t in enumerate(inputs))
        options = {**operator.options, PARAMETERS: {i: t.data() for i, t in numbers.items() if t.data is not None}}
        weight, bias = _WEIGHTS.get(operator.name, (None, None))
        node, location = places.get(operator.index, (outputs[0].name if outputs else operator.name, None))
        found.append(Operator(operator.name, node, inputs, outputs, options, location, weight, bias))
    return found


def _parameter(operator: str, index: int, tensor: Tensor) -> bool:
    weight, bias = _WEIGHTS.get(operator, (None, None))
    return index not in (0, weight, bias) and tensor.constant and tensor.dtype in _PARAMETERS and tensor.scale is None


def _tensor(model: Model, tensor: FileTensor) -> Tensor:
    free = tensor.signature or tensor.shape
    shape = tuple(None if n < 0 else int(size) for n, size in zip(free, tensor.shape, strict=True))
    scale = np.asarray(tensor.scale, np.float32) if tensor.scale.size else None
    zero = None if scale is None else np.asarray(tensor.zero_point, np.int64)
    axis = tensor.axis if scale is not None and scale.size > 1 else None
    data = None if tensor.span is None else (lambda: model.array(tensor))
    return Tensor(tensor.name, shape, tensor.dtype, scale, zero, axis, False, data)


def _places(model: Model) -> dict[int, tuple[str, str | None]]:
    """Operator -> the node of the graph and the user's line, in a file that qjax wrote."""
    span = model.metadata.get(METADATA)
    if span is None:
        return {}
    try:
        nodes: list[Any] = document.read(model.data[slice(*span)], "The metadata")["nodes"]
        return {index: (str(node["name"]), node["location"]) for node in nodes for index in range(*node["operators"])}
    except (ValueError, KeyError, TypeError):
        # The metadata is another tool's; without names the check still works.
        return {}
