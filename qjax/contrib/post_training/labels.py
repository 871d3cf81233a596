"""Labels of factors: which elements of which tensors are divided by the same factor.

A tensor has an array of labels of the same rank. Along an axis on which the labels do not change, the array has length
1. Equal labels mean equal factors, and joining two labels makes their factors equal. Label -l means 1 / the factor of
l, because a tensor that is multiplied somewhere must be divided there. Labels begin with 1.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Labels: TypeAlias = NDArray[np.int64]
"""An array of the tensor's rank; each axis has the tensor's length or 1."""


class Union:
    """Sets of labels whose factors are equal (union-find), some of which are 1."""

    def __init__(self) -> None:
        self._parent = [0]
        self._none: dict[int, str] = {}

    def fresh(self, shape: Sequence[int]) -> Labels:
        """New labels, each in a set of its own."""
        first, count = len(self._parent), int(np.prod(shape, dtype=np.int64))
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count, dtype=np.int64).reshape(shape)

    def join(self, a: Labels, b: Labels) -> None:
        """Make the factors of two arrays equal, element by element; lengths of 1 broadcast."""
        pairs = np.stack([x.ravel() for x in np.broadcast_arrays(self.found(a), self.found(b))], axis=1)
        for left, right in np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).tolist():
            small, large = sorted((self._root(left), self._root(right)), key=abs)
            if small == -large:
                self._none.setdefault(abs(small), "it would be multiplied and divided by the same factor")
            elif small != large:
                self._parent[abs(large)] = small if large > 0 else -small
                if abs(large) in self._none:
                    self._none.setdefault(abs(small), self._none[abs(large)])

    def none(self, labels: Labels, why: str) -> None:
        """Fix the factors to 1, and remember why."""
        for label in np.unique(np.abs(self.found(labels))).tolist():
            self._none.setdefault(label, why)

    def why(self, labels: Labels) -> str | None:
        """A reason why factors of these labels are 1; None if all of them are free."""
        roots = np.unique(np.abs(self.found(labels))).tolist()
        return next((self._none[root] for root in roots if root in self._none), None)

    def free(self, labels: Labels) -> Labels:
        """One label for each set; 0 where the factor is 1."""
        roots = self.found(labels)
        return np.where(np.isin(np.abs(roots), list(self._none)), 0, roots)

    def found(self, labels: Labels) -> Labels:
        """One label for each set, or its inverse."""
        own, inverse = np.unique(labels, return_inverse=True)
        return np.asarray([self._root(label) for label in own.tolist()], np.int64)[inverse.reshape(labels.shape)]

    def _root(self, label: int) -> int:
        one, sign = abs(label), 1
        while self._parent[one] != one:
            sign = sign if self._parent[one] > 0 else -sign
            one = abs(self._parent[one])
        self._parent[abs(label)] = sign * one
        return sign * one if label > 0 else -sign * one


def compressed(labels: Labels) -> Labels:
    """The same labels, with length 1 along every axis on which they do not change."""
    for axis in range(labels.ndim):
        first = labels.take([0], axis) if labels.shape[axis] else labels
        if labels.shape[axis] > 1 and bool(np.all(labels == first)):
            labels = first
    return labels


def reshaped(labels: Labels, old: Sequence[int], new: Sequence[int]) -> Labels:
    """Labels of a tensor of shape `old` after its reshape to `new`; only axes that are merged or split are expanded."""
    full = np.ones(len(old), bool)
    shape, i, j = list[int](), 0, 0
    while i < len(old) or j < len(new):
        # The shortest runs of axes in both shapes that hold the same elements.
        begin, end = i, j
        a = b = 1
        while True:
            if i < len(old) and (a <= b or j == len(new)):
                a, i = a * old[i], i + 1
            elif j < len(new):
                b, j = b * new[j], j + 1
            if a == b and (i, j) != (begin, end):
                break
            if i == len(old) and j == len(new):
                raise ValueError(f"expected the same elements, got shapes {tuple(old)} and {tuple(new)}")
        varies = any(labels.shape[axis] > 1 for axis in range(begin, i))
        full[begin:i] = varies
        shape += new[end:j] if varies else [1] * (j - end)
    wide = np.broadcast_to(labels, [n if f else 1 for n, f in zip(old, full, strict=True)])
    return np.ascontiguousarray(wide).reshape(shape)


def placed(labels: Labels, rank: int, axes: Iterable[tuple[int, int]]) -> Labels:
    """Labels for a tensor of that rank. axes: (axis of the labels, axis of the tensor); other axes have length 1."""
    pairs = sorted(axes, key=lambda pair: pair[1])
    order = [a for a, _ in pairs]
    rest = [a for a in range(labels.ndim) if a not in order]
    moved = labels.transpose([*order, *rest])
    shape = [1] * rank
    for a, b in pairs:
        shape[b] = labels.shape[a]
    return moved[(..., *([0] * len(rest)))].reshape(shape)
