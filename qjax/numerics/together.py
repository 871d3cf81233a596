"""Computes `derive(case)` for a list of cases, one per node; similar cases are traced and compiled together.

Inside a trace, every derivation costs tracing and compile time, however small it is. Two cases are of one kind if they
differ only in traced numbers. These numbers are stacked, and the derivation runs once under `vmap`. The function reads
nothing but its case, so its result cannot depend on the node. Outside of a trace the cases are computed one by one,
with numpy.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.numerics._namespace import wide
from qjax.numerics.fence import sharing
from qjax.numerics.packing import packed, unpacked


@dataclasses.dataclass(frozen=True)
class _Hole:
    """The place of a traced array in a case: its index among the distinct ones of the case."""

    index: int


def derived(
    derive: Callable[[Any], Any],
    cases: Sequence[Any],
    alive: Callable[[Any], jax.Array],
    elementwise: Callable[[Any], bool] = lambda case: False,
    uniform: Callable[[Any], Any] = lambda case: case,
) -> list[Any]:
    """`[derive(case) for case in cases]`, with the same bits.

    Args:
      derive: a function of nothing but its case.
      cases: dataclasses, mappings, tuples and lists of arrays (numpy, or traced) and hashable values.
      alive: case -> a boolean scalar that is always true, computed from its traced arrays (see `fence.apart`); it is
        called only for cases that have some.
      elementwise: whether the results of a case are vectors whose elements each depend on one element of its traced
        arrays, which are scalars or vectors of one size. Such vectors of several sizes are computed as one.
      uniform: normalises such a case so that more cases share one compilation: `derive` must return the same for the
        normalised case. It is called only for the joined cases of a kind; kinds that become equal are one kind for
        `derive`.

    Returns:
      Results are structures like the cases; what does not depend on traced arrays in them is the same for a kind.
    """
    parts = [_split(case) for case in cases]
    kinds: dict[Any, list[int]] = {}
    for position, (key, arrays, _) in enumerate(parts):
        flat = bool(arrays) and elementwise(cases[position]) and _length(arrays) is not None and not _has_vector(key)
        shapes = tuple((array.ndim if flat else array.shape, str(array.dtype)) for array in arrays)
        kinds.setdefault((key, shapes, flat) if arrays else position, []).append(position)
    results: list[Any] = [None] * len(cases)
    uniforms: dict[Any, list[_Joined]] = {}
    for kind, positions in kinds.items():
        chosen = [parts[i] for i in positions]
        if isinstance(kind, tuple) and kind[2]:
            one = _joined(uniform, chosen, positions)
            uniforms.setdefault((one.key, tuple(array.dtype for array in one.arrays)), []).append(one)
            continue
        if len(positions) == 1:
            found = [derive(cases[positions[0]])]
        else:
            found = _stacked(derive, chosen, alive(cases[positions[0]]))
        for position, result in zip(positions, found, strict=True):
            results[position] = result
    for several in uniforms.values():
        for position, result in _cut(derive, several):
            results[position] = result
    return results


def _length(arrays: Sequence[Any]) -> int | None:
    """The size of the vectors among scalars and vectors of one size; None for anything else."""
    shapes = {tuple(array.shape) for array in arrays} - {()}
    return next(iter(shapes))[0] if len(shapes) == 1 and len(next(iter(shapes))) == 1 else None


def _has_vector(key: Any) -> bool:
    """Whether the case contains a vector that is not traced, which fits one case but not a longer one."""
    if not isinstance(key, tuple):
        return False
    parts: tuple[Any, ...] = key
    if len(parts) == 4 and isinstance(parts[3], bytes):
        return math.prod(parts[2]) > 1
    return any(_has_vector(part) for part in parts)


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Cases of one kind combined into one of longer vectors, `case`; then normalised, and split.

    positions, sizes: of the cases that were combined.
    """

    case: Any
    key: Any
    arrays: list[Any]
    skeleton: Any
    positions: list[int]
    sizes: list[int]


def _joined(uniform: Callable[[Any], Any], parts: Sequence[Any], positions: Sequence[int]) -> _Joined:
    sizes = [_length(arrays) or 0 for _, arrays, _ in parts]
    # Pieces of one size must be neighbours, see `packed`.
    order = sorted(range(len(parts)), key=lambda i: sizes[i])
    parts, sizes = [parts[i] for i in order], [sizes[i] for i in order]
    columns = list(zip(*(arrays for _, arrays, _ in parts), strict=True))
    operands: list[Any] = []
    for column in columns:
        same = column[0].ndim == 0 and all(x is column[0] for x in column)
        full = [jnp.broadcast_to(x, (size,)) for x, size in zip(column, sizes, strict=True)]
        operands.append(column[0] if same else packed(full))
    case = _filled(parts[0][2], operands)
    key, arrays, skeleton = _split(uniform(case))
    return _Joined(case, key, arrays, skeleton, [positions[i] for i in order], sizes)


