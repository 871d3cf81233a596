"""Data flow for rewriters: which equation computes a value from which others, whatever their order.

Casts between floats, `stop_gradient`, and moves that only add, repeat or drop axes are skipped, and the axes are
tracked through them:

    y = broadcast(cast(x)), x of shape (3,), y of shape (2, 3)    behind(y) is x with axes (None, 0)
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value

Axes = tuple[int | None, ...]
"""For each axis of the value that was asked for: the axis of the value found, or None if it only repeats."""

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
_ELEMENTWISE = frozenset(
    """add sub mul div neg abs max min and or not xor eq ne lt le gt ge select_n convert_element_type rem sign floor
    stop_gradient copy square integer_pow exp clamp""".split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A value before moves. equation: the one that computes it, if it belongs to this program."""

    value: Value
    equation: Equation | None
    axes: Axes


class Flow:
    """A program, searched backwards from a value."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {value: eqn for eqn in program.equations for value in eqn.outputs}
        self.readers: dict[Value, list[Equation]] = {}
        for eqn in program.equations:
            for value in dict.fromkeys(eqn.inputs):
                self.readers.setdefault(value, []).append(eqn)
        self._first = _first_of_each(program)

    def behind(self, value: Value, axes: Axes | None = None) -> Found:
        """The value before casts and moves; axes: the mapping of axes through moves that were skipped already."""
        found = tuple(range(len(value.shape))) if axes is None else axes
        while (eqn := self.made.get(value)) is not None:
            source = eqn.inputs[0] if eqn.inputs else None
            if source is None:
                break
            if eqn.primitive in IDENTITIES or (
                eqn.primitive == "convert_element_type" and source.is_float and value.is_float
            ):
                value = source
                continue
            moved = moved_axes(eqn)
            if moved is None:
                break
            value, found = source, tuple(None if axis is None else moved[axis] for axis in found)
        return Found(value, self.made.get(value), found)

    def unrepeated(self, value: Value) -> Found:
        """The value before moves, as long as each of its axes is still an axis of the given value."""
        best = found = Found(value, self.made.get(value), tuple(range(len(value.shape))))
        while (eqn := found.equation) is not None and eqn.inputs:
            source, same = eqn.inputs[0], tuple(range(len(eqn.outputs[0].shape)))
            moved = same if eqn.primitive in IDENTITIES else moved_axes(eqn)
            if moved is None:
                break
            axes = tuple(None if axis is None else moved[axis] for axis in found.axes)
            found = Found(source, self.made.get(source), axes)
            if set(range(len(source.shape))) <= {*axes}:
                best = found
        return best

    def plain(self, value: Value) -> Found:
        """The value before casts only, so it has the same shape."""
        while (eqn := self.made.get(value)) is not None and (
            eqn.primitive in IDENTITIES
            or (eqn.primitive == "convert_element_type" and eqn.inputs[0].is_float and value.is_float)
        ):
            value = eqn.inputs[0]
        return Found(value, self.made.get(value), tuple(range(len(value.shape))))

    def same(self, a: Value, b: Value) -> bool:
        """Whether two values are one tensor up to casts, computed once or several times."""
        return self.first(self.plain(a).value) is self.first(self.plain(b).value)

    def first(self, value: Value) -> Value:
        """The first of all values that are computed from the same values by the same operations."""
        return self._first.get(value, value)

    def number(self, value: Value) -> float | None:
        """The one number that all elements of a value have, if the program itself determines it."""
        found = self.behind(value)
        if found.value.constant is not None:
            array = np.asarray(found.value.constant)
            if array.size and array.dtype.kind in "fiub" and (array.size == 1 or (array == array.flat[0]).all()):
                return float(array.flat[0])
            return float(array.flat[0]) if array.size == 1 and not np.iscomplexobj(array) else None
        eqn = found.equation
        if eqn is None or eqn.primitive not in _NUMBERS or len(eqn.inputs) > 2:
            return None
        if eqn.primitive in _OF_BITS and any(str(v.dtype) != "bool" for v in eqn.inputs):
            return None
        numbers = [self.number(v) for v in eqn.inputs]
        known = [n for n in numbers if n is not None]
        if len(known) < len(numbers):
            return None
        if eqn.primitive in ("eq", "ne") and any(n != int(n) for n in known if abs(n) < np.inf):
            return None  # rounding to float32 may make different numbers equal
        result = _NUMBERS[eqn.primitive](*known)
        kind = np.dtype(found.value.dtype).kind
        if kind in "iu" and not abs(result) < np.inf:
            return None
        return float(bool(result)) if kind == "b" else float(int(result)) if kind in "iu" else result

    def between(self, outputs: Sequence[Value], inputs: Iterable[Value]) -> tuple[Equation, ...]:
        """The equations that compute `outputs`, back to `inputs`, in the program's order."""
        stop, group = set(inputs), set[Equation]()
        waiting = [value for value in outputs if value not in stop]
        while waiting:
            eqn = self.made.get(waiting.pop())
            if eqn is not None and eqn not in group:
                group.add(eqn)
                waiting += [value for value in eqn.inputs if value not in stop]
        return tuple(eqn for eqn in self.program.equations if eqn in group)

    def leaves(self, equations: Sequence[Equation], inputs: Iterable[Value]) -> set[Value]:
        """What a group reads besides `inputs` and literals: inputs of the program."""
        made, known = {v for eqn in equations for v in eqn.outputs}, set(inputs)
        read = {v for eqn in equations for v in eqn.inputs if v.constant is None}
        return {v for v in read if v not in known and v not in made}

    def closed(self, value: Value) -> bool:
        """Whether a value depends on no input of the program."""
        if value.constant is not None:
            return True
        eqn = self.made.get(value)
        return eqn is not None and eqn.body is None and all(self.closed(v) for v in eqn.inputs)

    def varies(self, value: Value) -> set[int]:
        """The axes along which elements of a value may differ, as far as the program shows."""
        whole = {axis for axis, size in enumerate(value.shape) if size != 1}
        eqn = self.made.get(value)
        if eqn is None:
            return whole
        if eqn.primitive == "iota":
            return whole & {int(eqn.params["dimension"])}
        moved = moved_axes(eqn)
        if moved is not None:
            inner = self.varies(eqn.inputs[0])
            return whole & {axis for axis, source in enumerate(moved) if source in inner}
        if eqn.primitive in _ELEMENTWISE:
            parts = [self.varies(v) for v in eqn.inputs if len(v.shape) == len(value.shape)]
            return whole & set[int]().union(*parts)
        return whole


