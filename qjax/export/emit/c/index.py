"""Index arithmetic of loops: affine sums of loop variables, with divisions and remainders folded if ranges allow it.

    x of shape (4, 6) reshaped to (24,), read at i = 6 a + b with b < 6    ->    x[a][b], since i / 6 = a and i % 6 = b

Shapes, strides and the batch size are known at emission, so a reshape, a transposition or a slice needs no C code and
only changes the index with which an array is read.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Index:
    """sum of coefficient * term + constant; `terms`: C text -> (coefficient, lowest and highest value of the term)."""

    terms: Mapping[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    constant: int = 0

    @classmethod
    def variable(cls, name: str, size: int) -> "Index":
        return cls({name: (1, 0, size - 1)}) if size > 1 else cls()

    @property
    def key(self) -> tuple[object, ...]:
        return (self.constant, *sorted((name, c) for name, (c, _, _) in self.terms.items()))

    @property
    def bounds(self) -> tuple[int, int]:
        low = high = self.constant
        for c, least, most in self.terms.values():
            low, high = low + min(c * least, c * most), high + max(c * least, c * most)
        return low, high

    def __add__(self, other: "Index | int") -> "Index":
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        terms = dict(self.terms)
        for name, (c, least, most) in other.terms.items():
            total = terms.get(name, (0, 0, 0))[0] + c
            if total:
                terms[name] = (total, least, most)
            else:
                terms.pop(name, None)
        return Index(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> "Index":
        if factor == 0:
            return Index()
        return Index({name: (c * factor, lo, hi) for name, (c, lo, hi) in self.terms.items()}, self.constant * factor)

    def _split(self, divisor: int) -> tuple["Index", "Index"]:
        """The terms whose coefficients are multiples of `divisor`, and the rest, with a constant in [0, divisor)."""
        whole = {n: t for n, t in self.terms.items() if t[0] % divisor == 0}
        rest = {n: t for n, t in self.terms.items() if t[0] % divisor != 0}
        quotient, remainder = divmod(self.constant, divisor)
        return Index(whole, quotient * divisor), Index(rest, remainder)

    def floordiv(self, divisor: int) -> "Index":
        """The index divided by a positive constant; it must not be negative."""
        if divisor == 1:
            return self
        whole, rest = self._split(divisor)
        exact = Index({n: (c // divisor, lo, hi) for n, (c, lo, hi) in whole.terms.items()}, whole.constant // divisor)
        low, high = rest.bounds
        if low >= 0 and high < divisor:
            return exact
        if low < 0:
            exact, rest = Index(), self
            low, high = rest.bounds
        return exact + Index({f"({rest}) / {divisor}": (1, max(low, 0) // divisor, high // divisor)})

    def mod(self, divisor: int) -> "Index":
        """The remainder by a positive constant; the index must not be negative."""
        if divisor == 1:
            return Index()
        _, rest = self._split(divisor)
        low, high = rest.bounds
        if low >= 0 and high < divisor:
            return rest
        if low < 0:
            rest = self
        return Index({f"({rest}) % {divisor}": (1, 0, divisor - 1)})

    def __str__(self) -> str:
        text = ""
        for name, (c, _, _) in self.terms.items():
            atom = name if name.isidentifier() or abs(c) == 1 else f"({name})"
            part = atom if abs(c) == 1 else f"{atom} * {abs(c)}"
            text += (" - " if c < 0 else " + ") + part if text else ("-" if c < 0 else "") + part
        if self.constant or not text:
            c = self.constant
            text += (f" - {-c}" if c < 0 else f" + {c}") if text else str(c)
        return text


Indices = tuple[Index, ...]


def strides(shape: Sequence[int]) -> list[int]:
    """The strides of an array stored row by row."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def flat(indices: Indices, shape: Sequence[int]) -> Index:
    """The offset of an element in an array stored row by row."""
    total = Index()
    for index, step, size in zip(indices, strides(shape), shape, strict=True):
        total = total + (index * step if size > 1 else Index())
    return total


def unflat(place: Index, shape: Sequence[int]) -> Indices:
    """The indices of the element at an offset."""
    found: list[Index] = []
    for axis, step in enumerate(strides(shape)):
        index = place.floordiv(step)
        found.append(index.mod(shape[axis]) if axis and shape[axis] > 0 else index)
    return tuple(found)
