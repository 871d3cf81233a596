"""Elementwise arithmetic of integers in the narrowest type that represents them.

A kernel computes in int64 if its widest number needs it. ONNX Runtime is two to four times as fast in int32, and its
maximum of int64 is wrong. Each traced integer therefore has a range, and a carrier, which is the type of the tensor
that stores it:

- int32 if the operands and the result fit;
- float64, for long sums and after a rounding, while every number is below 2^53, in files for ONNX Runtime alone;
- otherwise the dtype of the trace.

All of them are exact. A cast to the dtype of the trace is written where something needs that.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx.arithmetic import unsigned
from qjax.export.emit.onnx.elementwise import ELEMENTWISE
from qjax.export.emit.onnx.views import View, Views

FLOATS = "float64"
EXACT = 2**53
"""float64 represents every integer up to this one."""

_FEW = 4096
"""Up to this many elements the number of operators decides, not their speed."""

_IN_FLOATS = ("add", "sub", "mul", "square", "neg", "abs", "max", "min", "select_n", "eq", "ne", "lt", "le", "gt", "ge")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

Apply = Callable[..., str]


class Carried(Views):
    """Operations on integers of known ranges. for_runtime: see `Library`."""

    for_runtime = False

    # ------------------------------------------------------------------ types

    def settled(self, view: View) -> View:
        """The view as a tensor of its own dtype."""
        return view if view.kind == view.dtype else dataclasses.replace(self.carried(view, view.dtype), held=None)

    def carried(self, view: View, kind: str) -> View:
        """The view in another carrier that fits its range."""
        if view.kind == kind:
            return view
        if view.value is not None:
            name = self.builder.constant(np.asarray(view.value, kind))
            return dataclasses.replace(view, name=name, held=kind, stored=(), axes=())
        return dataclasses.replace(view, name=self.builder.cast(view.name, kind), held=kind)

    def number(self, value: Any, dtype: str, shape: Sequence[int] = ()) -> View:
        """A constant of one number, in any shape."""
        return dataclasses.replace(self.literal(np.asarray(value, dtype)), shape=tuple(shape))

    def narrowest(self, view: View) -> View:
        """The view in int32 if it fits, else in its dtype."""
        return self.carried(view, "int32") if bounds.fits(view.range, "int32") else self.settled(view)

    def is_small(self, view: View, most: int = _FEW) -> bool:
        """Whether a tensor has few elements for each example of a batch."""
        return math.prod(n // self.free if self.free and n and n % self.free == 0 else n for n in view.stored) <= most

    def apply(self, write: Apply, x: Sequence[View], shape: tuple[int, ...], dtype: str) -> View:
        """write(*names) on operands of one shape (or scalars), aligned to the axis order of the largest."""
        views = [dataclasses.replace(view, shape=shape) if not view.shape else view for view in x]
        order = self.common_order(views)
        aligned = [self.aligned(view, order) for view in views]
        result = write(*(view.name for view in aligned))
        widest = max(aligned, key=lambda view: len(view.axes))
        stored = [1] * len(widest.axes)
        for view in aligned:
            for index, size in enumerate(view.stored):
                place = len(stored) - len(view.stored) + index
                stored[place] = max(stored[place], size)
        return View(result, dtype, shape, tuple(stored), widest.axes)

    # ------------------------------------------------------------------ operations

    def in_range(self, name: str, params: Any, x: Sequence[View], shape: tuple[int, ...], dtype: str) -> View | None:
        """An elementwise primitive, in the narrowest carrier; None if its range is not known."""
        if any(view.dtype not in bounds.INTEGERS for view in x):
            return None
        simple = self._simple(name, x, shape, dtype)
        if simple is not None:
            return dataclasses.replace(simple, shape=shape)
        found = bounds.of(name, [view.range for view in x])
        if found is None or not bounds.fits(found, dtype) or any(view.dtype.startswith("u") for view in x):
            return None
        if found[0] == found[1]:
            return self.number(found[0], dtype, shape)
        if name in ("shift_left", "shift_right_arithmetic"):
            return self._write_shift(name, x[0], x[1], shape, found)
        if x[-1].dtype == "bool":
            return None
        result = self._write_primitive(name, params, list(x), shape, dtype, found)
        return dataclasses.replace(result, low=found[0], high=found[1])

    def _simple(self, name: str, x: Sequence[View], shape: tuple[int, ...], dtype: str) -> View | None:
        """A result that needs no operator: a constant, or one of the operands."""
        values = [view.value for view in x]
        if all(value is not None for value in values) and name in bounds.FOLDED:
            folded = bounds.fold(name, [int(value) for value in values if value is not None], x[0].dtype)
            return None if folded is None else self.number(folded, dtype, shape)
        if name in _COMPARISONS:
            decided = bounds.decided(name, x[0].range, x[1].range)
            return None if decided is None else self.number(decided, "bool", shape)
        if name == "select_n":
            return None if values[0] is None else x[1 + int(values[0])]
        if len(x) != 2:
            return None
        a, b = x
        if name in ("max", "min"):
            first, second = (a, b) if name == "max" else (b, a)
            if first.range[0] >= second.range[1]:
                return a
            return b if second.range[0] >= first.range[1] else None
        for one, other, value in ((a, b, values[1]), (b, a, values[0])):
            if value is None or (one is b and name not in ("add", "mul", "and", "or")):
                continue
            if (name, value) in _UNCHANGED:
                return one
            if (name, value) in (("mul", 0), ("and", 0)):
                return other
        return None

    def _write_primitive(
        self, name: str, params: Any, x: list[View], shape: tuple[int, ...], dtype: str, found: bounds.Range
    ) -> View:
        numbers = x[1:] if name == "select_n" else x
        ranges = [view.range for view in numbers] + ([] if name in _COMPARISONS else [found])
        carrier = x[-1].dtype
        exact = all(low >= -EXACT and high <= EXACT for low, high in ranges)
        if name in _IN_FLOATS and exact and any(view.kind == FLOATS for view in numbers):
            carrier = FLOATS
        elif all(bounds.fits(one, "int32") for one in ranges):
            carrier = "int32"
        carried = [self.carried(view, carrier) for view in numbers]
        given = [*x[: len(x) - len(numbers)], *carried]
        result = self.apply(lambda *names: ELEMENTWISE[name](self.builder, carrier, params, names), given, shape, dtype)
        return result if name in _COMPARISONS else dataclasses.replace(result, held=carrier)

    # ------------------------------------------------------------------ shifts

    def _write_shift(
        self, name: str, x: View, amount: View, shape: tuple[int, ...], found: bounds.Range
    ) -> View | None:
        result = None
        if amount.value is not None:
            result = self._by_number(name, x, int(amount.value), shape, found)
        elif x.range[0] >= 0:
            result = self._by_tensor(name, x, amount, shape, found)
        return None if result is None else dataclasses.replace(result, low=found[0], high=found[1])

    def _by_number(self, name: str, x: View, bits: int, shape: tuple[int, ...], found: bounds.Range) -> View | None:
        dtype, one = x.dtype, 1 << bits
        if name == "shift_left":
            if not bounds.fits((one, one), dtype):
                return None
            return self._write_primitive("mul", None, [x, self.number(one, dtype)], shape, dtype, found)
        if x.kind == FLOATS:
            scaled = self.builder.op("Mul", x.name, self.builder.constant(np.float64(1 / one)))
            return dataclasses.replace(x, name=self.builder.op("Floor", scaled), shape=shape)
        lift = max(0, -(x.range[0] >> bits))
        raised = (lift << bits) + x.range[0], (lift << bits) + x.range[1]
        if not bounds.fits(raised, dtype):
            # ONNX has no such shift, so call the function for any numbers
            settled = self.settled(x)
            moved = ELEMENTWISE[name](self.builder, dtype, None, (settled.name, self.number(bits, dtype).name))
            return dataclasses.replace(settled, name=moved, shape=shape)
        kind = "int32" if all(bounds.fits(one, "int32") for one in (x.range, raised)) else dtype
        x = self.carried(x, kind)
        moved = (
            self.builder.op("Add", x.name, self.builder.constant(np.asarray(lift << bits, kind))) if lift else x.name
        )
        if self.is_small(x):
            moved = self.builder.op("Div", moved, self.builder.constant(np.asarray(one, kind)))
        else:
            moved = self._unsigned_shift(moved, self.builder.constant(np.asarray(bits, unsigned(kind))), kind)
        if lift:
            moved = self.builder.op("Sub", moved, self.builder.constant(np.asarray(lift, kind)))
        return dataclasses.replace(x, name=moved, shape=shape, held=kind)

    def _unsigned_shift(self, x: str, amount: str, kind: str) -> str:
        moved = self.builder.op("BitShift", self.builder.cast(x, unsigned(kind)), amount, direction="RIGHT")
        return self.builder.cast(moved, kind)

    def _by_tensor(self, name: str, x: View, amount: View, shape: tuple[int, ...], found: bounds.Range) -> View:
        """A right shift by a tensor, for numbers that are not negative."""
        dtype = x.dtype
        kind = "int32" if all(bounds.fits(one, "int32") for one in (x.range, found)) and amount.range[1] < 32 else dtype
        direction = "LEFT" if name == "shift_left" else "RIGHT"
        given = [self.carried(view, kind) for view in (x, amount)]

        def write(*names: str) -> str:
            both = (self.builder.cast(one, unsigned(kind)) for one in names)
            return self.builder.cast(self.builder.op("BitShift", *both, direction=direction), kind)

        return dataclasses.replace(self.apply(write, given, shape, dtype), held=kind)


_UNCHANGED = {
    ("add", 0),
    ("sub", 0),
    ("mul", 1),
    ("and", -1),
    ("or", 0),
    ("shift_left", 0),
    ("shift_right_arithmetic", 0),
}
"""Primitives and a second operand with which they return the first one."""
