"""Moves per-channel vectors between the axes of a weight and the axes of the result.

`channels` is a list of [axis of the result, axis of the weight]. A vector of the result has a shape that broadcasts
against the result's trailing axes.

    weight (in, out) with scales of shape (1, out), channels [[2, 1]]    ->    a vector of shape (out,)
"""

import math
from collections.abc import Sequence
from typing import Any

Pairs = Sequence[Sequence[int]]


def trailing(vector: Any) -> Any:
    """Drop leading axes of size 1, which leaves the shortest shape that broadcasts in the same way."""
    shape = tuple(vector.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return vector.reshape(shape)


def weight_to_result(vector: Any, channels: Pairs, rank: int) -> Any:
    """Scales in the weight's rank (size 1 or full per axis) as a vector of the result."""
    if vector.size == 1:
        return vector.reshape(())
    pairs = sorted(tuple(pair) for pair in channels)
    order = [w for _, w in pairs]
    rest = [axis for axis in range(vector.ndim) if axis not in order]
    if any(vector.shape[axis] != 1 for axis in rest):
        raise ValueError(f"Expected a scale along the weight's channel axes {sorted(order)}, got shape {vector.shape}.")
    shape = [1] * rank
    for r, w in pairs:
        shape[r] = vector.shape[w]
    return trailing(vector.transpose((*rest, *order)).reshape(shape))


def turned(channels: Pairs, order: Sequence[int]) -> list[list[int]]:
    """The pairs for a result whose axes are in another order; order: as `lax.transpose` takes it."""
    return [[order.index(r), w] for r, w in channels]


def result_to_weight(vector: Any, channels: Pairs, rank: int, weight_rank: int) -> Any:
    """A vector of the result as an array that broadcasts against the weight."""
    full = vector.reshape((1,) * (rank - vector.ndim) + tuple(vector.shape))
    pairs = sorted(channels, key=lambda pair: pair[1])
    order = [r for r, _ in pairs]
    rest = [axis for axis in range(rank) if axis not in order]
    if math.prod(full.shape[axis] for axis in rest) != 1:
        raise ValueError(
            f"Expected a vector along the result's channel axes {sorted(order)}, got shape {tuple(vector.shape)}."
        )
    shape = [1] * weight_rank
    for r, w in pairs:
        shape[w] = full.shape[r]
    return full.transpose((*rest, *order)).reshape(shape)
