"""The inputs and outputs of operators: codes with their scale and zero point, axes, and the errors about them."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qjax.export.read_errors import SCALES, ReadError, usable
from qjax.export.tflite_schema.flatbuffer import damaged
from qjax.export.tflite_schema.model import FileTensor, Operator
from qjax.graph.ir import INTEGER_DTYPES, Quantization
from qjax.support.errors import Unsupported

NUMBERS = "Only indices of an embedding may be whole numbers: compute with them outside, before the model"
FLOATS = (
    "Quantize the whole model to integers (full integer quantization with a representative dataset), or read the part "
    "that is: read(..., outputs=[...]) with names of quantized tensors"
)


def bad(operator: Operator, what: str) -> ReadError:
    """The error for an operator that cannot be as the file states."""
    return damaged(f"operator {operator.index} ({operator.name}): {what}")


def axis_of(number: int, rank: int, operator: Operator) -> int:
    """An axis, counted from the end if it is negative."""
    if not -rank <= number < rank:
        raise bad(operator, f"axis {number} of {rank}")
    return number % rank


def axes_of(numbers: np.ndarray, rank: int, operator: Operator) -> list[int]:
    """The different axes of a vector, in order."""
    return sorted({axis_of(int(n), rank, operator) for n in numbers.reshape(-1)})


def volume(shape: Sequence[int]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)


CODES = ("int8", "uint8", "int16")
"""The types that activations may have."""

WHOLE_NUMBERS = ("int32", "int64")
INTEGERS = ("int32", "bool")
"""The other types of computed tensors: indices and masks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Computed codes: a tensor of the graph, with its shape for this batch size.

    reach: for whole numbers, the lowest and the highest that it can contain.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Quantization | None
    reach: tuple[int, int] = (-(2**31), 2**31 - 1)

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


def grid_of(tensor: FileTensor) -> Quantization:
    """The only scale and zero point of a tensor of codes."""
    if tensor.scale.size != 1:
        what = "no scale" if not tensor.scale.size else f"{tensor.scale.size} scales"
        raise Unsupported(f"{tensor.name!r} has {what}", FLOATS)
    low, high = code_range(tensor)
    scale, zero_point = scales(tensor, low, high)
    return Quantization(scale[0], zero_point[0], low, high)


def scales(tensor: FileTensor, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """The scales and zero points of a tensor, float32 and int32, the same number of both."""
    scale, zero_point = tensor.scale, tensor.zero_point
    if not usable(scale):
        raise damaged(f"tensor {tensor.name[:60]!r}: {SCALES}, got {scale[:4]}")
    if zero_point.size not in (1, scale.size):
        raise damaged(f"tensor {tensor.name[:60]!r}: {scale.size} scales and {zero_point.size} zero points")
    if ((zero_point < low) | (zero_point > high)).any():
        raise damaged(f"tensor {tensor.name[:60]!r}: a zero point out of [{low}, {high}]")
    return scale, np.broadcast_to(zero_point, scale.shape).astype(np.int32)


def code_range(tensor: FileTensor) -> tuple[int, int]:
    """The codes of a tensor's type."""
    if tensor.dtype == "int4":
        return -8, 7
    if tensor.dtype not in INTEGER_DTYPES:
        raise Unsupported(f"{tensor.name!r} is {kind_of(tensor)}", FLOATS)
    info = np.iinfo(tensor.dtype)
    return int(info.min), int(info.max)


def kind_of(tensor: FileTensor) -> str:
    """A description of a tensor."""
    without = "" if tensor.scale.size or tensor.dtype not in CODES else " without a scale"
    return f"{tensor.dtype}{without}"
