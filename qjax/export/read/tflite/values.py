"""The values that operators read and compute."""

import dataclasses

from qjax.export.read.tflite.errors import NUMBERS
from qjax.graph.ir import Quantization
from qjax.problems import Unsupported

CODES = ("int8", "uint8", "int16")
"""What activations may be."""

WHOLE_NUMBERS = ("int32", "int64")
INTEGERS = ("int32", "bool")
"""What else may flow: indices and masks."""


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
