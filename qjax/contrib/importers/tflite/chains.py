"""Float steps between codes: DEQUANTIZE or CAST, elementwise operators, QUANTIZE. They become one table of codes.

    DEQUANTIZE(q) -> ADD 3.0 -> RSQRT -> QUANTIZE    ->    table[q]

Floats that depend on at most two tensors of few values are a function of these values. Under a target that is a runtime
the table contains what that runtime computes (`run_kernel`), otherwise the correctly rounded codes of the real
function.
"""

import dataclasses
from typing import Any

import numpy as np

from qjax.graph.ir import Quantization
from qjax.numerics.elementary import Expression, table

MOST_ENTRIES = 1 << 16

_ONE = {
    "SQRT": "sqrt",
    "RSQRT": "rsqrt",
    "SQUARE": "square",
    "ABS": "abs",
    "NEG": "neg",
    "FLOOR": "floor",
    "CEIL": "ceil",
    "ROUND": "round_even",
}
_TWO = {"ADD": "add", "SUB": "sub", "MUL": "mul", "DIV": "div", "MAXIMUM": "max", "MINIMUM": "min"}
_BOUNDS = {"RELU": (0.0, float("inf")), "RELU6": (0.0, 6.0), "RELU_N1_TO_1": (-1.0, 1.0), "RELU_0_TO_1": (0.0, 1.0)}

OPERATORS = (*_ONE, *_TWO, *_BOUNDS)
"""Operators whose float32 result is rounded once from their operands, so that it does not depend on its position.

Others are computed several elements at a time, and differently after the last whole vector.
"""

Operand = int | float
"""The number of a value (the sources come first, then the steps), or a real number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Codes from low to high; grid: None for integers without a scale."""

    dtype: str
    grid: Quantization | None
    low: int
    high: int

    @property
    def size(self) -> int:
        """How many values it can have."""
        return self.high - self.low + 1

    @property
    def scale(self) -> np.float32:
        """The step from one value to the next."""
        return np.float32(1) if self.grid is None else np.float32(self.grid.scale)

    @property
    def zero_point(self) -> int:
        """The code that represents zero."""
        return 0 if self.grid is None else int(self.grid.zero_point)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator on floats."""

    operator: str
    operands: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """One or two sources, steps on their real values, and the grid of the resulting codes.

    operator: the runtime's operator that computes all of it from the codes; "": one for each step, in float.
    """

    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    dtype: str
    y: Quantization
    operator: str = ""

    @property
    def is_function(self) -> bool:
        """Whether it is a function of one tensor of codes, which an expression can describe as well."""
        return len(self.sources) == 1 and self.sources[0].grid is not None

    @property
    def values(self) -> list[np.ndarray]:
        """The values of each source, in the order of the entries: those of the last source change fastest."""
        ranges = [np.arange(source.low, source.high + 1).astype(source.dtype) for source in self.sources]
        return [array.reshape(-1) for array in np.meshgrid(*ranges, indexing="ij")]

    @property
    def expression(self) -> Expression:
        """The real function of the first source; the second is its parameter."""
        steps = [_primitive(step) for step in self.steps]
        return Expression(tuple(steps) or (("mul", (0, (1.0).hex())),), len(self.sources) - 1)


def _primitive(step: Step) -> tuple[str, tuple[int | str, ...]]:
    operands = tuple(operand if isinstance(operand, int) else operand.hex() for operand in step.operands)
    if step.operator in _BOUNDS:
        low, high = _BOUNDS[step.operator]
        return "clamp", (low.hex(), operands[0], high.hex())
    return {**_ONE, **_TWO}[step.operator], operands


def exact_codes(chain: Chain) -> np.ndarray:
    """The correctly rounded codes, ties to even, in the order of `Chain.values`.

    A quotient of 0 and 0 is the code of 0, as in `ops.divide`.
    """
    x, y, expression = chain.sources[0], chain.y, chain.expression
    fixed = (x.scale, x.zero_point, (x.low, x.high), y.scale, y.zero_point, (y.qmin, y.qmax))
    if len(chain.sources) == 1:
        return table(expression, [], *fixed).astype(chain.dtype)
    second = chain.sources[1]
    columns: list[np.ndarray] = []
    for value in range(second.low, second.high + 1):
        real = (value - second.zero_point) * float(second.scale)
        columns.append(_column(expression, real, x, fixed))
    return np.stack(columns, axis=1).reshape(-1).astype(chain.dtype)


def _column(expression: Expression, real: float, x: Source, fixed: tuple[Any, ...]) -> np.ndarray:
    try:
        return table(expression, [real], *fixed)
    except ValueError:
        # it has no value somewhere, so compute it entry by entry
        return np.concatenate([_entry(expression, real, code, fixed) for code in range(x.low, x.high + 1)])


def _entry(expression: Expression, real: float, code: int, fixed: tuple[Any, ...]) -> np.ndarray:
    scale, zero_point, _, *y = fixed
    try:
        return table(expression, [real], scale, zero_point, (code, code), *y)
    except ValueError:
        return np.asarray([int(np.asarray(y[1]))], np.int32)
