"""A kernel's computation as arrays that are read element by element: the intermediate form between JAX and C loops.

    y = x.T[::2] + 1    ->    Computed("add", View(x, i, j -> j, 2 i), Literal(1))

Creating a value creates no loop. Elementwise operations, reshapes, slices and iotas describe one element at an index
(`Computed`, `View`, `Counter`, ...). Sums, matrix products and scans describe their range (`Reduced`, `Looped`).
`jaxprs.py` reads values from JAX. `loops.py` decides which become loops and which memory.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from qjax.export.emit.c.index import Index, Indices, flat, unflat


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a known shape; dtype: a name."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(eq=False)
class Literal(Value):
    """One number, of any shape: an integer, or a float of dtype float32."""

    value: Any


@dataclasses.dataclass(eq=False)
class Table(Value):
    """Constant data; role: its name."""

    array: np.ndarray
    role: str


@dataclasses.dataclass(eq=False)
class Buffer(Value):
    """An array in memory, row by row; name: of the C pointer."""

    name: str


@dataclasses.dataclass(eq=False)
class Register(Value):
    """A local variable of the loop body that contains the element at the body's own indices, `place`.

    reach: a bound on its magnitude; None if none is known.
    """

    name: str
    place: Indices | None = None
    reach: int | None = None


@dataclasses.dataclass(eq=False)
class Computed(Value):
    """An elementwise operation; operands have its shape (or 1 along some axes), or are scalars."""

    function: str
    operands: tuple[Value, ...]


@dataclasses.dataclass(eq=False)
class View(Value):
    """The source read at other indices."""

    source: Value
    where: Callable[[Indices], Indices]


@dataclasses.dataclass(eq=False)
class Guarded(Value):
    """The source at indices inside it, `fill` elsewhere; steps: the dilation of each axis of the source.

    where: returns the indices before the division by the step.
    """

    source: Value
    fill: Value
    where: Callable[[Indices], Indices]
    steps: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Joined(Value):
    """Parts in order along an axis."""

    parts: tuple[Value, ...]
    axis: int


@dataclasses.dataclass(eq=False)
class Counter(Value):
    """The index along an axis."""

    axis: int


@dataclasses.dataclass(eq=False)
class Chosen(Value):
    """Rows of the source selected by an index that is clipped to its range: source[clip(rows[i...]), j...]."""

    source: Value
    rows: Value


@dataclasses.dataclass(eq=False)
class Reduced(Value):
    """A reduction over the trailing axes `extra` of the body, whose shape is `shape + extra`.

    function: "add", "max", "min", "and" or "or". names: of the loop variables.
    """

    function: str
    initial: Any
    extra: tuple[int, ...]
    body: Value
    names: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class Kept(Value):
    """The source, computed once and read from memory, because it is expensive and read often."""

    source: Value


@dataclasses.dataclass(eq=False)
class Loop:
    """A scan: from carry to carry, `length` times. Each carry is updated element by element.

    step: (counter) -> the new carries, given the register of the counter.
    """

    length: int
    initial: tuple[Value, ...]
    carries: tuple[Register, ...]
    counter: "Register"
    step: tuple[Value, ...]
    reverse: bool


@dataclasses.dataclass(eq=False)
class Looped(Value):
    """One carry after the last iteration of a loop."""

    loop: Loop
    position: int


def has_register(value: Value) -> bool:
    """Whether an element depends on the iteration of a loop."""
    return any(isinstance(item, Register) for item in reached(value, parts))


def reached(value: Value, inside: Callable[[Value], Sequence[Value]], seen: Collection[int] = ()) -> Iterator[Value]:
    """The value and all that it is made of, each once. inside: the parts of one value. seen: ids to leave out."""
    found, pending = set(seen), [value]
    while pending:
        item = pending.pop()
        if id(item) not in found:
            found.add(id(item))
            yield item
            pending += inside(item)


def parts(value: Value) -> list[Value]:
    """The values of which a value is made; for the result of a loop, those from outside of it."""
    match value:
        case Computed():
            return list(value.operands)
        case View() | Kept():
            return [value.source]
        case Guarded():
            return [value.source, value.fill]
        case Joined():
            return list(value.parts)
        case Chosen():
            return [value.source, value.rows]
        case Reduced():
            return [value.body]
        case Looped():
            own = {id(register) for register in (*value.loop.carries, value.loop.counter)}
            return [*value.loop.initial, *(part for step in value.loop.step for part in _outside(step, own))]
        case _:
            return []


def _outside(step: Value, own: set[int]) -> list[Value]:
    """The values of which a step of a loop is made, without the loop's own registers."""
    return [item for item in reached(step, parts, own) if not parts(item)]


def of_array(array: np.ndarray, role: str) -> Value:
    """Constant data as a value."""
    if array.ndim == 0 and role in ("literal", "constant"):
        return Literal((), array.dtype.name, array.item())
    return Table(array.shape, array.dtype.name, array, role)


def laid_out(buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
    """The same memory as an array of another shape."""
    return Buffer(shape, buffer.dtype, buffer.name)


def reshaped(source: Value, shape: tuple[int, ...]) -> Value:
    """The same elements in the same order."""
    if shape == source.shape:
        return source
    if isinstance(source, Buffer):
        return laid_out(source, shape)
    return View(shape, source.dtype, source, lambda at: unflat(flat(at, shape), source.shape))


def cast(source: Value, dtype: str) -> Value:
    """The elements in another type, modulo 2^n."""
    return source if source.dtype == dtype else Computed(source.shape, dtype, "convert_element_type", (source,))


def transposed(source: Value, order: Sequence[int]) -> Value:
    """`jnp.transpose`."""
    shape = tuple(source.shape[axis] for axis in order)
    return View(shape, source.dtype, source, lambda at: tuple(at[order.index(axis)] for axis in range(len(order))))


def size(value: Value) -> int:
    """The number of elements."""
    return math.prod(value.shape)


def inner_turns(value: Value) -> int:
    """The iterations of a value's inner loops (sums, extremes and scans) for all elements together."""
    found = 0
    for item in reached(value, parts):
        match item:
            case Reduced():
                found += size(item) * math.prod(item.extra)
            case Looped():
                found += size(item) * item.loop.length
            case _:
                pass
    return found


def piece_of(value: Value) -> tuple[Buffer, int] | None:
    """The buffer of which a value is a contiguous piece, and its offset; None for anything else."""
    at = tuple(Index.variable(f"i{axis}", extent) for axis, extent in enumerate(value.shape))
    own = flat(at, value.shape)
    while isinstance(value, View):
        at, value = value.where(at), value.source
    if not isinstance(value, Buffer) or 0 in value.shape:
        return None
    place = flat(at, value.shape)
    return (value, place.constant) if place.terms == own.terms else None
