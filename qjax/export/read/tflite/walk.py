"""One reading of a model, for one size of its batch: operators in order, each through the handler of its name.

A handler finds its operands here (codes that flow, constants, whole numbers that are known) and adds nodes with their
structure, codes, biases and clamps; `qjax.export.retarget` adds the rounding of a target. What has no integers is
collected, so that one error lists all of it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.export.ir import INTEGER_DTYPES, Graph, Node, Quantization, Tensor
from qjax.export.read.tflite.flatbuffer import damaged
from qjax.export.read.tflite.model import MAX_ELEMENTS, FileTensor, Model, Operator
from qjax.export.read.tflite.trial import Function

Handler = Callable[["Walk", Operator], None]

HANDLERS: dict[str, Handler] = {}
"""By the operator's name in the schema."""

CODES = ("int8", "uint8", "int16")
"""What activations may be."""

WHOLE_NUMBERS = ("int32", "int64")
INTEGERS = ("int32", "bool")
"""What else may flow: indices and masks."""
KNOWN_ELEMENTS = 4096
"""Whole numbers that are computed at reading (shapes, axes) are few."""


class Unsupported(Exception):
    """An operator without integers here: why, and what to do instead."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why, self.cure = why, cure


def reads(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: the function reads operators of these names."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Codes that flow: a tensor of the graph, with its shape for this size of the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Quantization | None

    @property
    def quantization(self) -> Quantization:
        """The grid of codes."""
        if self.grid is None:
            raise Unsupported(f"it computes with the whole numbers {self.name!r}", NUMBERS)
        return self.grid

    @property
    def zero_point(self) -> int:
        """The code of zero."""
        return int(self.quantization.zero_point)


NUMBERS = "Only indices of an embedding may be whole numbers: compute with them before the model"
FLOATS = (
    "Quantize the whole model to integers (full integer quantization with a representative dataset), or read the part "
    "that is: read(..., outputs=[...]) with names of quantized tensors"
)


class Walk:
    """A model on its way to a graph.

    Args:
      model: the file.
      outputs: indices of the tensors that the graph computes.
      scale: how many times the batch that the file states.
      batched: the inputs whose first axis is the batch.
    """

    def __init__(self, model: Model, outputs: Sequence[int], scale: int = 1, batched: frozenset[int] = frozenset()):
        self.model, self.scale = model, scale
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.codes: dict[int, Codes] = {}
        self.known: dict[int, NDArray[Any]] = {}
        self.floats: set[int] = set()
        """Float tensors that stand for the codes of a QUANTIZE behind them, or of a DEQUANTIZE before them."""
        self.reals: dict[int, Codes] = {}
        """Float outputs, by the codes that they stand for."""
        self.marks: dict[str, str] = {}
        """Nodes whose kernels may round in a way of their own, see `kernels`."""
        self.functions: dict[str, Function] = {}
        """Nodes that are tables of what the runtime's kernel computes."""
        self.problems: list[str] = []
        self._wanted = list(outputs)
        self._arrays: dict[int, NDArray[Any]] = {}
        self._names = _unique(model)
        self._used = set(self._names)
        self._batched = batched
        self._sources: dict[int, str] = {}
        self._computed = {index for operator in model.operators for index in operator.outputs}
        self.inputs: list[str] = []

    # ------------------------------------------------------------------ the whole

    def run(self) -> Graph:
        """The graph; what could not be read is in `problems`."""
        operators = needed(self.model, self._wanted)
        read = {index for operator in operators for index in operator.inputs}
        for index in self.model.inputs:
            if index in read or index in self._wanted:
                self._input(self.model.tensors[index])
        for operator in operators:
            try:
                handler = HANDLERS.get(operator.name)
                if handler is None:
                    raise Unsupported("qjax has no integers for it", self._cure(operator))
                for index in (*operator.inputs, *operator.outputs):
                    if index >= 0 and self.model.tensors[index].unusual:
                        tensor = self.model.tensors[index]
                        raise Unsupported(f"{tensor.name!r} is {tensor.unusual}", self._cure(operator))
                handler(self, operator)
            except Unsupported as error:
                self.problem(operator, error)
                for index in operator.outputs:
                    # what stands behind it is still looked at
                    self._pretend(self.model.tensors[index])
        self._float_inputs(read)
        outputs = [self._output(index) for index in self._wanted]
        return Graph(self.tensors, tuple(self.nodes), tuple(self.inputs), tuple(outputs), "", self._metadata())

    def problem(self, operator: Operator, error: Unsupported) -> None:
        """Collect what an operator lacks."""
        name = self._names[operator.outputs[0]] if operator.outputs else ""
        self.problems.append(f"operator {operator.index} {operator.name} ({name!r}): {error.why}. {error.cure}")

    def _metadata(self) -> dict[str, Any]:
        return {"description": self.model.description} if self.model.description else {}

    def _cure(self, operator: Operator) -> str:
        found = (i for i in operator.inputs if i >= 0 and i in self._computed)
        names = [self._names[i] for i in found if self.model.tensors[i].dtype in CODES]
        how = f"Read the part before it, with outputs=[{names[0]!r}]" if names else "Leave it out of the model"
        return f"{how}, and compute it outside"

    def _input(self, tensor: FileTensor) -> None:
        if tensor.dtype == "float32":
            # its codes are those of the QUANTIZE that reads it
            self.floats.add(tensor.index)
            self.inputs.append("")
            return
        shape = self.scaled(tensor) if tensor.index in self._batched else tensor.shape
        grid = self.grid(tensor) if tensor.dtype in CODES and tensor.scale.size else None
        if grid is None and tensor.dtype not in INTEGERS:
            self.problems.append(
                f"input {tensor.name!r}: {_kind(tensor)}. Inputs are codes with a scale, int32 indices or booleans"
            )
        self.inputs.append(self.add(tensor, shape, grid))

    def scaled(self, tensor: FileTensor) -> tuple[int, ...]:
        """The shape of an input for this size of the batch."""
        return (tensor.shape[0] * self.scale, *tensor.shape[1:]) if tensor.shape else ()

    def quantized_input(self, operator: Operator, source: FileTensor) -> None:
        """The codes of a float input as the graph's input."""
        output = self.output(operator)
        shape = self.scaled(source) if source.index in self._batched else source.shape
        name = self.add(output, shape, self.grid(output))
        if source.index in self._sources:
            raise Unsupported(f"the float input {source.name!r} has several quantizers", "Give it one")
        self._sources[source.index] = name

    def _output(self, index: int) -> str:
        tensor = self.model.tensors[index]
        found = self.codes.get(index) or self.reals.get(index)
        if found is not None and (found.grid is not None or tensor.dtype in INTEGERS):
            return found.name
        if not self.problems:
            self.problems.append(f"output {tensor.name!r}: {_kind(tensor)}. {FLOATS}")
        return ""

    # ------------------------------------------------------------------ operands

    def codes_of(self, operator: Operator, place: int) -> Codes:
        """An operand that flows, or a constant of codes as a tensor of the graph."""
        tensor = self.operand(operator, place)
        if tensor.index in self.codes:
            return self.codes[tensor.index]
        if tensor.index in self.known or (tensor.span is not None and tensor.dtype in WHOLE_NUMBERS):
            raise Unsupported(f"its operand {tensor.name!r} is whole numbers", NUMBERS)
        if tensor.span is None or tensor.dtype not in CODES:
            raise Unsupported(f"its operand {tensor.name!r} is {_kind(tensor)}", FLOATS)
        grid = self.grid(tensor)
        value = self.array(tensor)
        self.tensors[self._names[tensor.index]] = Tensor(
            self._names[tensor.index], tensor.shape, tensor.dtype, grid, value
        )
        found = Codes(self._names[tensor.index], tensor.shape, tensor.dtype, grid)
        self.codes[tensor.index] = found
        return found

    def flowing(self, operator: Operator, place: int) -> Codes:
        """An operand of codes, or of int32 or booleans that stand for themselves; a constant is one of the graph."""
        tensor = self.operand(operator, place)
        if tensor.index in self.codes or tensor.dtype not in INTEGERS:
            return self.codes_of(operator, place)
        if tensor.index in self.known:
            value = self.known[tensor.index]
        elif tensor.span is not None:
            value = self.array(tensor)
        else:
            raise Unsupported(f"its operand {tensor.name!r} is {_kind(tensor)}", FLOATS)
        if np.any(value != value.astype(tensor.dtype)):
            raise Unsupported(f"{tensor.name!r} does not fit {tensor.dtype}", NUMBERS)
        name = self.constant(self._names[tensor.index], value.astype(tensor.dtype))
        return Codes(name, tuple(value.shape), tensor.dtype, None)

    def operand(self, operator: Operator, place: int) -> FileTensor:
        """The tensor at a place of the inputs."""
        if place >= len(operator.inputs) or operator.inputs[place] < 0:
            raise damaged(f"operator {operator.index} ({operator.name}) has no input {place}")
        return self.model.tensors[operator.inputs[place]]

    def has(self, operator: Operator, place: int) -> bool:
        """Whether there is an operand at that place."""
        return place < len(operator.inputs) and operator.inputs[place] >= 0

    def array(self, tensor: FileTensor) -> NDArray[Any]:
        """The data of a constant."""
        if tensor.index not in self._arrays:
            self._arrays[tensor.index] = self.model.array(tensor)
        return self._arrays[tensor.index]

    def numbers(self, operator: Operator, place: int) -> NDArray[Any]:
        """An operand of whole numbers that are known: axes, sizes."""
        tensor = self.operand(operator, place)
        found = self.known_numbers(tensor)
        if found is None:
            raise Unsupported(
                f"its operand {tensor.name!r} is computed from the data", "Give it as a constant when you make the file"
            )
        return found

    def known_numbers(self, tensor: FileTensor) -> NDArray[Any] | None:
        """Whole numbers that are known at reading, or None."""
        if tensor.index in self.known:
            return self.known[tensor.index]
        if tensor.dtype not in WHOLE_NUMBERS or (tensor.span is None and tensor.size):
            return None
        if tensor.size > KNOWN_ELEMENTS:
            raise Unsupported(f"{tensor.name!r} has {tensor.size} whole numbers", NUMBERS)
        return self.array(tensor) if tensor.span is not None else np.zeros(tensor.shape, tensor.dtype)

    def numbers_of(self, operator: Operator, place: int) -> NDArray[Any] | None:
        """An operand, where it is whole numbers that are known; None for codes."""
        return self.known_numbers(self.operand(operator, place))

    def know(self, operator: Operator, value: NDArray[Any]) -> None:
        """State whole numbers as the operator's output."""
        if value.size > KNOWN_ELEMENTS:
            raise Unsupported(f"it makes {value.size} whole numbers", NUMBERS)
        self.known[self.output(operator).index] = value.astype(np.int64)

    def stated(self, operator: Operator, place: int) -> tuple[int, ...] | None:
        """The shape that the file states for an operand that flows; None for numbers and constants."""
        tensor = self.operand(operator, place)
        return tensor.shape if tensor.index in self.codes else None

    def bounded(self, operator: Operator, shape: Sequence[int]) -> None:
        """Refuse a result that is too large."""
        if volume(shape) > MAX_ELEMENTS * self.scale:
            raise damaged(f"operator {operator.index} ({operator.name}): a result of {list(shape)}")

    def grid(self, tensor: FileTensor) -> Quantization:
        """The one scale and zero point of a tensor of codes."""
        if tensor.scale.size != 1:
            what = "no scale" if not tensor.scale.size else f"{tensor.scale.size} scales"
            raise Unsupported(f"{tensor.name!r} has {what}", FLOATS)
        low, high = code_range(tensor)
        scale, zero_point = scales(tensor, low, high)
        return Quantization(scale[0], zero_point[0], low, high)

    # ------------------------------------------------------------------ results

    def output(self, operator: Operator, place: int = 0) -> FileTensor:
        """The tensor that an operator computes."""
        if place >= len(operator.outputs):
            raise damaged(f"operator {operator.index} ({operator.name}) has no output {place}")
        return self.model.tensors[operator.outputs[place]]

    def add(self, tensor: FileTensor, shape: tuple[int, ...], grid: Quantization | None) -> str:
        """A tensor of the graph for one of the file; its shape must be the file's, but for the batch."""
        name = self._names[tensor.index]
        if self.scale == 1 and shape != tensor.shape:
            raise damaged(f"tensor {tensor.name[:60]!r} is stated as {tensor.shape}, and computed as {shape}")
        self.tensors[name] = Tensor(name, shape, tensor.dtype, grid)
        self.codes[tensor.index] = Codes(name, shape, tensor.dtype, grid)
        return name

    def result(self, operator: Operator, shape: Sequence[int], place: int = 0) -> tuple[str, Quantization]:
        """The tensor of codes that an operator computes, of that shape."""
        tensor = self.output(operator, place)
        if tensor.dtype not in CODES:
            raise Unsupported(f"its output {tensor.name!r} is {_kind(tensor)}", FLOATS)
        grid = self.grid(tensor)
        return self.add(tensor, tuple(shape), grid), grid

    def integers(self, operator: Operator, shape: Sequence[int], dtype: str, place: int = 0) -> str:
        """The tensor of integers or booleans that an operator computes, of that shape."""
        tensor = self.output(operator, place)
        if tensor.dtype != dtype:
            raise Unsupported(f"its output {tensor.name!r} is {tensor.dtype}", f"Make the model with {dtype} there")
        return self.add(tensor, tuple(shape), None)

    def constant(self, name: str, value: NDArray[Any], grid: Quantization | None = None) -> str:
        """A constant of the graph; returns its name."""
        name = self.fresh(name)
        self.tensors[name] = Tensor(name, tuple(value.shape), str(value.dtype), grid, value)
        return name

    def held(self, operator: Operator, place: int, value: NDArray[Any], grid: Quantization | None = None) -> str:
        """A constant made of an operand, under its name; one for all operators that read it alike."""
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

    def between(self, name: str, shape: Sequence[int], of: Codes) -> Codes:
        """A tensor that the file does not have, on the grid of `of`."""
        name = self.fresh(name)
        self.tensors[name] = Tensor(name, tuple(shape), of.dtype, of.grid)
        return Codes(name, tuple(shape), of.dtype, of.grid)

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

    def moved(self, operator: Operator, op: str, x: Codes, shape: Sequence[int], /, **attributes: Any) -> None:
        """A node that moves the codes of x to the operator's output."""
        if x.grid is None:
            self.node(op, [x], self.integers(operator, shape, x.dtype), attributes)
            return
        name, grid = self.result(operator, shape)
        self.same_grid(operator, x, grid)
        self.node(op, [x], name, attributes)

    def reshaped(self, x: Codes, shape: Sequence[int], name: str) -> Codes:
        """x in another shape."""
        if tuple(shape) == x.shape:
            return x
        flat = self.between(name, shape, x)
        self.node("reshape", [x], flat.name, {"shape": list(shape)})
        return flat

    def ranked(self, x: Codes, rank: int, name: str) -> Codes:
        """x with sizes of 1 before its own, so that it has that many axes."""
        shape = (1,) * (rank - len(x.shape)) + x.shape
        value = self.tensors[x.name].value
        if shape == x.shape or value is None:
            return self.reshaped(x, shape, f"{name}/operand")
        own = self.constant(x.name, np.asarray(value).reshape(shape), x.grid)
        return Codes(own, shape, x.dtype, x.grid)

    def same_grid(self, operator: Operator, x: Codes, grid: Quantization) -> None:
        """Refuse an operator that keeps codes, and states another grid for them."""
        q = x.quantization
        if q.scale != grid.scale or q.zero_point != grid.zero_point or x.dtype != self.output(operator).dtype:
            raise Unsupported(
                f"its input stands on the grid ({q.scale:.6g}, {int(q.zero_point)}) of {x.dtype}, its output on "
                f"({grid.scale:.6g}, {int(grid.zero_point)}), which its kernel ignores or computes in floats",
                "Give both one quantizer",
            )

    def _float_inputs(self, read: set[int]) -> None:
        """Put the codes of float inputs in their places."""
        listed = [index for index in self.model.inputs if index in read or index in self._wanted]
        for place, index in enumerate(listed):
            if index in self.floats:
                self.inputs[place] = self._sources.get(index, "")
                if index not in self._sources and not self.problems:
                    name = self.model.tensors[index].name
                    self.problems.append(f"input {name!r}: floats without a QUANTIZE behind it. {FLOATS}")

    def fresh(self, name: str) -> str:
        """A name that nothing has."""
        unique, count = name, 1
        while unique in self._used:
            count += 1
            unique = f"{name}#{count}"
        self._used.add(unique)
        return unique

    def inner(self, operator: Operator, name: str, shape: Sequence[int]) -> Codes:
        """A tensor that the file does not have, on the grid of the operator's output."""
        own = self.tensors[name]
        return self.between(f"{name}/flat", shape, Codes(name, (), own.dtype, own.quantization))

    def name_at(self, operator: Operator, place: int) -> str:
        """The name of an operand."""
        return self._names[self.operand(operator, place).index]

    def name_of(self, operator: Operator) -> str:
        """The name of an operator's first output."""
        return self._names[self.output(operator).index]

    def _pretend(self, tensor: FileTensor) -> None:
        if tensor.dtype in CODES and tensor.index not in self.codes:
            one = Quantization(np.ones((), np.float32), np.zeros((), np.int32), *code_range(tensor))
            self.codes[tensor.index] = Codes(self._names[tensor.index], tensor.shape, tensor.dtype, one)
        elif tensor.dtype in (*WHOLE_NUMBERS, "bool") and tensor.index not in self.codes:
            self.codes[tensor.index] = Codes(self._names[tensor.index], tensor.shape, tensor.dtype, None)


