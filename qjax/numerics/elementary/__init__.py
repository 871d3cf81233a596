"""Elementwise functions of one variable, and their tables of codes: correctly rounded from the real numbers.

| file | content |
| --- | --- |
| `expression` | a function as a short list of steps, as JSON |
| `bounds`, `intervals` | the steps on arrays of float64 intervals; they decide almost all codes |
| `reals`, `series` | the steps on one number, exact or with 60 digits; they decide the remaining codes |
| `table` | codes in, codes out |
| `steep` | derivatives where they are not finite, for training |
| `traced` | the steps in float32, for training |
"""

from qjax.numerics.elementary.expression import PRIMITIVES, Expression
from qjax.numerics.elementary.steep import is_steep, with_finite_slope
from qjax.numerics.elementary.table import evaluate, table
from qjax.numerics.elementary.traced import float32

__all__ = ["PRIMITIVES", "Expression", "evaluate", "float32", "is_steep", "table", "with_finite_slope"]
