"""Values of the traced program as ONNX tensors that are read through a permutation and a broadcast.

A jaxpr has every transpose and broadcast as an equation. ONNX broadcasts on its own, and two transposes in a row often
cancel. A traced value is therefore a `View`: a stored tensor with a map from its axes to the axes of the value.

- A transpose changes the map and writes no node.
- An elementwise operation uses the order of its largest stored operand.
- Only an operation that needs a certain order (a matrix product, a reshape) moves data.

So channels-first convolutions need no transpose in between, and vectors of per-channel constants remain vectors.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx.builder import Builder
from qjax.support.errors import Unsupported

Shape = tuple[int, ...]


class NeedsBatch(Unsupported):
    """Raised if the program depends on the size of the batch, which is free."""

    def __init__(self) -> None:
        super().__init__("it depends on the size of the batch, which is free")


@dataclasses.dataclass(frozen=True)
class View:
    """One value.

    name: of the ONNX tensor. dtype: numpy's name. shape: of the value. stored: sizes of the tensor's axes, each that of
    the value or 1 (repeated). axes: for each of the tensor's axes, the axis of the value; the value's other axes are
    repeated. value: the number of a literal.

    For integers whose range is known, see `carried`: low, high; and held: the type of the tensor if it is not dtype.
    known: the numbers of a constant, in the value's own shape.
    """

    name: str
    dtype: str
    shape: Shape
    stored: Shape
    axes: tuple[int, ...]
    value: int | bool | None = None
    low: int | None = None
    high: int | None = None
    held: str | None = None
    known: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The type of the tensor."""
        return self.held or self.dtype

    @property
    def range(self) -> bounds.Range:
        """The lowest and the highest number that an integer may be."""
        if self.value is not None:
            return int(self.value), int(self.value)
        low, high = bounds.of_dtype(self.dtype)
        return low if self.low is None else self.low, high if self.high is None else self.high

    @classmethod
    def full(cls, name: str, dtype: str, shape: Shape, order: Sequence[int] | None = None) -> "View":
        """A tensor that stores every element; order: for each of its axes, the axis of the value."""
        axes = tuple(range(len(shape))) if order is None else tuple(order)
        return cls(name, dtype, shape, tuple(shape[axis] for axis in axes), axes)

    def size(self, axis: int) -> int:
        """How many elements are stored along an axis of the value."""
        return self.stored[self.axes.index(axis)] if axis in self.axes else 1

    def holds(self, axes: Sequence[int]) -> bool:
        """Whether no element is repeated along those axes."""
        return all(self.size(axis) == self.shape[axis] for axis in axes)


