"""The inputs of operators: computed codes, constants, and known integers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.values import (
    CODES,
    FLOATS,
    INTEGERS,
    NUMBERS,
    WHOLE_NUMBERS,
    Codes,
    bad,
    grid_of,
    kind_of,
)
from qjax.export.tflite_schema.flatbuffer import damaged
from qjax.export.tflite_schema.model import MAX_ELEMENTS, FileTensor, Model, Operator
from qjax.graph.ir import Node, Quantization, Tensor
from qjax.support.errors import Unsupported
from qjax.support.names import Names

# ----------------------------------------------------------------------------------------------------------------------
# The graph under construction: its tensors and nodes, under names that are unique in the file.


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


KNOWN_ELEMENTS = 4096
"""Whole numbers that are computed while reading (shapes, axes) are at most this many."""


class Operands(Draft):
    """A draft with the inputs of the file's operators."""

    def __init__(self, model: Model, scale: int) -> None:
        super().__init__(model, scale)
        self.known: dict[int, np.ndarray] = {}
        """Whole numbers that operators compute, by a tensor's index in the file."""
        self._arrays: dict[int, np.ndarray] = {}
        self._seen: set[tuple[int, int]] = set()

    def operand(self, operator: Operator, place: int) -> FileTensor:
        """The tensor at a place of the inputs."""
        if place >= len(operator.inputs) or operator.inputs[place] < 0:
            raise bad(operator, f"it has no input {place}")
        self._seen.add((operator.index, place))
        return self.model.tensors[operator.inputs[place]]

    def has(self, operator: Operator, place: int) -> bool:
        """Whether there is an operand at that place."""
        return place < len(operator.inputs) and operator.inputs[place] >= 0

    def is_seen(self, operator: Operator, place: int) -> bool:
        """Whether anybody asked for the tensor at a place of the inputs."""
        return (operator.index, place) in self._seen

    def name_at(self, operator: Operator, place: int) -> str:
        """The name of an operand."""
        return self.names[self.operand(operator, place).index]

    def stated(self, operator: Operator, place: int) -> tuple[int, ...] | None:
        """The shape that the file states for an operand that is computed; None for numbers and constants."""
        tensor = self.operand(operator, place)
        return tensor.shape if tensor.index in self.codes else None

    def array(self, tensor: FileTensor) -> np.ndarray:
        """The data of a constant."""
        if tensor.index not in self._arrays:
            self._arrays[tensor.index] = self.model.array(tensor)
        return self._arrays[tensor.index]

    # ------------------------------------------------------------------ as tensors of the graph

    def codes_of(self, operator: Operator, place: int) -> Codes:
        """An operand of codes, with their scale and zero point."""
        found = self.tensor_of(operator, place)
        if found.grid is None:
            name = self.operand(operator, place).name
            raise Unsupported(
                f"its operand {name!r} is whole numbers ({found.dtype}), where codes are expected", NUMBERS
            )
        return found

    def tensor_of(self, operator: Operator, place: int) -> Codes:
        """An operand that is computed (codes, or plain integers), or a constant of codes."""
        tensor = self.operand(operator, place)
        if tensor.index in self.codes:
            return self.codes[tensor.index]
        if tensor.index in self.known or (tensor.span is not None and tensor.dtype in WHOLE_NUMBERS):
            raise Unsupported(f"its operand {tensor.name!r} is whole numbers", NUMBERS)
        if tensor.span is None or tensor.dtype not in CODES:
            raise Unsupported(f"its operand {tensor.name!r} is {kind_of(tensor)}", FLOATS)
        grid = grid_of(tensor)
        value = self.array(tensor)
        self.tensors[self.names[tensor.index]] = Tensor(
            self.names[tensor.index], tensor.shape, tensor.dtype, grid, value
        )
        found = Codes(self.names[tensor.index], tensor.shape, tensor.dtype, grid)
        self.codes[tensor.index] = found
        return found

    def flowing(self, operator: Operator, place: int) -> Codes:
        """An operand of codes, or of plain int32 or booleans; a constant becomes a tensor of the graph."""
        tensor = self.operand(operator, place)
        if tensor.index in self.codes or tensor.dtype not in INTEGERS:
            return self.tensor_of(operator, place)
        if tensor.index in self.known:
            value = self.known[tensor.index]
        elif tensor.span is not None:
            value = self.array(tensor)
        else:
            raise Unsupported(f"its operand {tensor.name!r} is {kind_of(tensor)}", FLOATS)
        if np.any(value != value.astype(tensor.dtype)):
            raise Unsupported(f"{tensor.name!r} does not fit {tensor.dtype}", NUMBERS)
        name = self.constant(self.names[tensor.index], value.astype(tensor.dtype))
        reach = (int(value.min()), int(value.max())) if value.size else (0, 0)
        return Codes(name, tuple(value.shape), tensor.dtype, None, reach)

    def held(self, operator: Operator, place: int, value: np.ndarray, grid: Quantization | None = None) -> str:
        """A constant made from an operand, under its name; operators that read it in the same way share it."""
        name = self.name_at(operator, place)
        before = self.tensors.get(name)
        if before is None:
            self.tensors[name] = Tensor(name, tuple(value.shape), str(value.dtype), grid, value)
            return name
        alike = before.value is not None and before.dtype == str(value.dtype) and np.array_equal(before.value, value)
        same = alike and (grid is None) == (before.quantization is None)
        if same and grid is not None and before.quantization is not None:
            same = grid.axes == before.quantization.axes
        return name if same else self.constant(name, value, grid)

    # ------------------------------------------------------------------ as numbers

    def numbers(self, operator: Operator, place: int) -> np.ndarray:
        """An operand of known whole numbers, such as axes or sizes."""
        tensor = self.operand(operator, place)
        found = self.known_numbers(tensor)
        if found is None:
            raise Unsupported(
                f"its operand {tensor.name!r} is computed from the data", "Give it as a constant when you make the file"
            )
        return found

    def known_numbers(self, tensor: FileTensor) -> np.ndarray | None:
        """Whole numbers that are known while reading, or None."""
        if tensor.index in self.known:
            return self.known[tensor.index]
        if tensor.dtype not in WHOLE_NUMBERS or (tensor.span is None and tensor.size):
            return None
        if tensor.size > KNOWN_ELEMENTS:
            raise Unsupported(f"{tensor.name!r} has {tensor.size} whole numbers", NUMBERS)
        return self.array(tensor) if tensor.span is not None else np.zeros(tensor.shape, tensor.dtype)

    def numbers_of(self, operator: Operator, place: int) -> np.ndarray | None:
        """An operand if it is known whole numbers; None for codes."""
        return self.known_numbers(self.operand(operator, place))
