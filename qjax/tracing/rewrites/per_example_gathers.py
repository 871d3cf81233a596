"""Rewrites gathers in which each example takes its own element, so that the examples are a batch axis.

    x[arange(n), lengths] or vmap(lambda row, i: row[i])    ->    take_along_axis(x, lengths[:, None], axis=1)

One component of the indices of such a gather is the number of the example. This rewriter removes it and makes the
example axis a batch axis of the gather, which is the form that `ops.take` reads. A component that is 0 along an axis
that is taken whole is removed too. A tensor that is the same for every example has no batch axis.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from qjax.ops.indices import fills
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow
from qjax.tracing.rewrites.dynamic_slices import clamped
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import lookups, read


def take_own(program: Program) -> Program:
    """Rewrite such gathers along one axis, with a batch axis for the examples."""
    if not any(eqn.primitive == "gather" for eqn in program.equations):
        return program
    number, flow = numbers(program), Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        found = None
        if eqn.primitive == "gather":
            found = _unrepeated(eqn, flow) or _Gather(eqn, flow, number).batched()
        equations += [eqn] if found is None else found
    return dataclasses.replace(program, equations=tuple(read(equations, program.outputs)))


def _unrepeated(eqn: Equation, flow: Flow) -> list[Equation] | None:
    """The gather without batch axes, if the tensor repeats along all of them."""
    n, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batching = {int(axis) for axis in getattr(n, "operand_batching_dims", ())}
    found = flow.behind(eqn.inputs[0])
    if not batching or any(found.axes[axis] is not None for axis in batching):
        return None
    left = [axis for axis in range(len(sizes)) if axis not in batching]
    own = [found.axes[axis] for axis in left]
    shape = [eqn.in_shapes[0][axis] for axis in left]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(n.offset_dims),
        collapsed_slice_dims=tuple(left.index(axis) for axis in n.collapsed_slice_dims),
        start_index_map=tuple(left.index(axis) for axis in n.start_index_map),
    )

    def gathered(x: Any, indices: Any) -> Any:
        kept = sorted(axis for axis in own if axis is not None)
        x = lax.squeeze(x, [axis for axis in range(x.ndim) if axis not in kept])
        x = lax.transpose(x, [kept.index(axis) for axis in own if axis is not None])
        x = lax.broadcast_in_dim(x, shape, [place for place, axis in enumerate(own) if axis is not None])
        return lax.gather(
            x.astype(eqn.in_dtypes[0]),
            indices,
            numbers,
            tuple(sizes[axis] for axis in left),
            mode=eqn.params["mode"],
            fill_value=eqn.params["fill_value"],
        )

    equations, _ = inlined(gathered, [found.value, eqn.inputs[1]], eqn.outputs, eqn)
    return lookups(equations)


class _Gather:
    """A gather with separate components of its indices, one for every axis of the operand along which they select."""

    def __init__(self, eqn: Equation, flow: Flow, number: Callable[[Value], np.ndarray | None]) -> None:
        self.eqn = eqn
        self.number = number
        n = eqn.params["dimension_numbers"]
        self.offset = list(n.offset_dims)
        self.collapsed = list(n.collapsed_slice_dims)
        self.mapped = [int(axis) for axis in n.start_index_map]
        self.batching: list[int] = list(getattr(n, "operand_batching_dims", ()))
        self.indexed: list[int] = list(getattr(n, "start_indices_batching_dims", ()))
        self.sizes = list(eqn.params["slice_sizes"])
        self.parts = self._parts(flow)

    def _parts(self, flow: Flow) -> list[Value] | None:
        """The components of the indices, each with a last axis of size 1."""
        indices = self.eqn.inputs[1]
        if len(self.mapped) == 1:
            return [indices]
        made = flow.plain(indices).equation
        if made is None or made.primitive != "concatenate" or made.params["dimension"] != len(indices.shape) - 1:
            return None
        parts = list(made.inputs)
        return parts if len(parts) == len(self.mapped) else None

    def batched(self) -> list[Equation] | None:
        """The gather with one component left, or None if it is no such gather."""
        if self.parts is None:
            return None
        left: list[tuple[int, Value]] = []
        batching, indexed, collapsed = list(self.batching), list(self.indexed), list(self.collapsed)
        for axis, part in zip(self.mapped, self.parts, strict=True):
            array = self.number(part)
            example = None if array is None else self._counts(axis, array)
            if example is not None:
                batching.append(axis)
                indexed.append(example)
                collapsed.remove(axis)
            elif array is not None and self.sizes[axis] == self.eqn.in_shapes[0][axis] and not array.any():
                if axis in collapsed:
                    return None
            else:
                left.append((axis, part))
        if not batching:
            return None
        if len(left) > 1:
            return self._flatten_indices(left, batching, indexed, collapsed)
        if not left:
            return None
        ((axis, part),) = left
        if axis not in collapsed and 1 < self.sizes[axis] < self.eqn.in_shapes[0][axis]:
            return self._window(axis, part, batching, indexed, collapsed)
        offset = list(self.offset)
        if axis not in collapsed:
            if self.sizes[axis] != 1:
                return None
            # the result has an axis of size 1 there, which a reshape adds again
            windows = [a for a in range(len(self.sizes)) if a not in self.collapsed and a not in self.batching]
            gone = offset.pop(windows.index(axis))
            offset = [place - (place > gone) for place in offset]
            collapsed.append(axis)
        elif len(left) == len(self.mapped):
            return None
        gather = self._function(axis, offset, collapsed, batching, indexed, self.sizes)
        shape = self.eqn.out_shapes[0]

        def gathered(x: Any, indices: Any) -> Any:
            found = gather(x, indices)
            return found if found.shape == shape else lax.reshape(found, shape)

        return inlined(gathered, [self.eqn.inputs[0], part], self.eqn.outputs, self.eqn)[0]

    def _flatten_indices(
        self, left: list[tuple[int, Value]], batching: list[int], indexed: list[int], collapsed: list[int]
    ) -> list[Equation] | None:
        """Each example takes elements by several indices, `x[rows, i, j]`: axes and indices are flattened to one."""
        axes = [axis for axis, _ in left]
        if not {*axes} <= {*collapsed} or fills(self.eqn.params):
            return None
        shape = self.eqn.in_shapes[0]
        others = [axis for axis in range(len(shape)) if axis not in axes]
        place = {axis: others.index(axis) for axis in others}
        gather = self._function(
            len(others),
            self.offset,
            [*(place[axis] for axis in collapsed if axis in place), len(others)],
            [place[axis] for axis in batching],
            indexed,
            [*(self.sizes[axis] for axis in others), 1],
        )

        def gathered(x: Any, *parts: Any) -> Any:
            flat = lax.reshape(
                lax.transpose(x, [*others, *axes]),
                [*(shape[axis] for axis in others), math.prod(shape[axis] for axis in axes)],
            )
            index = None
            for axis, part in zip(axes, parts, strict=True):
                # as in `lax.gather`, clamp each index separately
                part = clamped(part, shape[axis] - 1)
                index = part if index is None else index * np.int32(shape[axis]) + part
            return gather(flat, index)

        return inlined(gathered, [self.eqn.inputs[0], *(part for _, part in left)], self.eqn.outputs, self.eqn)[0]

    def _window(
        self, axis: int, part: Value, batching: list[int], indexed: list[int], collapsed: list[int]
    ) -> list[Equation]:
        """Consecutive elements from a start that each example chooses: one index for every element."""
        size, length = self.sizes[axis], self.eqn.in_shapes[0][axis]
        windows = [a for a in range(len(self.sizes)) if a not in self.collapsed and a not in self.batching]
        rest = [a for a in windows if a != axis]
        rows = len(part.shape) - 1
        offset = list(range(rows + 1, rows + 1 + len(rest)))
        sizes = [1 if a == axis else n for a, n in enumerate(self.sizes)]
        gather = self._function(axis, offset, [*collapsed, axis], batching, indexed, sizes)
        order: list[int] = []
        examples = iter(range(rows))
        for place in range(len(self.eqn.out_shapes[0])):
            if place not in self.offset:
                order.append(next(examples))
                continue
            window = windows[self.offset.index(place)]
            order.append(rows if window == axis else rows + 1 + rest.index(window))

        def gathered(x: Any, starts: Any) -> Any:
            # as in `lax.dynamic_slice`, move a start so that the window fits
            starts = clamped(starts, length - size)
            steps = lax.broadcasted_iota(starts.dtype, (*(1,) * rows, size, 1), rows)
            indices = lax.add(lax.reshape(starts, (*starts.shape[:-1], 1, 1)), steps)
            return lax.transpose(gather(x, indices), order)

        return inlined(gathered, [self.eqn.inputs[0], part], self.eqn.outputs, self.eqn)[0]

    def _function(
        self,
        axis: int,
        offset: Sequence[int],
        collapsed: Sequence[int],
        batching: Sequence[int],
        indexed: Sequence[int],
        sizes: Sequence[int],
    ) -> Callable[[Any, Any], Any]:
        """The gather along one axis with those dimension numbers."""
        order = sorted(range(len(batching)), key=lambda i: batching[i])
        dimension_numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(offset),
            collapsed_slice_dims=tuple(sorted(collapsed)),
            start_index_map=(axis,),
            operand_batching_dims=tuple(batching[i] for i in order),
            start_indices_batching_dims=tuple(indexed[i] for i in order),
        )
        params = self.eqn.params
        return lambda x, indices: lax.gather(
            x,
            indices,
            dimension_numbers,
            tuple(sizes),
            indices_are_sorted=False,
            unique_indices=False,
            mode=params["mode"],
            fill_value=params["fill_value"],
        )

    def _counts(self, axis: int, array: np.ndarray) -> int | None:
        """The axis of the indices along which a component counts all entries of an axis of the operand."""
        if self.sizes[axis] != 1 or axis not in self.collapsed:
            return None
        size = self.eqn.in_shapes[0][axis]
        for place in range(array.ndim - 1):
            shape = [size if a == place else 1 for a in range(array.ndim)]
            if array.shape[place] == size and (array == np.arange(size).reshape(shape)).all():
                return place
        return None
