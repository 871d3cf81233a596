"""Translates a jaxpr to ONNX, primitive by primitive.

This file contains no formula. The kernel is traced, and each primitive of the trace has one entry in `elementwise`,
`structure`, `windows` or `products`. Loops become Scan.

The integers of a trace have ranges (see `carried`), and some functions of the kernels are known by their names (see
`named_calls`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from jax.extend.core import ClosedJaxpr, Literal
from onnx import helper

from qjax.export.emit.onnx.builder import Builder, element_type
from qjax.export.emit.onnx.carried import Carried
from qjax.export.emit.onnx.elementwise import ELEMENTWISE, widened
from qjax.export.emit.onnx.named_calls import NAMED
from qjax.export.emit.onnx.products import dot_general
from qjax.export.emit.onnx.ranged import RANGED
from qjax.export.emit.onnx.structure import STRUCTURE, pad, sliced
from qjax.export.emit.onnx.views import View, Views
from qjax.graph.float_parts import plainest
from qjax.numerics.calls import called_program, named_call
from qjax.tracing.loop_params import with_counts

# ---------------------------------------------------------------------------- sums and maxima over windows
#     a 2 x 2 sum of x    ->    r = x[:-1] + x[1:];  r[:, :-1] + r[:, 1:]
#
# MaxPool works on codes of 8 bits. ONNX has no sum over windows of integers, so rows and then columns are added as
# slices. This is exact, and takes n + m additions instead of n m.


def reduce_window_sum(t: Views, params: Any, x: Sequence[View]) -> View:
    """Sums over windows; padding adds 0."""
    padded = _padded(t, x[0], params, t.literal(np.zeros((), x[0].dtype)))
    return _separately(t, padded, params, "Add")


def reduce_window_max(t: Views, params: Any, x: Sequence[View]) -> View:
    """Maxima over windows; padding is the lowest number of the dtype."""
    (view,) = x
    native = _max_pool(t, view, params)
    if native is not None:
        return native
    padded = _padded(t, view, params, t.literal(np.asarray(np.iinfo(view.dtype).min, view.dtype)))
    return _separately(t, padded, params, "Max")


def _padded(t: Views, view: View, params: Any, fill: View) -> View:
    amounts = zip(params["padding"], params["base_dilation"], strict=True)
    return pad(t, {"padding_config": [(low, high, between - 1) for (low, high), between in amounts]}, (view, fill))


def _separately(t: Views, view: View, params: Any, op: str) -> View:
    """One axis after the other."""
    for axis, n in enumerate(params["window_dimensions"]):
        stride, dilation = params["window_strides"][axis], params["window_dilation"][axis]
        if n == 1 and stride == 1:
            continue
        view = t.expanded(view, [axis])
        size = view.shape[axis]
        span = (size - (n - 1) * dilation - 1) // stride * stride + 1
        taps: list[View] = []
        for position in range(n):
            start = [position * dilation if a == axis else 0 for a in range(len(view.shape))]
            limit = [start[a] + span if a == axis else length for a, length in enumerate(view.shape)]
            taps.append(sliced(t, view, start, limit, [stride if a == axis else 1 for a in range(len(view.shape))]))

        def joined(first: str, *others: str) -> str:
            for other in others:
                first = t.builder.op(op, first, other)
            return first

        name = widened(t.builder, view.dtype, [tap.name for tap in taps], joined)
        view = dataclasses.replace(taps[0], name=name)
    return view


def _max_pool(t: Views, view: View, params: Any) -> View | None:
    """MaxPool, for 8 bits and windows over one to three axes after or between two others."""
    window, strides = params["window_dimensions"], params["window_strides"]
    padding, dilation = params["padding"], params["window_dilation"]
    rank = len(view.shape)
    slid = [a for a in range(rank) if (window[a], strides[a], tuple(padding[a])) != (1, 1, (0, 0))]
    fits = view.dtype in ("int8", "uint8") and all(n == 1 for n in params["base_dilation"])
    fits = fits and all(0 <= n < window[a] for a in slid for n in padding[a])
    outer = [a for a in t.common_order([view]) if a not in slid]
    if not fits or not 1 <= len(slid) <= 3 or len(outer) > 2:
        return None
    # ONNX needs two outer axes, so add axes with window 1 and stride 1
    while len(outer) < 2 and len(slid) > 1:
        still = next((a for a in slid if window[a] == 1 and strides[a] == 1), None)
        if still is None:
            return None
        slid.remove(still)
        outer.append(still)
    if len(outer) != 2:
        return None
    order = (*outer, *slid)
    name = t.builder.op(
        "MaxPool",
        t.materialized(view, order),
        kernel_shape=[window[a] for a in slid],
        strides=[strides[a] for a in slid],
        dilations=[dilation[a] for a in slid],
        pads=[padding[a][side] for side in (0, 1) for a in slid],
    )
    sizes = list(view.shape)
    for a in slid:
        sizes[a] = (view.shape[a] + sum(padding[a]) - (window[a] - 1) * dilation[a] - 1) // strides[a] + 1
    return View.full(name, view.dtype, tuple(sizes), order)


_ONE: dict[str, Callable[[Views, Any, Sequence[View]], View]] = {
    **STRUCTURE,
    "reduce_window_sum": reduce_window_sum,
    "reduce_window_max": reduce_window_max,
    "dot_general": dot_general,
}

_SAME = ("copy", "copy_p", "optimization_barrier", "stop_gradient")


class Translator(Carried):
    """Writes the nodes of a jaxpr into a builder. free, source: see `Views`."""

    def __init__(self, builder: Builder, free: int | None = None, source: View | None = None) -> None:
        super().__init__(builder, free, source)
        self.for_runtime = builder.library.for_runtime

    def run(self, closed: Any, arguments: Sequence[View]) -> list[View]:
        """Translate a closed jaxpr; returns its results."""
        jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
        env: dict[object, View] = {}

        def read(atom: Any) -> View:
            if isinstance(atom, Literal):
                return self.literal(np.asarray(atom.val, atom.aval.dtype))  # pyright: ignore[reportAttributeAccessIssue]
            return env[atom]

        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            env[variable] = self.literal(np.asarray(value))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(atom) for atom in equation.invars])
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, x: list[View]) -> list[View]:
        """Translate one equation; returns its results."""
        found = self.with_ranges(equation, x)
        if found is not None:
            return found
        results = self.plainly(equation, [self.settled(view) for view in x])
        return [dataclasses.replace(self.settled(view), low=None, high=None, known=None) for view in results]

    def with_ranges(self, equation: Any, x: list[View]) -> list[View] | None:
        """The results with their ranges; None if no range is known."""
        name, params = equation.primitive.name, equation.params
        if name in _SAME:
            return list(x)
        if (inner := called_program(equation)) is not None:
            call = named_call(params.get("name", ""))
            found = None if call is None else NAMED[call.function](self, call, x)
            return found if found is not None else self.run(inner, x)
        if name == "cond" and x[0].value is not None:
            return self.run(params["branches"][int(x[0].value)], x[1:])
        if name in RANGED:
            found = RANGED[name](self, params, x)
            return None if found is None else [found]
        if name in ELEMENTWISE:
            out = equation.outvars[0].aval
            found = self.in_range(name, params, x, tuple(out.shape), np.dtype(out.dtype).name)
            return None if found is None else [found]
        return None

    def plainly(self, equation: Any, x: list[View]) -> list[View]:
        """The results, each with the type of the trace."""
        name, params = equation.primitive.name, equation.params
        if name in ELEMENTWISE:
            out = equation.outvars[0].aval
            return [self.elementwise(name, params, x, tuple(out.shape), np.dtype(out.dtype).name)]
        if name in _ONE:
            return [_ONE[name](self, params, x)]
        kinds = {np.dtype(v.aval.dtype).kind for v in (*equation.invars, *equation.outvars)}
        if name == "bitcast_convert_type" and "f" in kinds:
            raise ValueError("ONNX: no form for the bits of a float as an integer.")
        if name in ("convert_element_type", "bitcast_convert_type"):
            # integers of the same width keep their bits; narrower ones keep the low bits
            return [self.cast(x[0], np.dtype(params["new_dtype"]).name)]
        if name == "clamp":
            shape, dtype = x[1].shape, x[1].dtype
            low = self.elementwise("max", {}, [x[1], x[0]], shape, dtype)
            return [self.elementwise("min", {}, [low, x[2]], shape, dtype)]
        if name in _SAME:
            return list(x)
        if (inner := called_program(equation)) is not None:
            return self.run(inner, x)
        if name == "platform_index":
            return [self.literal(np.int32(plainest(params)))]
        if name == "cond" and x[0].value is not None:
            return self.run(params["branches"][int(x[0].value)], x[1:])
        if name == "scan":
            return self.scan(params, x)
        raise ValueError(f"ONNX: no form for the primitive {name!r}; add an entry to qjax/export/emit/onnx.")

    def elementwise(self, name: str, params: Any, x: list[View], shape: tuple[int, ...], dtype: str) -> View:
        """Operands of one shape (or scalars), aligned to the axis order of the largest; ONNX broadcasts them."""
        if name in ("max", "min"):
            kept = _unchanged(name, x)
            if kept is not None:
                return kept
        kind = x[-1].dtype
        return self.apply(lambda *names: ELEMENTWISE[name](self.builder, kind, params, names), x, shape, dtype)

    def scan(self, params: Any, x: list[View]) -> list[View]:
        """`lax.scan` as Scan: what does not change is captured by name, and the carry is stored in full."""
        params = with_counts(params)
        consts, carried = params["num_consts"], params["num_carry"]
        if params["reverse"]:
            raise ValueError("ONNX: no form for a scan that runs backwards.")
        captured, carry, rows = x[:consts], x[consts : consts + carried], x[consts + carried :]
        body = Builder(self.builder.library, parent=self.builder)
        inner = Translator(body, self.free, self.source)
        arguments, declared = list[View](), list[onnx.ValueInfoProto]()
        for view in [*carry, *(dataclasses.replace(row, shape=row.shape[1:]) for row in rows)]:
            name = body.fresh("state")
            declared.append(helper.make_tensor_value_info(name, element_type(view.dtype), None))
            arguments.append(View.full(name, view.dtype, view.shape))
        results = [inner.settled(view) for view in inner.run(params["jaxpr"], [*captured, *arguments])]
        names = [body.op("Identity", inner.materialized(view)) for view in results]
        outputs = [
            helper.make_tensor_value_info(name, element_type(view.dtype), None)
            for name, view in zip(names, results, strict=True)
        ]
        graph = helper.make_graph(body.live(names), "turn", declared, outputs)
        given = [self.materialized(view) for view in (*carry, *rows)]
        finished = self.builder.several("Scan", given, len(results), body=graph, num_scan_inputs=len(rows))
        shapes = [view.shape for view in carry]
        shapes += [(params["length"], *view.shape) for view in results[carried:]]
        return [View.full(name, view.dtype, shape) for name, view, shape in zip(finished, results, shapes, strict=True)]


def _unchanged(name: str, x: list[View]) -> View | None:
    """The other operand of a maximum with the least number of the dtype, or of a minimum with the greatest."""
    for view, other in (x, x[::-1]):
        if isinstance(view.value, int) and view.dtype != "bool":
            info = np.iinfo(view.dtype)
            if view.value == (info.min if name == "max" else info.max):
                return other
    return None
