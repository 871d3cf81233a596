"""Elementwise functions of one variable, and their tables of codes: correctly rounded from the reals.

| file | idea |
| --- | --- |
| `expression` | a function as a short list of steps, as JSON |
| `bounds`, `intervals` | the steps on whole arrays of float64 intervals: what is certain is decided here |
| `reals`, `series` | the steps on one exact or 60-digit number: what is left is decided here |
| `table` | codes in, codes out |
| `traced` | the steps in float32, for training |
"""

from qjax.numerics.elementary.expression import PRIMITIVES, Expression
from qjax.numerics.elementary.table import evaluate, table
from qjax.numerics.elementary.traced import float32

__all__ = ["PRIMITIVES", "Expression", "evaluate", "float32", "table"]
