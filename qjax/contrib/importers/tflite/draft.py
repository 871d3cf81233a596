"""The graph under construction: its tensors and nodes, under names that are unique in the file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.values import Codes
from qjax.export.tflite_schema.flatbuffer import damaged
from qjax.export.tflite_schema.model import MAX_ELEMENTS, FileTensor, Model
from qjax.graph.ir import Node, Quantization, Tensor
from qjax.support.names import Names


class Draft:
    """Tensors and nodes, in order.

    Args:
      model: the file.
      scale: the batch size, as a multiple of the one that the file states.
    """

    def __init__(self, model: Model, scale: int) -> None:
        self.model, self.scale = model, scale
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.codes: dict[int, Codes] = {}
        """Tensors of the graph, by their index in the file."""
        self._names = Names(between="#")
        self.names = [self._names.fresh(tensor.name) for tensor in model.tensors]
        """Their names, by the same index."""

    def fresh(self, name: str) -> str:
        """A name that nothing has so far."""
        return self._names.fresh(name)

    def add(self, tensor: FileTensor, shape: tuple[int, ...], grid: Quantization | None) -> str:
        """A tensor of the graph for one of the file; its shape must be the file's, except for the batch."""
        if self.scale == 1 and shape != tensor.shape and tensor.shaped == "yes":
            raise damaged(f"tensor {tensor.name[:60]!r} is stated as {tensor.shape}, and computed as {shape}")
        if math.prod(shape) > MAX_ELEMENTS * self.scale:
            raise damaged(f"tensor {tensor.name[:60]!r}: the shape {shape} has more than {MAX_ELEMENTS} elements")
        return self.put(tensor, shape, grid)

    def put(self, tensor: FileTensor, shape: tuple[int, ...], grid: Quantization | None) -> str:
        """A tensor of the graph for one of the file, with the given shape."""
        name = self.names[tensor.index]
        self.tensors[name] = Tensor(name, shape, tensor.dtype, grid)
        self.codes[tensor.index] = Codes(name, shape, tensor.dtype, grid)
        return name

    def constant(self, name: str, value: np.ndarray, grid: Quantization | None = None) -> str:
        """A constant of the graph; returns its name."""
        name = self.fresh(name)
        self.tensors[name] = Tensor(name, tuple(value.shape), str(value.dtype), grid, value)
        return name

    def between(self, name: str, shape: Sequence[int], of: Codes) -> Codes:
        """A tensor that the file does not have, on the grid of `of`."""
        name = self.fresh(name)
        self.tensors[name] = Tensor(name, tuple(shape), of.dtype, of.grid)
        return Codes(name, tuple(shape), of.dtype, of.grid, of.reach)

    def node(
        self,
        op: str,
        inputs: Sequence[Codes],
        output: str,
        attributes: Mapping[str, Any] | None = None,
        constants: Mapping[str, str] | None = None,
    ) -> None:
        """Append a node, which takes the name of its output."""
        names = tuple(x.name for x in inputs)
        self.nodes.append(Node(output, op, names, output, dict(constants or {}), dict(attributes or {})))

    def reshaped(self, x: Codes, shape: Sequence[int], name: str) -> Codes:
        """x in another shape."""
        if tuple(shape) == x.shape:
            return x
        flat = self.between(name, shape, x)
        self.node("reshape", [x], flat.name, {"shape": list(shape)})
        return flat

    def ranked(self, x: Codes, rank: int, name: str) -> Codes:
        """x with axes of size 1 in front, so that it has that many axes."""
        shape = (1,) * (rank - len(x.shape)) + x.shape
        value = self.tensors[x.name].value
        if shape == x.shape or value is None:
            return self.reshaped(x, shape, f"{name}/operand")
        own = self.constant(x.name, np.asarray(value).reshape(shape), x.grid)
        return Codes(own, shape, x.dtype, x.grid)
