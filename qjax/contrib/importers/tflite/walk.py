"""One reading of a model, for one batch size: operators in order, each through the handler of its name.

A handler gets its operands here (`operands`) and adds nodes with their structure, codes, biases and clamps (`results`);
`qjax.assign.retarget` adds the rounding of a target. Everything without integers is collected, so that one error lists
all of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.chains import Chain
from qjax.contrib.importers.tflite.operands import KNOWN_ELEMENTS, Operands
from qjax.contrib.importers.tflite.run_kernel import Function
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
    volume,
)
from qjax.export.read_errors import reading
from qjax.export.tflite_schema.model import COMPILED, MAX_ELEMENTS, FileTensor, Model, Operator
from qjax.graph.ir import Graph, Quantization
from qjax.support.errors import Problems, Unsupported

# ----------------------------------------------------------------------------------------------------------------------
# The outputs of operators: tensors with the quantization parameters that the file states, and known integers.


class Results(Operands):
    """A draft with the inputs and the outputs of the file's operators."""

    def output(self, operator: Operator, place: int = 0) -> FileTensor:
        """The tensor that an operator computes."""
        if place >= len(operator.outputs):
            raise bad(operator, f"it has no output {place}")
        return self.model.tensors[operator.outputs[place]]

    def name_of(self, operator: Operator) -> str:
        """The name of an operator's first output."""
        return self.names[self.output(operator).index]

    def result(self, operator: Operator, shape: Sequence[int], place: int = 0) -> tuple[str, Quantization]:
        """The tensor of codes that an operator computes, of that shape."""
        tensor = self.output(operator, place)
        if tensor.dtype not in CODES:
            raise Unsupported(f"its output {tensor.name!r} is {kind_of(tensor)}", FLOATS)
        grid = grid_of(tensor)
        return self.add(tensor, tuple(shape), grid), grid

    def integers(
        self,
        operator: Operator,
        shape: Sequence[int],
        dtype: str,
        place: int = 0,
        reach: tuple[int, int] | None = None,
    ) -> str:
        """The tensor of integers or booleans that an operator computes, of that shape; reach: see `Codes`."""
        tensor = self.output(operator, place)
        if tensor.dtype != dtype:
            raise Unsupported(f"its output {tensor.name!r} is {tensor.dtype}", f"Make the model with {dtype} instead")
        name = self.add(tensor, tuple(shape), None)
        if reach is not None:
            self.codes[tensor.index] = dataclasses.replace(self.codes[tensor.index], reach=reach)
        return name

    def moved(self, operator: Operator, op: str, x: Codes, shape: Sequence[int], /, **attributes: Any) -> None:
        """A node that moves the codes of x to the operator's output."""
        if x.grid is None:
            self.node(op, [x], self.integers(operator, shape, x.dtype, reach=x.reach), attributes)
            return
        name, grid = self.result(operator, shape)
        self.same_grid(operator, x, grid)
        self.node(op, [x], name, attributes)

    def inner(self, name: str, shape: Sequence[int]) -> Codes:
        """A tensor that the file does not have, on the grid of the operator's output."""
        own = self.tensors[name]
        return self.between(f"{name}/flat", shape, Codes(name, (), own.dtype, own.quantization))

    def know(self, operator: Operator, value: np.ndarray) -> None:
        """Record known whole numbers as the operator's output."""
        if value.size > KNOWN_ELEMENTS:
            raise Unsupported(f"it returns {value.size} whole numbers", NUMBERS)
        self.known[self.output(operator).index] = value.astype(np.int64)

    def bounded(self, operator: Operator, shape: Sequence[int]) -> None:
        """Refuse a result that is too large."""
        if volume(shape) > MAX_ELEMENTS * self.scale:
            raise bad(operator, f"a result of {list(shape)}")

    def same_grid(self, operator: Operator, x: Codes, grid: Quantization) -> None:
        """Refuse an operator that does not change codes, but states another grid for its output."""
        q = x.quantization
        if q.scale != grid.scale or q.zero_point != grid.zero_point or x.dtype != self.output(operator).dtype:
            raise Unsupported(
                f"its input has the scale and zero point ({q.scale:.6g}, {int(q.zero_point)}) of {x.dtype}, its output "
                f"({grid.scale:.6g}, {int(grid.zero_point)}), which its kernel ignores or computes in floats",
                "Give both one quantizer",
            )


