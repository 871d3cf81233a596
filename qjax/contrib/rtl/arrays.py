"""Primitives that move words: shapes, slices, padding, and tables that are looked up."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qjax.contrib.rtl import words
from qjax.contrib.rtl.words import constant
from qjax.export.emit.gathers import takes_rows
from qjax.support.errors import Unsupported

Reader = Callable[[Mapping[str, Any], list[np.ndarray], tuple[int, ...], str], np.ndarray]
"""(parameters, operands, shape and dtype of the result) -> the result."""


def is_known(array: np.ndarray) -> bool:
    """Whether an array depends on no input."""
    return array.dtype != object


def lifted(array: np.ndarray) -> np.ndarray:
    """An array of words.

    Raises:
      Unsupported: it contains floats.
    """
    if not is_known(array):
        return array
    if array.dtype.kind not in "iub":
        raise Unsupported(f"numbers of dtype {array.dtype} are combined with integers, but a circuit only has integers")
    result = np.empty(array.shape, object)
    for place, number in np.ndenumerate(array):
        result[place] = constant(int(number))
    return result


def _reshape(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return inputs[0].reshape(shape)


def _broadcast(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], inputs[0].shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(inputs[0].reshape(sizes), shape)


def _transpose(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return inputs[0].transpose(params["permutation"])


def _reverse(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.flip(inputs[0], params["dimensions"])


def _slice(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    steps = params["strides"] or (1,) * len(shape)
    return inputs[0][tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _concatenate(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.concatenate([lifted(x) for x in inputs], params["dimension"])


def _stack(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.stack([lifted(x) for x in inputs], params["axis"])


def _pad(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    source, fill = map(lifted, inputs)
    result = np.empty(shape, object)
    result[...] = fill[()]
    to, of = list[slice](), list[slice]()
    for (low, _, inner), size, whole in zip(params["padding_config"], source.shape, shape, strict=True):
        # negative padding crops
        kept = [i for i in range(size) if 0 <= low + i * (inner + 1) < whole]
        of.append(slice(kept[0], kept[-1] + 1) if kept else slice(0, 0))
        to.append(slice(low + kept[0] * (inner + 1), low + kept[-1] * (inner + 1) + 1, inner + 1) if kept else of[-1])
    result[tuple(to)] = source[tuple(of)]
    return result


def _gather(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    table, rows = inputs
    if not is_known(table) or not takes_rows(params, table.shape, rows.shape, len(shape)):
        raise Unsupported("'gather' has a form in a circuit for whole rows of a known table, with clipped indices")
    result = np.empty(shape, object)
    bounds = constant(0), constant(len(table) - 1)
    for place in np.ndindex(*rows.shape[:-1]):
        index = words.clamped(bounds[0], rows[(*place, 0)], bounds[1])
        for column in np.ndindex(*table.shape[1:]):
            result[(*place, *column)] = words.looked_up(index, table[(slice(None), *column)].tolist())
    return result


ARRAYS: dict[str, Reader] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "expand_dims": _reshape,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
"""Primitive -> the function that moves or looks up words for it."""
