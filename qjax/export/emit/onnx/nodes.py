"""Writes one node of a graph as one function of the domain "qjax": the kernel's own arithmetic in standard operators.

Exact products of 8-bit codes with weights are MatMulInteger or ConvInteger, and the requantization of their accumulator
is traced. Every other kernel is traced as a whole.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax import ops
from qjax.export.emit import bounds, comments, elementwise_as_shift
from qjax.export.emit.onnx import products, requantizing
from qjax.export.emit.onnx.builder import Builder, Library
from qjax.export.emit.onnx.tracing import trace
from qjax.export.emit.onnx.translate import Translator
from qjax.export.emit.onnx.views import View
from qjax.export.emit.requantizations import Product
from qjax.numerics.accumulator import EXACT
from qjax.ops import narrow_accumulator
from qjax.ops.epilogue import finish_weighted
from qjax.ops.facts import ProductFacts

# ----------------------------------------------------------------------------------------------------------------------
# Keys of calls: two calls with equal keys become one function. A key contains everything but the names of the inputs.
#
# Networks repeat themselves: the steps of a recurrent layer, the layers of a transformer. A kernel is traced and
# translated once for all calls with one key.


def key_of(value: Any) -> Any:
    """A value as a hashable key; equal keys are equal values, apart from the names of views.

    Raises:
      TypeError: a kind of value that this function does not know.
    """
    if isinstance(value, View):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return "view", key_of({name: part for name, part in fields.items() if name != "name"})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = tuple((field.name, key_of(getattr(value, field.name))) for field in dataclasses.fields(value))
        return type(value).__name__, parts
    if isinstance(value, Mapping):
        # in their order, because it decides the order of a function's inputs
        return "mapping", tuple((name, key_of(part)) for name, part in value.items())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(key_of, value))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return "array", array.dtype.str, array.shape, hashlib.sha256(np.ascontiguousarray(array)).digest()
    if value is None or isinstance(value, str | bool | int | float):
        # 1, 1.0 and True are equal but must have different keys
        return type(value).__name__, repr(value)
    raise TypeError(f"expected a field of a call, got {type(value).__name__}.")


CHOICES = ("delegated",)
"""Constants by which a kernel chooses between two ways; a function is written for one value of them."""

_CODES = ("int8", "uint8")


@dataclasses.dataclass(frozen=True)
class Call:
    """A node to be written.

    attributes: those of its kernel, with the facts of its tensors. inputs: its inputs, as the file stores them.
    constants: by role, as the file stores them. zero_points: by role of the kernel, the dtype in which the file stores
    each. choices: the values of those constants in `CHOICES`. facts: the values of all constants and zero points.
    ranges: of the codes of each input. range: for a node with weights, the lowest and the highest code that anybody may
    feed it, and the zero point.
    """

    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[View, ...]
    constants: Mapping[str, View]
    zero_points: Mapping[str, str]
    choices: Mapping[str, Any]
    facts: Mapping[str, np.ndarray]
    ranges: Sequence[bounds.Range | None]
    range: tuple[int, int, int] = (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Body:
    """What was written: the function, the roles of the zero points that are its last arguments, and its result."""

    function: str
    zero_points: tuple[str, ...]
    output: View


def is_native(call: Call) -> bool:
    """Whether the accumulator is that of MatMulInteger or ConvInteger."""
    attributes = call.attributes
    op = ops.get(call.op)
    if "kernel" not in call.constants or not isinstance(op, ProductFacts):
        return False
    kernel = call.constants["kernel"]
    if attributes["input_dtypes"][0] not in _CODES or kernel.dtype != "int8":
        return False
    shapes = {role: jax.ShapeDtypeStruct(view.shape, view.dtype) for role, view in call.constants.items()}
    if narrow_accumulator.accumulator_of(attributes, shapes) != EXACT:
        return False
    if not op.is_convolution:
        return True
    plain = all(n == 1 for n in attributes["lhs_dilation"])
    inside = all(n >= 0 for pair in attributes["padding"] for n in pair)
    return plain and inside and 1 <= len(attributes["strides"]) <= 3


def wanted_order(call: Call) -> list[int] | None:
    """The axis order in which the node reads its input, if it needs one: channels first for ConvInteger."""
    return list(call.attributes["lhs_layout"]) if _is_convolution(call) and is_native(call) else None


def _is_convolution(call: Call) -> bool:
    op = ops.get(call.op)
    return isinstance(op, ProductFacts) and op.is_convolution


def write(library: Library, call: Call, free: int | None, stored: Mapping[str, str]) -> Body:
    """Add the node's function to the library; equal calls are written once.

    free: the size that represents the batch. stored: role -> dtype of constants that the file stores in a narrower one.

    Raises:
      NeedsBatch: the kernel's arithmetic depends on the size of the batch.
    """
    key = key_of((call, free, stored))
    if key not in library.bodies:
        library.bodies[key] = _write_body(library, call, free, stored)
    return library.bodies[key]


def _write_body(library: Library, call: Call, free: int | None, stored: Mapping[str, str]) -> Body:
    inputs = [f"x{index}" for index in range(len(call.inputs))]
    builder = Builder(library, (*inputs, *call.constants, *call.zero_points))
    source = next((view for view in call.inputs if _follows(view, free)), None)
    if source is not None:
        source = dataclasses.replace(source, name=inputs[call.inputs.index(source)])
    t = Translator(builder, free, source)
    x = [dataclasses.replace(view, name=name) for name, view in zip(inputs, call.inputs, strict=True)]
    constants: dict[str, View] = {}
    for role, view in call.constants.items():
        name = builder.cast(role, view.dtype) if role in stored else role
        constants[role] = dataclasses.replace(view, name=name)
    zero_points = {role: View.full(role, dtype, ()) for role, dtype in call.zero_points.items()}
    result = (
        _native(t, call, x, constants, zero_points) if is_native(call) else _traced(t, call, x, constants, zero_points)
    )
    result = t.expanded(result)
    # a new name, also if the kernel returns its input unchanged
    output = builder.op("Identity", result.name) if result.name in (*inputs, *call.constants) else result.name
    nodes = builder.live([output])
    read = {name for node in nodes for name in node.input}
    used = tuple(role for role in call.zero_points if role in read)
    name, doc = _title(call)
    attributes = [key for key in call.attributes if key not in _FACTS]
    function = library.add(name, (*inputs, *call.constants, *used), (output,), nodes, doc, attributes)
    return Body(function, used, result)


_FACTS = ("dtype", "input_dtypes", "qmin", "qmax")


def of_function(
    library: Library, title: str, function: Callable[..., jax.Array], views: Sequence[View], free: int | None
) -> tuple[str, tuple[int, ...]]:
    """Add a function of arrays to the library; returns its name, and the shape of its result in its axis order.

    views: the arguments, each with its axes in their own order.

    Raises:
      NeedsBatch: what it computes depends on the size of the batch.
    """
    names = [f"x{index}" for index in range(len(views))]
    builder = Builder(library, names)
    given = [dataclasses.replace(view, name=name) for name, view in zip(names, views, strict=True)]
    t = Translator(builder, free, next((view for view in given if _follows(view, free)), None))
    result = _translated(t, function, given)
    output = t.materialized(result)
    output = builder.op("Identity", output) if output in names else output
    return library.add(title, names, (output,), builder.live([output])), result.shape


def _follows(view: View, free: int | None) -> bool:
    return free is not None and any(size and size % free == 0 for size in view.stored)


def _traced(
    t: Translator, call: Call, x: Sequence[View], constants: Mapping[str, View], zero_points: Mapping[str, View]
) -> View:
    """The whole kernel, including its preparation (zero points folded into the bias)."""
    wide = {role: t.cast(view, "int32") for role, view in zero_points.items()}
    known = {role: view for role, view in {**constants, **wide}.items() if role not in call.choices}
    known = {role: _with_value(t, view, call.facts.get(role)) for role, view in known.items()}
    x = [_with_range(view, found) for view, found in zip(x, call.ranges, strict=True)]
    if not call.choices:
        plane = elementwise_as_shift.of_node(call.op, call.attributes, call.facts)
        if plane is not None:
            return _translated(t, elementwise_as_shift.kernel(plane, call.attributes["dtype"]), x)
    op = ops.get(call.op)

    def kernel(*arrays: jax.Array) -> jax.Array:
        given = {**dict(zip(known, arrays[len(x) :], strict=True)), **call.choices}
        return op.kernel(call.attributes, op.runtime(call.attributes, given), list(arrays[: len(x)]))

    return _translated(t, kernel, [*x, *known.values()])


def _with_value(t: Translator, view: View, value: np.ndarray | None) -> View:
    """A constant with its numbers: a single number is written into the function, several only have a range."""
    if value is None or view.dtype not in bounds.INTEGERS or not value.size:
        return view
    if value.size == 1:
        return dataclasses.replace(t.number(value.reshape(()), view.dtype, view.shape), known=value)
    return dataclasses.replace(view, low=int(value.min()), high=int(value.max()), known=value)


def _with_range(view: View, found: bounds.Range | None) -> View:
    return view if found is None else dataclasses.replace(view, low=found[0], high=found[1])


def _native(
    t: Translator, call: Call, x: Sequence[View], constants: Mapping[str, View], zero_points: Mapping[str, View]
) -> View:
    attributes, kernel = call.attributes, constants["kernel"]
    convolves = _is_convolution(call)
    moved = 128 if x[0].dtype == "int8" else 0
    own = t.builder.constant(np.uint8(call.range[2] + moved))
    x = [products.unsigned(t, x[0])]
    # ConvInteger is slow if the signs differ
    stays = not convolves and attributes["weight"] == 1 and (t.builder.library.signed or _is_safe(call, moved))
    kernel = kernel if stays else products.unsigned(t, kernel)
    shift = t.builder.constant(np.int8(0) if stays else np.uint8(128))
    if convolves:
        acc = _conv(t, attributes, x[0], kernel, own, shift)
    else:
        first = attributes["weight"] == 1
        numbers = tuple(
            tuple(tuple(attributes[f"{side}_{kind}"]) for side in ("lhs", "rhs")) for kind in ("contracting", "batch")
        )
        pair, points = ((x[0], kernel), (own, shift)) if first else ((kernel, x[0]), (shift, own))
        acc = products.dot(t, *pair, numbers, points)
        if attributes["permutation"] is not None:
            acc = t.transpose(acc, attributes["permutation"])
    short = _short(t, call, acc)
    if short is not None:
        return short
    rest = {role: view for role, view in constants.items() if role != "kernel"}
    rest["y_zero_point"] = zero_points["y_zero_point"]
    return _finished(t, attributes, acc, rest)


def _is_safe(call: Call, moved: int) -> bool:
    """Whether the weights may be int8 beside activations of uint8 on every CPU."""
    kernel = call.facts["kernel"]
    kept = [axis for _, axis in call.attributes["channels"]]
    summed = [axis for axis in range(kernel.ndim) if axis not in kept]
    return products.never_saturates(kernel, summed, call.range[1] + moved)


def _short(t: Translator, call: Call, acc: View) -> View | None:
    """The requantization in few operators, as a function with the name of its rule; None if there is no such form."""
    inner = Translator(Builder(t.builder.library, ("acc",)), t.free)
    low, high, zero_point = call.range
    product = Product(call.attributes, call.facts, min(low - zero_point, 0), max(high - zero_point, 0))
    result = requantizing.short(inner, product, dataclasses.replace(acc, name="acc"))
    if result is None:
        return None
    nodes = inner.builder.live([result.name])
    rule = call.attributes["rule"]
    doc = f"{comments.of_rule(rule)} The codes are the same for every accumulator that the weights allow."
    name = f"requantize_{_identifier(rule)}"
    function = t.builder.library.add(name, ["acc"], [result.name], nodes, doc)
    return dataclasses.replace(result, name=t.builder.call(function, acc.name))


def _conv(t: Translator, attributes: Mapping[str, Any], x: View, kernel: View, own: str, shift: str) -> View:
    lhs, rhs, out = (attributes[f"{side}_layout"] for side in ("lhs", "rhs", "out"))
    strides, dilation, padding = attributes["strides"], attributes["rhs_dilation"], attributes["padding"]
    window = [kernel.shape[axis] for axis in rhs[2:]]
    name = products.conv(
        t.builder,
        t.materialized(x, lhs),
        t.materialized(kernel, rhs),
        own,
        shift,
        {
            "strides": list(strides),
            "pads": [pair[side] for side in (0, 1) for pair in padding],
            "dilations": list(dilation),
            "group": attributes["groups"],
            "kernel_shape": window,
        },
    )
    shape = [0] * len(out)
    shape[out[0]], shape[out[1]] = x.shape[lhs[0]], kernel.shape[rhs[0]]
    for index, axis in enumerate(out[2:]):
        size = x.shape[lhs[2 + index]] + sum(padding[index])
        shape[axis] = (size - dilation[index] * (window[index] - 1) - 1) // strides[index] + 1
    return View.full(name, "int32", tuple(shape), out)


def _finished(t: Translator, attributes: Mapping[str, Any], acc: View, constants: Mapping[str, View]) -> View:
    """The requantization of the accumulator, as a separate function with the name of its rule."""
    names = ("acc", *constants)
    inner = Translator(Builder(t.builder.library, names), t.free)
    views = [dataclasses.replace(view, name=name) for name, view in zip(names, (acc, *constants.values()), strict=True)]
    inner.source = views[0] if _follows(acc, t.free) else None
    wide = [inner.cast(view, "int32") if view.name == "y_zero_point" else view for view in views]

    def finish(acc: jax.Array, *rest: jax.Array) -> jax.Array:
        return finish_weighted(acc, dict(zip(constants, rest, strict=True)), attributes)

    result = _translated(inner, finish, wide)
    rule = attributes["rule"]
    nodes = inner.builder.live([result.name])
    title = f"requantize_{_identifier(rule)}"
    function = t.builder.library.add(title, names, [result.name], nodes, comments.of_rule(rule))
    name = t.builder.call(function, acc.name, *(view.name for view in constants.values()))
    return dataclasses.replace(result, name=name)


def _translated(t: Translator, function: Callable[..., jax.Array], views: Sequence[View]) -> View:
    closed = trace(function, [(view.shape, view.dtype) for view in views])
    (result,) = t.run(closed, views)
    return dataclasses.replace(t.settled(result), low=None, high=None, known=None)


def _title(call: Call) -> tuple[str, str]:
    """The function's name, and its documentation where a rule or formula decides what it computes."""
    rule, formula = call.attributes.get("rule"), call.attributes.get("formula")
    lines = [] if rule is None else [comments.of_rule(rule)]
    if formula is not None:
        lines.append(comments.of_formula(formula))
    how = rule or formula or call.attributes.get("rounding")
    return call.op if how is None else f"{call.op}_{_identifier(how)}", "\n".join(lines)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name)