Handler = Callable[["Walk", Operator], None]


@dataclasses.dataclass(frozen=True)
class Reader:
    """The handler of an operator.

    ignores: fields of its options that no kernel of its types reads. Each other field is read by the function, or has
    the schema's default: see `Walk.read`.
    """

    function: Handler
    ignores: tuple[str, ...] = ()


def _into(readers: dict[str, Reader], names: Sequence[str], ignores: tuple[str, ...]) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        readers.update(dict.fromkeys(names, Reader(function, ignores)))
        return function

    return register


READERS: dict[str, Reader] = {}
"""Handlers by the operator's name in the schema."""


def reads(*names: str, ignores: tuple[str, ...] = ()) -> Callable[[Handler], Handler]:
    """Decorates the function that reads operators of these names."""
    return _into(READERS, names, ignores)


FLOAT_READERS: dict[str, Reader] = {}
"""The same for operators on floats."""


def reads_floats(*names: str, ignores: tuple[str, ...] = ()) -> Callable[[Handler], Handler]:
    """Decorates the function that reads operators of these names whose data are floats."""
    return _into(FLOAT_READERS, names, ignores)


PIECE_READERS: dict[str, Reader] = {}
"""The same for operators on floats that come from codes."""


def reads_pieces(*names: str, ignores: tuple[str, ...] = ()) -> Callable[[Handler], Handler]:
    """Decorates the function that reads operators of these names whose data are floats that come from codes."""
    return _into(PIECE_READERS, names, ignores)


WHOLE_READERS: dict[str, Reader] = {}
"""The same for operators whose tensors are all whole numbers."""


def reads_whole_numbers(*names: str, ignores: tuple[str, ...] = ()) -> Callable[[Handler], Handler]:
    """Decorates the function that reads operators of these names whose tensors are all whole numbers."""
    return _into(WHOLE_READERS, names, ignores)


