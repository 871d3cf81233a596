"""Messages about operators that are damaged, or that have no integer form here."""

from qjax.export.read.errors import ReadError
from qjax.export.read.tflite.flatbuffer import damaged
from qjax.export.read.tflite.model import Operator

NUMBERS = "Only indices of an embedding may be whole numbers: compute with them before the model"
FLOATS = (
    "Quantize the whole model to integers (full integer quantization with a representative dataset), or read the part "
    "that is: read(..., outputs=[...]) with names of quantized tensors"
)


def bad(operator: Operator, what: str) -> ReadError:
    """The error for an operator that cannot be what the file states."""
    return damaged(f"operator {operator.index} ({operator.name}): {what}")
