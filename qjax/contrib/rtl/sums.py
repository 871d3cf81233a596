"""Primitives that add up words: reductions, windows, and products with weights or with one another."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.rtl import words
from qjax.contrib.rtl.arrays import Reader, is_known
from qjax.contrib.rtl.words import Word, constant
from qjax.support.errors import Unsupported

MOST_PRODUCTS = 1 << 18
"""Products of one layer, at most: each becomes separate logic, and takes alkaid's time."""


def _reduced(function: Callable[[Word, Word], Word], parts: Sequence[Word]) -> Word:
    """Combine in pairs, so that the depth is that of a tree."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [function(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


_REDUCTIONS: dict[str, tuple[Callable[[Word, Word], Word], int | None]] = {
    "sum": (words.add, 0),
    "max": (words.maximum, None),
    "min": (words.minimum, None),
    "and": (words.both, 1),
    "or": (words.either, 0),
}
"""Suffix of `reduce_` -> the function, and the result for no elements."""


def _combined(kind: str, parts: Sequence[Word], dtype: str) -> Word:
    function, neutral = _REDUCTIONS[kind]
    if kind in ("and", "or") and dtype != "bool":
        raise Unsupported(f"'reduce_{kind}' of integers has no form in a circuit")
    if not parts and neutral is None:
        raise Unsupported(f"a {kind}imum of nothing has no form in a circuit")
    found = _reduced(function, parts) if parts else constant(neutral or 0)
    return found if dtype == "bool" else words.wrapped(found, dtype)


def _reduce(
    kind: str, params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    axes = tuple(params["axes"])
    kept = [axis for axis in range(inputs[0].ndim) if axis not in axes]
    moved = inputs[0].transpose(*kept, *axes).reshape((*shape, -1))
    result = np.empty(shape, object)
    for place in np.ndindex(*shape):
        result[place] = _combined(kind, moved[place].tolist(), dtype)
    return result


def _windows(
    kind: str, params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    if any(n != 1 for n in params["base_dilation"]):
        raise Unsupported(f"'reduce_window_{kind}' with base_dilation has no form in a circuit")
    source: Any = inputs[0]
    padding, strides = params["padding"], params["window_strides"]
    result = np.empty(shape, object)
    for place in np.ndindex(*shape):
        parts = list[Word]()
        for offset in np.ndindex(*params["window_dimensions"]):
            at = tuple(
                p * s + o * d - low
                for p, s, o, d, (low, _) in zip(place, strides, offset, params["window_dilation"], padding, strict=True)
            )
            # elements outside of the array change neither a sum nor a maximum
            if all(0 <= i < size for i, size in zip(at, source.shape, strict=True)):
                parts.append(source[at])
        result[place] = _combined(kind, parts, dtype)
    return result


def _dot(params: Mapping[str, Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    (summed, summed2), (batch, batch2) = params["dimension_numbers"]
    x, free = _rows(inputs[0], batch, summed)
    y, free2 = _rows(inputs[1], batch2, summed2)
    if (count := x.size * y.shape[1]) > MOST_PRODUCTS:
        raise Unsupported(
            f"it has {count:,} multiplications of one example, and at most {MOST_PRODUCTS:,} become logic"
        )
    blocks = list[np.ndarray]()
    for left, right in zip(x, y, strict=True):
        if is_known(right):
            blocks.append(words.matmul(left, right.T))
        elif is_known(left):
            blocks.append(words.matmul(right, left.T).T)
        else:
            blocks.append(_products(left, right))
    result = np.empty(shape, object)
    found = np.stack(blocks).reshape((*(inputs[0].shape[axis] for axis in batch), *free, *free2))
    for place, value in np.ndenumerate(found):
        result[place] = words.wrapped(value, dtype)
    return result


def _rows(array: np.ndarray, batch: Sequence[int], summed: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(batch, free, summed), and the sizes of the free axes."""
    free = [axis for axis in range(array.ndim) if axis not in (*batch, *summed)]
    sizes = [tuple(array.shape[axis] for axis in axes) for axes in (batch, free, summed)]
    shape = [int(np.prod(part)) for part in sizes]
    return array.transpose(*batch, *free, *summed).reshape(shape), sizes[1]


def _products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(m, k), (n, k) -> (m, n), for words that all depend on inputs."""
    result = np.empty((len(left), len(right)), object)
    for i, j in np.ndindex(*result.shape):
        pairs = zip(left[i], right[j], strict=True)
        result[i, j] = _reduced(words.add, [words.product(a, b) for a, b in pairs] or [constant(0)])
    return result


SUMS: dict[str, Reader] = {
    "dot_general": _dot,
    **{f"reduce_{kind}": functools.partial(_reduce, kind) for kind in _REDUCTIONS},
    **{f"reduce_window_{kind}": functools.partial(_windows, kind) for kind in ("sum", "max", "min")},
}
"""Primitive -> the function that translates it."""