class Walk(Results):
    """A model that is being turned into a graph.

    Args:
      model: the file.
      outputs: indices of the tensors that the graph computes.
      scale: the batch size, as a multiple of the one that the file states.
      batched: the inputs whose first axis is the batch.
    """

    def __init__(self, model: Model, outputs: Sequence[int], scale: int = 1, batched: frozenset[int] = frozenset()):
        super().__init__(model, scale)
        self.inputs: list[str] = []
        self.floats: set[int] = set()
        """Float tensors, with the codes of the QUANTIZE after them or of the DEQUANTIZE before them."""
        self.reals: dict[int, Codes] = {}
        """Float outputs, by their codes."""
        self.marks: dict[str, str] = {}
        """Nodes whose kernels may round in their own way, see `kernels`."""
        self.pieces: dict[int, Any] = {}
        """Float tensors that come from codes, by their index in the file."""
        self.quotients: dict[str, tuple[str, np.ndarray, Codes]] = {}
        """Tensors x / d of whole numbers: x, d, and d as a tensor of the graph."""
        self.multiples: dict[str, tuple[str, np.ndarray, Codes]] = {}
        """Tensors (x / d) d, likewise."""
        self.functions: dict[str, Function | Chain] = {}
        """Nodes that are tables of what the runtime's kernel computes."""
        self.unit_tables: dict[str, dict[str, Function]] = {}
        """Nodes that look up functions of the runtime, by the roles of these constants."""
        self.problems = Problems()
        self._wanted = list(outputs)
        self._batched = batched
        self._sources: dict[int, str] = {}
        self._computed = {index for operator in model.operators for index in operator.outputs}

    def shape_of(self, tensor: FileTensor) -> tuple[int, ...]:
        """The shape of a tensor that the operators determine; that of the file if they do not."""
        found = self.codes.get(tensor.index) or self.pieces.get(tensor.index)
        return tensor.shape if found is None else found.shape

    def run(self) -> Graph:
        """The graph; what could not be read is in `problems`."""
        operators = needed(self.model, self._wanted)
        read = {index for operator in operators for index in operator.inputs}
        for index in self.model.inputs:
            try:
                self._input(self.model.tensors[index], index in read or index in self._wanted)
            except Unsupported as error:
                self.problems.found.append(error.at(f"input {self.names[index]!r}"))
                self._pretend(self.model.tensors[index])
        for operator in operators:
            try:
                self._read(operator)
            except Unsupported as error:
                self.problem(operator, error)
                for index in operator.outputs:
                    # Continue with the following operators, to report their problems too.
                    self._pretend(self.model.tensors[index])
        self._float_inputs()
        outputs = [self._output(index) for index in self._wanted]
        return Graph(self.tensors, tuple(self.nodes), tuple(self.inputs), tuple(outputs), "", self._metadata())

    def _read(self, operator: Operator) -> None:
        """Write the nodes of an operator, and check that nothing was overlooked that might select another kernel.

        Raises:
          Unsupported: it has no integers here, or something that its reader does not know.
        """
        reader = self._reader(operator)
        if operator.name in COMPILED:
            raise Unsupported(*COMPILED[operator.name])
        if reader is None:
            raise Unsupported("qjax has no integers for it", self._cure(operator))
        if operator.unusual:
            raise Unsupported(operator.unusual, self._cure(operator))
        for index in (*operator.inputs, *operator.outputs):
            if index >= 0 and self.model.tensors[index].unusual:
                tensor = self.model.tensors[index]
                raise Unsupported(f"{tensor.name!r} is {tensor.unusual}", self._cure(operator))
        with reading(f"operator {operator.index} {operator.name}", Unsupported):
            reader.function(self, operator)
        for field, value in operator.options.overlooked(reader.ignores).items():
            raise Unsupported(
                f"its option {field!r} is {value!r}, which qjax does not know for operands of these types",
                self._cure(operator),
            )
        unread = [p for p in range(len(operator.inputs)) if self.has(operator, p) and not self.is_seen(operator, p)]
        if unread:
            raise Unsupported(
                f"it has an input {unread[0]} ({self.name_at(operator, unread[0])!r}), which qjax does not know for it",
                self._cure(operator),
            )

    def _reader(self, operator: Operator) -> Reader | None:
        """The handler of an operator, by the type of its inputs."""
        read = (self.model.tensors[index] for index in operator.inputs if index >= 0)
        floats = any(tensor.dtype == "float32" and tensor.span is None for tensor in read)
        if operator.name in PIECE_READERS and any(index in self.pieces for index in operator.inputs):
            return PIECE_READERS[operator.name]
        if floats and operator.name in FLOAT_READERS:
            return FLOAT_READERS[operator.name]
        tensors = [self.model.tensors[index] for index in (*operator.inputs, *operator.outputs) if index >= 0]
        if operator.name in WHOLE_READERS and all(tensor.dtype in WHOLE_NUMBERS for tensor in tensors):
            return WHOLE_READERS[operator.name]
        return READERS.get(operator.name)

    def floats_of(self, operator: Operator, place: int) -> Codes:
        """A computed float tensor."""
        tensor = self.operand(operator, place)
        if tensor.index in self.floats and tensor.index not in self.codes:
            self._sources[tensor.index] = self.add(tensor, self._shape_of_input(tensor), None)
        found = self.codes.get(tensor.index)
        if found is None or found.dtype != "float32":
            raise Unsupported(
                f"its operand {tensor.name!r} is {kind_of(tensor)}",
                "Floats must come from a float input of the model, or from a product of floats with int8 weights",
            )
        return found

    def _metadata(self) -> dict[str, Any]:
        return {"description": self.model.description} if self.model.description else {}

    # ------------------------------------------------------------------ what has no integers

    def problem(self, operator: Operator, error: Unsupported) -> None:
        """Record why an operator cannot be read."""
        name = self.names[operator.outputs[0]] if operator.outputs else ""
        self.problems.found.append(error.at(f"operator {operator.index} {operator.name} ({name!r})"))

    def _cure(self, operator: Operator) -> str:
        found = (i for i in operator.inputs if i >= 0 and i in self._computed)
        names = [self.names[i] for i in found if self.model.tensors[i].dtype in CODES]
        how = f"Read the part before it, with outputs={names}" if names else "Leave it out of the model"
        return f"{how}, and compute it outside"

    def _pretend(self, tensor: FileTensor) -> None:
        """Accept a tensor as the file states it, so that the operators that read it are checked too.

        No graph results any more. A tensor without a scale remains unknown, and its readers report it.
        """
        kinds = (*CODES, *WHOLE_NUMBERS, "bool")
        if tensor.index in self.codes or tensor.dtype not in kinds or tensor.shaped != "yes":
            return
        if tensor.dtype not in CODES:
            self.put(tensor, tensor.shape, None)
        elif tensor.scale.size == 1:
            self.put(tensor, tensor.shape, grid_of(tensor))

    # ------------------------------------------------------------------ inputs and outputs

    def _input(self, tensor: FileTensor, is_read: bool) -> None:
        if tensor.shaped == "no":
            raise Unsupported("the file has no shape of it", "Convert the model again with the shapes of its inputs")
        if not is_read and tensor.dtype not in (*CODES, *INTEGERS):
            raise Unsupported(
                f"nothing reads it, and it is {kind_of(tensor)}",
                "Name the outputs of the model, read(..., outputs=[...]), which leaves it out",
            )
        if tensor.dtype == "float32":
            # The QUANTIZE operator that reads it computes its codes.
            self.floats.add(tensor.index)
            self.inputs.append("")
            return
        shape = self._shape_of_input(tensor)
        grid = grid_of(tensor) if tensor.dtype in CODES and tensor.scale.size else None
        if grid is None and tensor.dtype not in INTEGERS and not self._is_cast(tensor):
            self.problems.add(
                f"input {tensor.name!r}", kind_of(tensor), "Inputs are codes with a scale, int32 indices or booleans"
            )
        self.inputs.append(self.add(tensor, shape, grid))

    def _is_cast(self, tensor: FileTensor) -> bool:
        """Whether it is bytes (an image, for example) that the model first casts to floats."""
        readers = [operator for operator in self.model.operators if tensor.index in operator.inputs]
        return tensor.dtype == "uint8" and bool(readers) and all(operator.name == "CAST" for operator in readers)

    def _shape_of_input(self, tensor: FileTensor) -> tuple[int, ...]:
        """The shape of an input for this batch size."""
        if tensor.index not in self._batched:
            return tensor.shape
        return (tensor.shape[0] * self.scale, *tensor.shape[1:]) if tensor.shape else ()

    def quantized_input(self, operator: Operator, source: FileTensor) -> None:
        """The codes of a float input, as the graph's input."""
        output = self.output(operator)
        name = self.add(output, self._shape_of_input(source), grid_of(output))
        if source.index in self._sources:
            raise Unsupported(f"the float input {source.name!r} has several quantizers", "Give it one")
        self._sources[source.index] = name

    def _float_inputs(self) -> None:
        """Put the codes of float inputs in their places."""
        for place, index in enumerate(self.model.inputs):
            if index in self.floats:
                self.inputs[place] = self._sources.get(index, "")
                if index not in self._sources and not self.problems:
                    name = self.model.tensors[index].name
                    self.problems.add(f"input {name!r}", "floats without a QUANTIZE after it", FLOATS)

    def _output(self, index: int) -> str:
        tensor = self.model.tensors[index]
        found = self.codes.get(index) or self.reals.get(index)
        if found is not None and (found.grid is not None or tensor.dtype in (*INTEGERS, "float32")):
            return found.name
        if not self.problems:
            self.problems.add(f"output {tensor.name!r}", kind_of(tensor), FLOATS)
        return ""


def needed(model: Model, outputs: Sequence[int]) -> list[Operator]:
    """The operators that these tensors need, in order."""
    wanted, found = set(outputs), list[Operator]()
    for operator in reversed(model.operators):
        if wanted & set(operator.outputs):
            found.append(operator)
            wanted.update(operator.inputs)
    return found[::-1]
