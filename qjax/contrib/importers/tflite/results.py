"""The outputs of operators: tensors with the quantization parameters that the file states, and known integers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.operands import KNOWN_ELEMENTS, Operands
from qjax.contrib.importers.tflite.values import CODES, FLOATS, NUMBERS, Codes, bad, grid_of, kind_of, volume
from qjax.export.tflite_schema.model import MAX_ELEMENTS, FileTensor, Operator
from qjax.graph.ir import Quantization
from qjax.support.errors import Unsupported


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