def needed(model: Model, outputs: Sequence[int]) -> list[Operator]:
    """The operators that these tensors need, in order."""
    wanted, found = set(outputs), list[Operator]()
    for operator in reversed(model.operators):
        if wanted & set(operator.outputs):
            found.append(operator)
            wanted.update(operator.inputs)
    return found[::-1]


def scales(tensor: FileTensor, low: int, high: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The scales and zero points of a tensor, float32 and int32, one each."""
    scale, zero_point = tensor.scale, tensor.zero_point
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise damaged(f"tensor {tensor.name[:60]!r}: a scale that is not finite and positive")
    if zero_point.size not in (1, scale.size):
        raise damaged(f"tensor {tensor.name[:60]!r}: {scale.size} scales and {zero_point.size} zero points")
    if ((zero_point < low) | (zero_point > high)).any():
        raise damaged(f"tensor {tensor.name[:60]!r}: a zero point out of [{low}, {high}]")
    return scale, np.broadcast_to(zero_point, scale.shape).astype(np.int32)


def code_range(tensor: FileTensor) -> tuple[int, int]:
    """The codes that a tensor's type can hold."""
    if tensor.dtype == "int4":
        return -8, 7
    if tensor.dtype not in INTEGER_DTYPES:
        raise Unsupported(f"{tensor.name!r} is {_kind(tensor)}", FLOATS)
    info = np.iinfo(tensor.dtype)
    return int(info.min), int(info.max)


def _kind(tensor: FileTensor) -> str:
    without = "" if tensor.scale.size or tensor.dtype not in CODES else " without a scale"
    return f"{tensor.dtype}{without}"


def _unique(model: Model) -> list[str]:
    """A name per tensor: its own, with a number behind where another has it already."""
    found: list[str] = []
    taken: dict[str, int] = {}
    used: set[str] = set()
    for tensor in model.tensors:
        name = tensor.name
        while name in used:
            taken[tensor.name] = taken.get(tensor.name, 1) + 1
            name = f"{tensor.name}#{taken[tensor.name]}"
        used.add(name)
        found.append(name)
    return found


def axis_of(number: int, rank: int, operator: Operator) -> int:
    """An axis, counted from the end where it is negative."""
    if not -rank <= number < rank:
        raise damaged(f"operator {operator.index} ({operator.name}): axis {number} of {rank}")
    return number % rank


def axes_of(numbers: NDArray[Any], rank: int, operator: Operator) -> list[int]:
    """The different axes of a vector, in order."""
    return sorted({axis_of(int(n), rank, operator) for n in numbers.reshape(-1)})


def volume(shape: Sequence[int]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)