class Views:
    """Operations on views that every primitive shares.

    free: the size that represents the batch (see `batch`), None if the batch is fixed. source: a view with such an
    axis, from which the batch's size can be read at run time.
    """

    def __init__(self, builder: Builder, free: int | None = None, source: View | None = None) -> None:
        self.builder, self.free, self.source = builder, free, source

    def is_free(self, size: int) -> bool:
        """Whether a size is a multiple of the batch."""
        return self.free is not None and size > 0 and size % self.free == 0

    def literal(self, value: np.ndarray | np.generic) -> View:
        """A constant; a scalar remembers its value."""
        array = np.asarray(value)
        name = self.builder.constant(array)
        known = array.item() if array.ndim == 0 else None
        return View(name, array.dtype.name, array.shape, array.shape, tuple(range(array.ndim)), known)

    def common_order(self, views: Sequence[View]) -> tuple[int, ...]:
        """The axis order in which the largest of several views of one shape is stored."""
        largest = max(views, key=lambda view: math.prod(view.stored))
        rank = len(largest.shape)
        if tuple(sorted(largest.axes)) == largest.axes:
            return tuple(range(rank))
        return (*(axis for axis in range(rank) if axis not in largest.axes), *largest.axes)

    def aligned(self, view: View, order: Sequence[int]) -> View:
        """The view with its axes in that order, right-aligned: ready to broadcast against others in that order."""
        place = {axis: index for index, axis in enumerate(order)}
        name, stored, axes = view.name, view.stored, view.axes
        permutation = sorted(range(len(axes)), key=lambda index: place[axes[index]])
        if permutation != list(range(len(axes))):
            name = self.builder.op("Transpose", name, perm=permutation)
            stored, axes = tuple(stored[i] for i in permutation), tuple(axes[i] for i in permutation)
        if not axes:
            return dataclasses.replace(view, name=name, stored=stored, axes=axes)
        wanted = list(order)[place[axes[0]] :]
        missing = [index for index, axis in enumerate(wanted) if axis not in axes]
        if missing:
            name = self.builder.op("Unsqueeze", name, self.builder.integers(missing))
            stored = tuple(stored[axes.index(axis)] if axis in axes else 1 for axis in wanted)
        return dataclasses.replace(view, name=name, stored=stored, axes=tuple(wanted))

    def expanded(self, view: View, axes: Sequence[int] | None = None) -> View:
        """The view with every axis (or the given ones) stored in full, and a stored axis for each axis of the value."""
        rank = len(view.shape)
        view = self.aligned(view, self.common_order([view]))
        missing = rank - len(view.axes)
        name, stored = view.name, view.stored
        order = view.axes
        if missing:
            front = tuple(axis for axis in range(rank) if axis not in order)
            name = self.builder.op("Unsqueeze", name, self.builder.integers(range(missing)))
            stored, order = (1,) * missing + stored, front + order
        view = dataclasses.replace(view, name=name, stored=stored, axes=order, value=None)
        chosen = range(rank) if axes is None else axes
        if view.holds(chosen):
            return view
        sizes = [view.shape[axis] if axis in chosen else view.size(axis) for axis in view.axes]
        name = self.builder.op("Expand", view.name, self.shape_vector(sizes))
        return dataclasses.replace(view, name=name, stored=tuple(sizes))

    def materialized(self, view: View, order: Sequence[int] | None = None) -> str:
        """The name of a tensor with all elements, its axes in that order (that of the value if none is given)."""
        order = tuple(range(len(view.shape))) if order is None else tuple(order)
        return self.aligned(self.expanded(view), order).name

    def shape_vector(self, sizes: Sequence[int]) -> str:
        """The sizes as a tensor; those that depend on the batch are computed at run time."""
        if not any(self.is_free(size) for size in sizes):
            return self.builder.integers(sizes)
        parts = [self._run_time(size) if self.is_free(size) else self.builder.integers([size]) for size in sizes]
        return parts[0] if len(parts) == 1 else self.builder.op("Concat", *parts, axis=0)

    def _run_time(self, size: int) -> str:
        if self.source is None or self.free is None:
            raise NeedsBatch
        at, have = next((i, n) for i, n in enumerate(self.source.stored) if self.is_free(n))
        batch = self.builder.op("Shape", self.source.name, start=at, end=at + 1)
        if have != self.free:
            batch = self.builder.op("Div", batch, self.builder.integers([have // self.free]))
        return batch if size == self.free else self.builder.op("Mul", batch, self.builder.integers([size // self.free]))

    def reshaped(self, name: str, sizes: Sequence[int]) -> str:
        """A tensor in another shape, in which at most one size depends on the batch."""
        free = [self.is_free(size) for size in sizes]
        if sum(free) > 1:
            return self.builder.op("Reshape", name, self.shape_vector(sizes))
        dims = [-1 if follows else size for follows, size in zip(free, sizes, strict=True)]
        return self.builder.op("Reshape", name, self.builder.integers(dims), allowzero=1 if 0 in dims else 0)

    def reshape(self, view: View, shape: Shape) -> View:
        """The value in another shape."""
        if not view.axes:
            return dataclasses.replace(view, shape=shape)
        places = _same_axes(view.shape, shape)
        if places is not None:
            return self._change_unit_axes(view, shape, places)
        name = self.reshaped(self.materialized(view), shape)
        return View.full(name, view.dtype, shape)

    def _change_unit_axes(self, view: View, shape: Shape, places: dict[int, int]) -> View:
        """Add or remove axes of size 1."""
        dropped = [index for index, axis in enumerate(view.axes) if axis not in places]
        name = view.name
        if dropped:
            name = self.builder.op("Squeeze", name, self.builder.integers(dropped))
        left = [index for index in range(len(view.axes)) if index not in dropped]
        return View(
            name,
            view.dtype,
            shape,
            tuple(view.stored[index] for index in left),
            tuple(places[view.axes[index]] for index in left),
        )

    def transpose(self, view: View, permutation: Sequence[int]) -> View:
        """The value with its axes permuted, as `lax.transpose`; no node."""
        places = [list(permutation).index(axis) for axis in view.axes]
        shape = tuple(view.shape[axis] for axis in permutation)
        return dataclasses.replace(view, shape=shape, axes=tuple(places))

    def cast(self, view: View, dtype: str) -> View:
        """The same integers in another dtype."""
        if view.dtype == dtype:
            return view
        return dataclasses.replace(view, name=self.builder.cast(view.name, dtype), dtype=dtype, value=None)


def _same_axes(old: Shape, new: Shape) -> dict[int, int] | None:
    """For each axis of the old shape, the axis of the new one, if they differ in axes of size 1 only.

    Axes are matched from the right, so that axes of size 1 that both have stay in place.
    """
    places: dict[int, int] = {}
    i, j = len(old) - 1, len(new) - 1
    while i >= 0 or j >= 0:
        if i >= 0 and j >= 0 and old[i] == new[j]:
            places[i] = j
            i, j = i - 1, j - 1
        elif i >= 0 and old[i] == 1:
            i -= 1
        elif j >= 0 and new[j] == 1:
            j -= 1
        else:
            return None
    return places
