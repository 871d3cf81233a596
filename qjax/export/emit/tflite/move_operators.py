"""Operators that only move codes: RESHAPE, TRANSPOSE, PAD, SLICE, and combinations of them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.tflite.draft import Draft, Value
from qjax.export.emit.tflite.support import MICRO
from qjax.support.errors import Unsupported


class Moving(Draft):
    """A draft with methods that move codes."""

    def moved(
        self,
        operator: str,
        inputs: Sequence[Value | int],
        shape: Sequence[int],
        free: frozenset[int],
        of: Value,
        **options: Any,
    ) -> Value:
        """Append an operator that moves the codes of `of`."""
        return self.apply(operator, inputs, shape, free, of.dtype, of.quantization, **options)

    def copy(self, x: Value) -> Value:
        """The same tensor again, as the output of an operator."""
        return self._reshape(x, x.shape, x.free)

    def reshape(self, x: Value, shape: Sequence[int], free: frozenset[int] | None = None) -> Value:
        """The codes in another shape; free: its axes that depend on the batch (default: those at the same position)."""
        shape = tuple(shape)
        free = frozenset(axis for axis in x.free if axis < len(shape)) if free is None else free
        return x if shape == x.shape else self._reshape(x, shape, free)

    def _reshape(self, x: Value, shape: tuple[int, ...], free: frozenset[int]) -> Value:
        if len(free) > 1:
            self.resizable = False
        numbers = [-1 if axis in free and len(free) == 1 else size for axis, size in enumerate(shape)]
        return self.moved("RESHAPE", [x, self.integers(numbers)], shape, free, x, newShape=numbers)

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """The axes in another order."""
        order = list(permutation)
        if order == sorted(order):
            return x
        shape = [x.shape[axis] for axis in order]
        if [axis for axis in order if x.shape[axis] != 1 or axis in x.free] == sorted(
            axis for axis in order if x.shape[axis] != 1 or axis in x.free
        ):
            # only axes of one element move
            return self._reshape(x, tuple(shape), frozenset(order.index(axis) for axis in x.free))
        if len(order) > (5 if self.graph.target in MICRO else 6):
            return self._transpose_merged(x, order)
        if self.graph.target in MICRO and x.dtype in ("bool", "int32"):
            return self._transpose_numbers(x, order)
        free = frozenset(order.index(axis) for axis in x.free)
        return self.moved("TRANSPOSE", [x, self.integers(order)], shape, free, x)

    def _transpose_numbers(self, x: Value, order: list[int]) -> Value:
        """A transposition of plain integers: TFLite Micro only transposes codes, so booleans are written as codes."""
        if x.dtype != "bool":
            raise Unsupported(f"a transposition of {x.dtype}", "TFLite Micro has none: transpose the codes earlier")
        kinds: dict[str, Any] = {"inDataType": "bool", "outDataType": "int8"}
        turned = self.transpose(self.apply("CAST", [x], x.shape, x.free, "int8", None, **kinds), order)
        kinds = {"inDataType": "int8", "outDataType": "bool"}
        return self.apply("CAST", [turned], turned.shape, turned.free, "bool", None, **kinds)

    def _transpose_merged(self, x: Value, order: list[int]) -> Value:
        """A transposition of many axes: those that stay neighbours become one, those of one element are removed."""
        groups: list[list[int]] = []
        for axis in order:
            if x.shape[axis] == 1 and axis not in x.free:
                continue
            if groups and axis == groups[-1][-1] + 1:
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if len(groups) > (5 if self.graph.target in MICRO else 6):
            raise Unsupported(
                f"a transposition of {len(x.shape)} dimensions",
                "TFLite has at most 6, TFLite Micro 5: do it in two steps",
            )
        by_place = sorted(groups)

        def free(parts: list[list[int]]) -> frozenset[int]:
            return frozenset(i for i, part in enumerate(parts) if x.free & set(part))

        sizes = [math.prod(x.shape[axis] for axis in group) for group in by_place]
        turned = self.transpose(self.reshape(x, sizes, free(by_place)), [by_place.index(group) for group in groups])
        shape = [x.shape[axis] for axis in order]
        return self.reshape(turned, shape, frozenset(order.index(axis) for axis in x.free))

    def pad(self, x: Value, padding: Sequence[Sequence[int]], fill: int) -> Value:
        """Put `fill` around the codes: (low, high) per axis, negative to crop."""
        cut = [[max(-low, 0), max(-high, 0)] for low, high in padding]
        if any(map(any, cut)):
            starts = [low for low, _ in cut]
            x = self.slice(x, starts, [x.shape[a] - low - high for a, (low, high) in enumerate(cut)])
        added = [[max(low, 0), max(high, 0)] for low, high in padding]
        if not any(map(any, added)):
            return x
        shape = [size + low + high for size, (low, high) in zip(x.shape, added, strict=True)]
        pads = self.constant(np.asarray(added, np.int32), "int32")
        if fill == (0 if x.quantization is None else x.zero_point):
            return self.moved("PAD", [x, pads], shape, x.free, x)
        # the pad value must have the input's scale and zero point
        value = self.constant(np.asarray([fill], x.dtype), x.dtype, x.quantization)
        return self.moved("PADV2", [x, pads, value], shape, x.free, x)

    def dilate(self, x: Value, axis: int, step: int, fill: int) -> Value:
        """Put `step - 1` codes `fill` between neighbours along an axis."""
        size = x.shape[axis]
        if step == 1 or size == 0:
            return x
        outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        free = frozenset({0} if any(a < axis for a in x.free) else ())
        if any(a >= axis for a in x.free):
            self.resizable = False
        rows = self.reshape(x, (outer, size, inner), free)
        rows = self.pad(rows, [(0, 0), (0, 0), (0, (step - 1) * inner)], fill)
        shape = (*x.shape[:axis], size * step, *x.shape[axis + 1 :])
        grown = self.reshape(rows, shape, x.free)
        return self.pad(grown, [(0, 1 - step if a == axis else 0) for a in range(len(shape))], fill)

    def slice(self, x: Value, starts: Sequence[int], sizes: Sequence[int]) -> Value:
        """A part of the codes; axes that depend on the batch are complete."""
        if tuple(sizes) == x.shape:
            return x
        whole = frozenset(axis for axis in x.free if starts[axis] == 0 and sizes[axis] == x.shape[axis])
        if whole != x.free:
            self.resizable = False
        asked = [-1 if axis in whole else size for axis, size in enumerate(sizes)]
        return self.moved("SLICE", [x, self.integers(list(starts)), self.integers(asked)], sizes, whole, x)