def _cut(derive: Callable[[Any], Any], several: Sequence[_Joined]) -> list[tuple[int, Any]]:
    """The results of several kinds that `uniform` made equal, each with the position of its case."""
    positions = [position for one in several for position in one.positions]
    case = several[0].case
    if len(positions) == 1:
        return [(positions[0], derive(case))]
    if len(several) > 1:
        with wide(jnp):  # Bit patterns of doubles have 64 bits.
            operands = [
                packed([jnp.broadcast_to(x, (sum(one.sizes),)) for one, x in zip(several, column, strict=True)])
                for column in zip(*(one.arrays for one in several), strict=True)
            ]
        case = _filled(several[0].skeleton, operands)
    _, vectors, rest = _split(derive(case), every=True)
    sizes = [size for one in several for size in one.sizes]
    pieces = [unpacked(jnp.broadcast_to(vector, (sum(sizes),)), [(size,) for size in sizes]) for vector in vectors]
    return [(position, _filled(rest, [own[i] for own in pieces])) for i, position in enumerate(positions)]


def _stacked(derive: Callable[[Any], Any], parts: Sequence[Any], alive: jax.Array) -> list[Any]:
    skeleton = parts[0][2]
    columns = list(zip(*(arrays for _, arrays, _ in parts), strict=True))
    # An array that all cases share is not copied.
    axes = [None if all(x is column[0] for x in column) else 0 for column in columns]
    if all(axis is None for axis in axes):
        return [derive(_filled(skeleton, [column[0] for column in columns]))] * len(parts)
    operands = [c[0] if axis is None else _stack(c) for c, axis in zip(columns, axes, strict=True)]
    made: list[Any] = []

    def one(*arrays: Any) -> list[Any]:
        _, traced, rest = _split(derive(_filled(skeleton, arrays)))
        made.append(rest)
        return traced

    with sharing(alive):
        stacks = jax.vmap(one, in_axes=axes)(*operands)
    # Cut the pieces here, because if each reader cut its own, no two blocks of a network would be equal programs.
    pieces = [unpacked(stack.reshape(-1), [stack.shape[1:]] * len(parts)) for stack in stacks]
    return [_filled(made[-1], [own[i] for own in pieces]) for i in range(len(parts))]


def _stack(arrays: Sequence[Any]) -> jax.Array:
    return packed(arrays).reshape(len(arrays), *arrays[0].shape)


def _split(value: Any, *, every: bool = False) -> tuple[Any, list[Any], Any]:
    """A key with everything but the numbers of traced arrays; those arrays; the value with holes for them.

    every: whether arrays that are not traced count as traced ones.
    """
    arrays: list[Any] = []
    numbers: dict[int, int] = {}

    def walk(value: Any) -> tuple[Any, Any]:
        if isinstance(value, Tracer) or (every and isinstance(value, (np.ndarray, np.generic, jax.Array))):
            if id(value) not in numbers:
                numbers[id(value)] = len(arrays)
                arrays.append(value)
            hole = _Hole(numbers[id(value)])
            return hole, hole
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            array = np.asarray(value)
            return (type(value), str(array.dtype), array.shape, array.tobytes()), value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            keys, holes = _columns(walk(getattr(value, name)) for name in names)
            if not any(new is not getattr(value, name) for name, new in zip(names, holes, strict=True)):
                return (type(value), keys), value
            return (type(value), keys), dataclasses.replace(value, **dict(zip(names, holes, strict=True)))
        if isinstance(value, Mapping):
            items: Mapping[Any, Any] = value
            keys, holes = _columns(walk(item) for item in items.values())
            return (dict, tuple(items), keys), dict(zip(items, holes, strict=True))
        if isinstance(value, (tuple, list)):
            sequence: Sequence[Any] = value
            keys, holes = _columns(walk(item) for item in sequence)
            return (type(value), keys), holes if isinstance(value, tuple) else list(holes)
        return (type(value), value), value

    key, skeleton = walk(value)
    return key, arrays, skeleton


def _columns(pairs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = list(pairs)
    return tuple(key for key, _ in found), tuple(hole for _, hole in found)


def _filled(value: Any, arrays: Sequence[Any]) -> Any:
    """A skeleton with arrays in its holes."""
    if isinstance(value, _Hole):
        return arrays[value.index]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _filled(getattr(value, name), arrays) for name in names})
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return {name: _filled(item, arrays) for name, item in items.items()}
    if isinstance(value, (tuple, list)):
        sequence: Sequence[Any] = value
        return type(value)(_filled(item, arrays) for item in sequence)
    return value
