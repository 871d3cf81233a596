"""Writes one node of a graph as one C function.

Products with weights are written from the node's attributes: stored codes times weights, with the zero point in the
bias. After the sum comes the traced code of `ops.epilogue`. For every other node the whole kernel is traced, which is
why this file contains no formula and a new operation needs no line here.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax import ops
from qjax.export.emit import comments, elementwise_as_shift
from qjax.export.emit.c import requantizing, windows
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.jaxprs import trace
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.products import convolution, product
from qjax.export.emit.c.scalar import limits
from qjax.export.emit.c.text import identifier
from qjax.export.emit.c.values import Buffer, Table, Value, laid_out, piece_of, reshaped, transposed
from qjax.export.emit.c.vectors import FEW, Write, vectors_of
from qjax.export.emit.possible_codes import few_codes
from qjax.export.emit.requantizations import Finish, finish_of_codes
from qjax.graph import kernels
from qjax.graph.ir import Graph, Node
from qjax.numerics.accumulator import EXACT
from qjax.numerics.rules import get_rule
from qjax.ops import narrow_accumulator
from qjax.ops.epilogue import finish_weighted
from qjax.ops.facts import ProductFacts
from qjax.support.errors import Unsupported

_STORED = {"uint8": "int8", "uint16": "int16"}
"""The runtime constants of a signed input work for stored codes, because nothing is subtracted from those."""


@dataclasses.dataclass
class Lowered:
    """A node as C.

    alias: the index of the input of which the output is an unchanged piece in memory, `offset` elements from its
    beginning; or None, and then there is a layer. in_place: the inputs whose memory the output may overwrite. Inputs
    that are constants are tables of the layer and do not count.
    """

    alias: int | None = None
    offset: int = 0
    layer: Layer | None = None
    in_place: tuple[int, ...] = ()


def lower(
    graph: Graph, node: Node, shapes: Mapping[str, tuple[int, ...]], source: Source, name: str, *, once: bool = False
) -> Lowered:
    """Write the node's function and add it to what the file shares.

    shapes: of every tensor, for the known batch. name: of the function, and the prefix of its tables. once: whether it
    serves only this node, so that it may rely on which codes the node's input can contain.

    Raises:
      ValueError: the kernel contains a primitive that has no form in C; the message names the node.
    """
    data = [tensor for tensor in node.inputs if graph.tensors[tensor].value is None]
    buffers = [
        Buffer(shapes[tensor], graph.tensors[tensor].dtype, f"in{index}" if len(data) > 1 else "in")
        for index, tensor in enumerate(data)
    ]
    free, inputs = iter(buffers), list[Value]()
    for index, tensor in enumerate(node.inputs):
        value = graph.tensors[tensor].value
        inputs.append(next(free) if value is None else _table(value, f"operand{index}"))

    def made(target: Buffer) -> Value | _Windowed | Write:
        return _value(graph, node, inputs, target, source)

    codes = few_codes(graph, node.inputs[0], FEW) if once and node.inputs else None
    return _lowered(graph, node, buffers, made, shapes, source, name, codes)


def lower_stack(
    graph: Graph, node: Node, count: int, shapes: Mapping[str, tuple[int, ...]], source: Source, name: str
) -> Lowered:
    """Write the function of a node whose `count` inputs are stacked in memory; see `lower` and `Op.of_stack`."""
    op, attributes = ops.get(node.op), kernels.attributes(graph, node)
    stack = Buffer((count, *shapes[node.inputs[0]]), graph.tensors[node.inputs[0]].dtype, "in")

    def value(target: Buffer) -> Value:
        return trace(lambda x: op.of_stack(attributes, x), {"x": stack})

    return _lowered(graph, node, [stack], value, shapes, source, name)


def _lowered(
    graph: Graph,
    node: Node,
    buffers: list[Buffer],
    made: "Callable[[Buffer], Value | _Windowed | Write]",
    shapes: Mapping[str, tuple[int, ...]],
    source: Source,
    name: str,
    codes: tuple[int, ...] | None = None,
) -> Lowered:
    target = Buffer(shapes[node.output], graph.tensors[node.output].dtype, "out")
    hint, note = _arithmetic(graph, node)
    layer = Layer(source, name, hint, note, [*(buffer.name for buffer in buffers), "out"])
    try:
        value = made(target)
        piece = piece_of(value) if isinstance(value, Value) else None
        if piece is not None:
            return Lowered([buffer.name for buffer in buffers].index(piece[0].name), piece[1])
        if isinstance(value, Value):
            layer.store(laid_out(target, value.shape), value)
        elif isinstance(value, _Windowed):
            forms = vectors_of(source)
            write = forms and forms.window(target, value.window, value.epilogue, value.finish, codes)
            if write:
                write(layer)
            else:
                windows.store(layer, target, value.window, value.epilogue)
        else:
            value(layer)
    except Unsupported as error:
        raise error.at(f"Node {node.name!r} ({node.op})") from None
    return Lowered(layer=layer, in_place=_in_place(layer, buffers, target))


@dataclasses.dataclass(frozen=True)
class _Windowed:
    window: windows.Window
    epilogue: Callable[[Value], Value]
    finish: Finish | None


def _value(
    graph: Graph, node: Node, inputs: Sequence[Value], target: Buffer, source: Source
) -> "Value | _Windowed | Write":
    attributes = kernels.attributes(graph, node)
    raw = kernels.constants_of(graph, node)
    if "kernel" in node.constants and isinstance(ops.get(node.op), ProductFacts):
        accumulator = narrow_accumulator.accumulator_of(attributes, raw)
        if not accumulator.ordered:
            x = inputs[0]
            assert isinstance(x, Buffer)
            return _weighted(node, attributes, raw, x, target, accumulator)
    op = ops.get(node.op)
    vectors = vectors_of(source)
    if vectors is not None and isinstance(op, ProductFacts) and attributes.get("weight", 0) is None:
        write = vectors.product(attributes, raw, inputs, target)
        if write is not None:
            return write
    plane = elementwise_as_shift.of_node(node.op, attributes, raw)
    if plane is not None:
        # elements in one row need one loop
        row = (math.prod(target.shape),)
        flat = [reshaped(x, row) if x.shape == target.shape else x for x in inputs]
        given = flat if all(x.shape == row for x in flat) else inputs
        return trace(elementwise_as_shift.kernel(plane, target.dtype), {"a": given[0], "b": given[1]})
    constants = ops.get(node.op).runtime(attributes, raw)
    tables = {role: _table(value, role) for role, value in constants.items()}
    names = {f"input {index}": value for index, value in enumerate(inputs)}

    def kernel(**values: Any) -> Any:
        known = {role: values[role] for role in tables}
        return ops.get(node.op).kernel(attributes, known, [values[name] for name in names])

    return trace(kernel, {**tables, **names})


def _weighted(
    node: Node, attributes: dict[str, Any], raw: dict[str, Any], x: Buffer, target: Buffer, accumulator: Any
) -> "Value | _Windowed":
    """A dense layer or a convolution of stored codes, whose order of additions does not matter."""
    dtypes = [_STORED.get(dtype, dtype) for dtype in attributes["input_dtypes"]]
    op = ops.get(node.op)
    constants = dict(op.runtime({**attributes, "input_dtypes": dtypes}, raw))
    kernel = _table(constants.pop("kernel"), "kernel")
    tables = {role: _table(value, role) for role, value in constants.items()}

    def epilogue(**values: Any) -> Any:
        known = {role: values[role] for role in tables}
        return finish_weighted(narrow_accumulator.cut(values["acc"], accumulator, known), known, attributes)

    def whole(acc: Value) -> Value:
        return trace(epilogue, {**tables, "acc": acc})

    short = _short(attributes, raw, x) if accumulator == EXACT else None
    shorter = short is not None and requantizing.pays(short, get_rule(attributes["rule"]))
    finished = requantizing.finished(short, target.dtype) if short is not None and shorter else whole
    if isinstance(op, ProductFacts) and op.is_convolution:
        zero_point = int(np.asarray(constants["zero_point0"]))
        layout = tuple(tuple(attributes[key]) for key in ("lhs_layout", "rhs_layout", "out_layout"))
        shape = target.shape
        if attributes["permutation"] is not None:
            raise Unsupported("a convolution with a permutation of its result has no form in C.")
        lhs, rhs, out = layout
        rank = len(lhs)
        if lhs == (0, rank - 1, *range(1, rank - 1)) and set(attributes["lhs_dilation"]) <= {1} and 0 not in shape:
            codes = np.ascontiguousarray(np.transpose(kernel.array, (rhs[0], *rhs[2:], rhs[1])))
            window = windows.Window(
                x,
                codes,
                zero_point,
                tuple(attributes["strides"]),
                tuple(attributes["rhs_dilation"]),
                tuple(low for low, _ in attributes["padding"]),
                attributes["groups"],
                (out[0], *out[2:], out[1]),
            )
            return _Windowed(window, finished, short)
        acc = convolution(
            x,
            kernel,
            Table((), x.dtype, np.asarray(zero_point, x.dtype), "zero_point"),
            shape,
            "int32",
            strides=attributes["strides"],
            padding=attributes["padding"],
            lhs_dilation=attributes["lhs_dilation"],
            rhs_dilation=attributes["rhs_dilation"],
            groups=attributes["groups"],
            layout=layout,  # pyright: ignore[reportArgumentType]
        )
    else:
        window = _dense(attributes, x, kernel, target)
        if window is not None:
            return _Windowed(window, finished, short)
        operands = (x, kernel) if attributes["weight"] == 1 else (kernel, x)
        contracting = attributes["lhs_contracting"], attributes["rhs_contracting"]
        acc = product(*operands, contracting, (attributes["lhs_batch"], attributes["rhs_batch"]), "int32")
        if attributes["permutation"] is not None:
            acc = transposed(acc, attributes["permutation"])
    return finished(acc)


def _short(attributes: Mapping[str, Any], raw: Mapping[str, Any], x: Buffer) -> Finish | None:
    values = {role: np.asarray(value) for role, value in raw.items() if value is not None}
    return finish_of_codes(attributes, values, limits(x.dtype))


def _dense(attributes: Mapping[str, Any], x: Buffer, kernel: Table, target: Buffer) -> windows.Window | None:
    """A dense layer over the last axis as a window without taps: the axes between are positions."""
    rank = len(x.shape)
    plain = (
        attributes["weight"] == 1
        and list(attributes["lhs_contracting"]) == [rank - 1]
        and rank >= 2
        and not attributes["lhs_batch"]
        and attributes["permutation"] is None
        and len(kernel.shape) == 2
        and 0 not in (*x.shape, *target.shape)
    )
    if not plain:
        return None
    (summed,) = attributes["rhs_contracting"]
    codes = kernel.array if summed == 1 else kernel.array.T
    between = rank - 2
    codes = np.ascontiguousarray(codes.reshape(codes.shape[0], *(1,) * between, codes.shape[1]))
    ones, zeros = (1,) * between, (0,) * between
    return windows.Window(x, codes, 0, ones, ones, zeros, 1, tuple(range(rank)))


def _table(value: Any, role: str) -> Table:
    array = np.asarray(value)
    return Table(array.shape, array.dtype.name, array, role)


def _arithmetic(graph: Graph, node: Node) -> tuple[str, str]:
    """The name of the function of integers, and the comment on the rule or formula from which it is translated."""
    dtype = graph.tensors[node.output].dtype
    if "rule" in node.attributes:
        name = node.attributes["rule"]
        return identifier(f"requantize_{name}_{dtype}"), comments.of_rule(name)
    if "formula" in node.attributes:
        name = node.attributes["formula"]
        return identifier(f"{node.op}_{name}_{dtype}"), comments.of_formula(name)
    if "rounding" in node.attributes:
        words = f"One exact sum of 64 bits, one rounding: {node.attributes['rounding']}."
        return identifier(f"{node.op}_exact_{dtype}"), words
    return identifier(f"{node.op}_{dtype}"), ""


def _in_place(layer: Layer, inputs: list[Buffer], target: Buffer) -> tuple[int, ...]:
    """The inputs that are read at an element only right before the output writes that element."""
    if len(layer.writes) != 1 or layer.scratch:
        return ()
    (place,) = layer.writes
    kind = np.dtype(target.dtype).itemsize, target.dtype == "float32"
    found: list[int] = []
    for index, buffer in enumerate(inputs):
        own = [access for access in layer.accesses if access.buffer == buffer.name]
        same = all(access.place == place and not access.inner for access in own)
        own = np.dtype(buffer.dtype).itemsize, buffer.dtype == "float32"
        if same and buffer.shape == target.shape and own == kind:
            found.append(index)
    return tuple(found)


__all__ = ["Lowered", "lower", "lower_stack"]
