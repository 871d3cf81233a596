"""What a formula is: the way in which a runtime computes an operation without weights.

Additions, products, averages and requantizations have no accumulator that a requantization rule could finish. Each
runtime has its own formula with several roundings. A formula turns scales and zero points into int32 constants
(`prepare`), and codes into codes (`kernel`). A `Target` chooses one per operation.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Array = jax.Array | np.ndarray

OPS = ("add", "subtract", "multiply", "matmul", "rescale", "mean", "average_pool")
"""The operations that a formula may compute. "matmul" is a product of two activations, given its accumulator."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a formula may read of one node; scales and zero points may be tracers.

    op: one of `OPS`. scales: float32, per input tensor. zero_points: int32, per input tensor. y_scale, y_zero_point: of
    the output. dtype: of the output's codes. count: how many elements one output averages, int or int32 array. factor:
    of "matmul", see `Target.scaled_matmul`; the first scale is float32(scales[0] factor).
    """

    op: str
    scales: tuple[Any, ...]
    zero_points: tuple[Any, ...]
    y_scale: Any
    y_zero_point: Any
    dtype: str
    count: Any = 1
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Formula:
    """The way in which a runtime computes some operations.

    Attributes:
      name: how targets and nodes refer to it.
      ops: the operations for which it is meant.
      prepare: setting -> int32 arrays by role, with the same bits on the host and inside a trace.
      kernel: (operands, constants, attributes) -> int32 codes, zero point included, saturated to int32 but not yet to
        the range of the codes. operands: the centred codes (code - zero point) of each input as int32; for averages
        the sum of centred codes over the window, for "matmul" the accumulator. constants: the roles of `prepare`, and
        y_zero_point, zero_point0, zero_point1, count (for averages).
      elsewhere: the name of the formula for a mean over other axes than height and width of an NHWC tensor.
      same_grid: whether the formula is defined only if output and input have the same scale and zero point.
      windows: whether an average depends on the order of its summands. Then its operand is not their sum but the
        centred codes themselves, stacked on a new leading axis in the window's order (rows, then columns), with zeros
        for padding.
      whole: the name of the formula for a window that is the whole image, without padding; it takes the sum.
      widths: the sets of bytes of a code, inputs and output together, for which the runtime has an operation; None for
        any. For others the exact sum is used, because intermediate numbers may overflow their type.
      factors: of "matmul": whether `prepare` takes `Setting.factor`. A target with `scaled_matmul` needs one that does.
      pointwise: whether an element of the result depends only on the operands' elements at the same position, and
        neither on the position nor on the shapes; a function if attributes and constants of the node decide. See
        `is_pointwise`.
      broadcast: the name of the formula that the runtime uses for operands of different shapes.
    """

    name: str
    ops: frozenset[str]
    prepare: Callable[[Setting], dict[str, Array]]
    kernel: Callable[[Sequence[jax.Array], Mapping[str, Any], Mapping[str, Any]], jax.Array]
    same_grid: bool = False
    elsewhere: str | None = None
    windows: bool = False
    whole: str | None = None
    widths: frozenset[frozenset[int]] | None = None
    factors: bool = False
    pointwise: bool | Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = False
    broadcast: str | None = None

    def is_pointwise(self, attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
        """Whether the formula is pointwise for a node with these attributes and constants (numbers by role).

        If so, an emitter may write another computation with the same codes.
        """
        return self.pointwise(attributes, constants) if callable(self.pointwise) else self.pointwise


ONE_BYTE = frozenset({frozenset({1})})
"""`Formula.widths` for codes of 8 bits."""
ONE_WIDTH = ONE_BYTE | {frozenset({2})}
"""`Formula.widths` for codes of 8 bits, or of 16, but not both."""

_formulas: dict[str, Formula] = {}


def register(formula: Formula) -> Formula:
    """Register a formula under its name, which must be unique."""
    unknown = formula.ops - set(OPS)
    if unknown:
        raise ValueError(f"Formula {formula.name!r}: expected operations among {', '.join(OPS)}, got {unknown}.")
    if formula.name in _formulas:
        raise ValueError(f"A formula named {formula.name!r} exists already; choose another name.")
    _formulas[formula.name] = formula
    return formula


def registered() -> Mapping[str, Formula]:
    """The formulas by name."""
    return _formulas
