"""Axes of a shape, and how much it holds."""

import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from qjax.export.read.tflite.errors import bad
from qjax.export.read.tflite.model import Operator


def axis_of(number: int, rank: int, operator: Operator) -> int:
    """An axis, counted from the end where it is negative."""
    if not -rank <= number < rank:
        raise bad(operator, f"axis {number} of {rank}")
    return number % rank


def axes_of(numbers: NDArray[Any], rank: int, operator: Operator) -> list[int]:
    """The different axes of a vector, in order."""
    return sorted({axis_of(int(n), rank, operator) for n in numbers.reshape(-1)})


def volume(shape: Sequence[int]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)