_NUMBERS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else float("nan"),
    "neg": lambda a: -a,
    "max": max,
    "min": min,
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
    "and": min,
    "or": max,
    "not": lambda a: 1.0 - a,
    "sqrt": lambda a: a**0.5 if a >= 0 else float("nan"),
    "convert_element_type": lambda a: a,
}


_OF_BITS = frozenset({"and", "or", "not"})
"""On integers these combine bits."""


def _first_of_each(program: Program) -> dict[Value, Value]:
    """Value -> the first one that is computed in the same way, so that duplicates in a function count as one value."""
    first: dict[Value, Value] = {}
    known: dict[object, tuple[Value, ...]] = {}
    for eqn in program.equations:
        inputs = tuple(
            (value.constant.dtype.str, value.shape, np.asarray(value.constant).tobytes())
            if isinstance(value.constant, np.ndarray)
            else id(first.get(value, value))
            for value in eqn.inputs
        )
        if eqn.body is not None or any(not isinstance(p, _PLAIN) for p in eqn.params.values()):
            continue
        key = (eqn.primitive, inputs, repr(sorted(eqn.params.items())), eqn.out_shapes, str(eqn.out_dtypes))
        for value, same in zip(eqn.outputs, known.setdefault(key, eqn.outputs), strict=True):
            first[value] = same
    return first


_PLAIN = (type(None), bool, int, float, str, tuple, np.dtype, np.integer)


def moved_axes(eqn: Equation) -> Axes | None:
    """Per axis of the result: the operand's axis that it is; None for equations that are no such moves."""
    (shape,) = eqn.out_shapes[:1]
    if eqn.primitive == "broadcast_in_dim":
        places = [int(d) for d in eqn.params["broadcast_dimensions"]]
        return tuple(places.index(axis) if axis in places else None for axis in range(len(shape)))
    if eqn.primitive == "transpose":
        return tuple(int(axis) for axis in eqn.params["permutation"])
    if eqn.primitive in _RESHAPES:
        return _aligned(shape, eqn.in_shapes[0])
    return None


def _aligned(outer: Sequence[int], inner: Sequence[int]) -> Axes | None:
    """How a reshape that only adds or drops axes of one element maps axes; None for any other reshape."""
    axes: list[int | None] = []
    position = 0
    for size in outer:
        while size != 1 and position < len(inner) and inner[position] == 1:
            position += 1
        if position < len(inner) and inner[position] == size:
            # match from the left, so that a batch of one example is treated like any other batch
            axes.append(position)
            position += 1
        elif size == 1:
            axes.append(None)
        else:
            return None
    return tuple(axes) if all(size == 1 for size in inner[position:]) else None


class _Function:
    """Replaces a primitive by any function from arrays to one array."""

    multiple_results = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def get_bind_params(self, params: Any) -> dict[str, Any]:
        return {}

    def bind(self, *args: Any) -> Any:
        return self.function(*args)


def written(name: str, function: Callable[..., Any], source: Value, result: Value, beside: Equation) -> Equation:
    """A new equation `result = function(source)`, for use inside a composite."""
    bound = SimpleNamespace(primitive=_Function(function), params={})
    return Equation(name, (source,), (result,), {}, beside.scope, beside.location, bound)


def pruned(program: Program, candidates: Collection[Equation]) -> Program:
    """The program without those candidates that nothing reads any more."""
    read = set(program.outputs)
    kept: list[Equation] = []
    for eqn in reversed(program.equations):
        if eqn in candidates and not any(value in read for value in eqn.outputs):
            continue
        read.update(eqn.inputs)
        kept.append(eqn)
    return dataclasses.replace(program, equations=tuple(reversed(kept)))


def spans(found: Found, shape: Sequence[int], reduced: Sequence[int]) -> bool:
    """Whether a reduction of a tensor of `shape` over `reduced` is broadcast back to that shape, each axis to its own.

    found: the reduction, before the moves that broadcast it.
    """
    kept = [axis for axis in range(len(shape)) if axis not in reduced]
    if len(found.axes) != len(shape):
        return False
    for axis, source in enumerate(found.axes):
        if shape[axis] == 1:
            continue
        if source != (kept.index(axis) if axis in kept else None):
            return False
    return True
