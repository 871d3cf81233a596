"""The forms that a program's value has during lowering. `Float` is a float result before it reaches a quantizer."""

import dataclasses
from typing import Any

from qjax.graph.float_parts import Float
from qjax.graph.unsupported import stacked
from qjax.tracing import Equation, Value

Step = tuple[int, ...]
"""The iteration of every scan around an equation, outermost first."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant: an array, a tracer or, if only the structure is needed, a `jax.ShapeDtypeStruct`."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Codes:
    """A tensor of codes, or of plain integers and booleans."""

    tensor: str


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Sums that no quantizer has met yet. channels: pairs of its axis and the weight's, see `Op.channels`.

    routes: of the products of rows with all experts, the tensors that choose among their codes, see `lower.experts`.
    """

    tensor: str
    channels: tuple[tuple[int, int], ...]
    routes: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Real:
    """A float input before any quantizer."""

    name: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stacked output of a scan whose parts have different quantization parameters.

    A quantizer after the scan requantizes them to the same ones.
    """

    eqn: Equation
    parts: tuple["Found | None", ...]


Found = Constant | Codes | Accumulator | Real | Stack | Float
"""The lowered form of a value."""
Env = dict[Value, Found]
"""The lowered forms of the values of a program, as far as it has been lowered."""


def get(env: Env, value: Value) -> Found:
    """The lowered form of a value for an equation that reads it."""
    found = Constant(value.constant) if value.constant is not None else env[value]
    if isinstance(found, Stack):
        raise stacked(found.eqn)
    return found


def tensor_of(found: Found) -> str:
    """The tensor of a value that is not constant."""
    assert isinstance(found, Codes | Accumulator)
    return found.tensor


def value_of(found: Found) -> Any:
    """The array of a constant."""
    assert isinstance(found, Constant)
    return found.value
