"""Style "openvino": a graph of the target `openvino_cpu` as a file whose codes OpenVINO's CPU plugin computes exactly.

OpenVINO rewrites a quantized model before it runs it. It moves scales and zero points between operators, and it fuses
operators, so the float32 steps behind a code depend on the surrounding operators. This style leaves it no choice:

| part | is written as |
| --- | --- |
| a product | Conv, or MatMul of three axes and Add, between quantizers of the scale 1/2 |
| its weights | int8 with the effective scale s_x s_w / s_y |
| its bias | float32(b / s_y + z_y), never equal in all channels |
| any other operation | float32 steps, each exact or the only one that rounds |
| its operands | Cast and Floor of the codes |

- Scales of 1/2 are exact wherever OpenVINO moves them. It runs such products on kernels of 8 bits.
- A bias that is one number would become a part of the quantizer, which has other steps.
- Exact steps have the same result in any order, and when fused.
- OpenVINO fuses nothing with a convolution across Floor.

Quantizers after products have the zero point 0, because the bias includes it. Those in front of products have the
tensor's own. Activations are uint8, which OpenVINO's kernels take without a change of sign.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax import ops
from qjax.export.emit.onnx import weights
from qjax.export.emit.onnx.builder import element_type
from qjax.export.emit.onnx.codes import (
    Bias,
    Operand,
    Operation,
    Options,
    Runtime,
    check_options,
    fits,
    is_narrower,
    refuse_vnni,
)
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.operations import OPERATIONS, channels_first
from qjax.export.onnx_ops import METADATA
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node
from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.numerics.rules.openvino import step_bias
from qjax.numerics.rules.torch import Onednn
from qjax.ops import Role

STYLE, TARGET = "openvino", "openvino_cpu"
_OPSET, _IR = 21, 10
_FLOAT, _INT32 = element_type("float32"), element_type("int32")
_STEP = np.float32(0.5)
"""The scale of all quantizers. OpenVINO removes products by 1, and with them the mark of a quantized tensor."""
_NOTHING = np.float32(2.0**-60)
"""A bias that changes no code."""
_ALIKE = 2.0**-10
"""OpenVINO treats biases of a matrix product as one number if they differ by less than 0.00005."""
_EXACT = 2**24
"""Sums up to here are float32 numbers."""


def to_model(graph: Graph, **options: Any) -> onnx.ModelProto:
    """The model; options: those of `codes.Options`.

    Raises:
      ValueError: a graph of another target; a tensor that is not uint8; an operation, or a sum, without an exact form.
    """
    refuse_vnni(STYLE, options)
    made = Options(**{**options, "vnni": True})
    if graph.target != TARGET:
        raise ValueError(
            f"emit: style {STYLE!r} has the arithmetic of the target {TARGET!r}, but the graph has that of "
            f"{graph.target!r}. graph.retarget({TARGET!r}) changes its rounding."
        )
    check_options(made)
    check_integer(graph)
    for name in (*graph.inputs, *(node.output for node in graph.nodes)):
        dtype = graph.tensors[name].dtype
        if dtype != "uint8":
            raise ValueError(
                f"emit: style {STYLE!r} takes codes of uint8. Got {name!r} of {dtype}; quantize the model with "
                "activations=QSpec(bits=8, signed=False, symmetric=False)."
            )
    return _Writer(graph, made, STYLE, _write, _RUNTIME).model()


class _Writer(CodesWriter):
    def model(self) -> onnx.ModelProto:
        """The model without the metadata that `qjax.read` would need, because its numbers are not the graph's."""
        model = super().model()
        kept = [entry for entry in model.metadata_props if entry.key != METADATA]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
        self._lift_moves(model.graph)
        # the newest opset that OpenVINO reads
        del model.opset_import[:]
        model.opset_import.append(helper.make_opsetid("", _OPSET))
        model.ir_version = _IR
        return model

    def node(self, node: Node) -> None:
        """Write an operation as exact steps, or a move of codes as standard operators."""
        written = self.runtime.operations.get(node.op)
        if written is not None and node.name in self.own and written(self, node):
            return
        if ops.get(node.op).role is not Role.PRODUCER:
            super().node(node)
        # the rest are functions of integers, some of 64 bits, which OpenVINO does not support
        if ops.get(node.op).role is Role.PRODUCER or any(made.domain for made in self.nodes):
            raise ValueError(
                f"emit: style {STYLE!r} has no exact form for node {node.name!r}, {node.op}. Compute it in float "
                "outside of the graph, or emit the graph of another target with style='integer' for another runtime."
            )

    def _lift_moves(self, graph: onnx.GraphProto) -> None:
        """Move transpositions of codes between DequantizeLinear and QuantizeLinear; else what follows runs in float."""
        found: list[onnx.NodeProto] = []
        grid = [self.number(_STEP), self.stored("uint8/0", np.uint8(0))]
        for node in graph.node:
            if node.op_type != "Transpose":
                found.append(node)
                continue
            source, result = node.input[0], node.output[0]
            node.input[0], node.output[0] = self.fresh(f"{result}/floats"), self.fresh(f"{result}/moved")
            found += [
                helper.make_node("DequantizeLinear", [source, *grid], [node.input[0]]),
                node,
                helper.make_node("QuantizeLinear", [node.output[0], *grid], [result]),
            ]
        del graph.node[:]
        graph.node.extend(found)
        del graph.initializer[:]
        graph.initializer.extend(self.read_initializers(graph.node))
        # shapes and types of tensors that do not exist any more
        del graph.value_info[:]

    def number(self, value: Any) -> str:
        """An initializer of one float32."""
        return self.stored(f"float/{float(np.float32(value)).hex()}", np.float32(value))

    def step(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add one node to the model with its own name; returns its output."""
        return self.add(op, inputs, self.fresh(f"{op.lower()}/steps"), **attributes)

    def centred(self, operand: Operand) -> str:
        """float32(code - zero point)."""
        real = self.step("Floor", self.step("Cast", operand.codes, to=_FLOAT))
        return self.step("Sub", real, self.number(_zero_point(self, operand)))

    def quantized(self, real: str, result: str, name: str, zero_point: int = 0) -> None:
        """The codes of numbers in steps of 1/2 that include the zero point, except for the one given here."""
        inputs = [real, self.number(_STEP), self.stored(f"uint8/{zero_point}", np.uint8(zero_point))]
        self.add("QuantizeLinear", inputs, result, name=name)

    def rounded(self, real: str, zero_point: int, span: tuple[int, int], result: str, name: str) -> None:
        """rint(real) + zero_point within span."""
        steps = self.step("Sub", self.step("Round", real), self.number(-zero_point))
        steps = self.step("Clip", steps, *(self.number(code) for code in span))
        self.quantized(self.step("Mul", steps, self.number(_STEP)), result, name)

    def _quantized(self, name: str, codes: str, grid: list[str]) -> list[onnx.NodeProto]:
        quantization = self.graph.tensors[name].quantization
        assert quantization is not None
        share = np.float32(1) / np.asarray(quantization.scale, np.float32).reshape(())
        before = len(self.nodes)
        span = quantization.qmin, quantization.qmax
        zero_point = int(np.asarray(quantization.zero_point).reshape(()))
        self.rounded(self.step("Mul", name, self.number(share)), zero_point, span, codes, f"{name}/quantize")
        found = self.nodes[before:]
        del self.nodes[before:]
        return found


def _zero_point(w: CodesWriter, operand: Operand) -> int:
    return int(numpy_helper.to_array(w.initializers[operand.zero_point]).reshape(()))


def _float32(w: CodesWriter, node: Node) -> np.ndarray:
    """The scale among a node's constants."""
    fields = (np.asarray(w.graph.constant(node, field)) for field in Float32._fields)
    return np.asarray(float32.to_array(Float32(*fields)))


def _bias_of(
    w: CodesWriter, node: Node, weight: Operand, order: Sequence[int], channels: Sequence[int], sizes: Sequence[int]
) -> Bias | None:
    """See `weights.bias_of`: the bias in steps of the output, and the effective scale instead of its step."""
    result = w.graph.tensors[node.output].quantization
    assert result is not None
    constants = Onednn(*(np.asarray(w.graph.constant(node, role)) for role in Onednn._fields))
    addend = float32.to_array(step_bias(constants, np.asarray(result.zero_point).astype(np.int32).reshape(())))
    scale = _float32(w, node)
    vectors = [weights.channel_vector(value, len(order), channels, sizes) for value in (scale, addend)]
    if vectors[0] is None or vectors[1] is None or np.any(np.asarray(w.graph.constant(node, "bias"))):
        return None
    names = [w.stored(f"{node.output}/{role}", value) for role, value in zip(("scale", "bias"), vectors, strict=True)]
    return Bias(names[1], names[0], 0)


def _write(w: CodesWriter, operation: Operation, title: str) -> None:
    assert isinstance(w, _Writer)
    if operation.bias is not None:
        _product(w, operation, operation.bias, title)
    elif operation.real == "table":
        table = np.clip(np.asarray(w.graph.constant(operation.node, "table")), *operation.span).astype(np.uint8)
        index = w.step("Cast", operation.operands[0].codes, to=_INT32)
        w.add("Gather", [w.stored(f"{operation.node.output}/table", table), index], operation.result.codes, name=title)
    else:
        _elementwise(w, operation, title)


def _product(w: _Writer, operation: Operation, bias: Bias, title: str) -> None:
    x, weight = operation.operands
    codes, scale, addend = (_array(w, name) for name in (weight.codes, bias.scale, bias.codes))
    axis = 1 if operation.real == "Gemm" else 0
    size, zero_point = codes.shape[axis], 0
    if axis:
        _check_sums(operation.node, codes.astype(np.int64), _zero_point(w, x))
    alike = np.ptp(addend) < _ALIKE if axis else np.all(addend == addend[0])
    if alike and not axis and size > 1 and 0 <= addend[0] <= 255 and addend[0] == np.rint(addend[0]):
        zero_point, addend = int(addend[0]), np.zeros_like(addend)
        addend[0] = _NOTHING
    elif alike:
        codes, scale, addend = _one_more(operation, codes, scale, addend, axis)
    held = [
        w.stored(w.fresh(f"{title}/{role}"), value)
        for role, value in (("weight", codes), ("scales", scale), ("zeros", np.zeros(scale.shape, np.int8)))
    ]
    kernel = w.step("DequantizeLinear", *held, axis=axis)
    offset = w.stored(w.fresh(f"{title}/bias"), addend * _STEP)
    if axis:
        rows = w.stored(f"shape/1x-1x{codes.shape[0]}", np.asarray((1, -1, codes.shape[0]), np.int64))
        x = Operand(w.step("Reshape", x.codes, rows), x.scale, x.zero_point)
    real = w.real(Operand(x.codes, w.number(_STEP), x.zero_point))
    if axis:
        real = w.step("Add", w.step("MatMul", real, kernel), offset)
    else:
        real = w.add("Conv", [real, kernel, offset], w.fresh(f"{title}/real"), name=title, **operation.attributes)
    if is_narrower("uint8", *operation.span):
        low, high = ((code - zero_point) * _STEP for code in operation.span)
        real = w.step("Clip", real, w.number(low), w.number(high))
    made = operation.result.codes
    steps = [*(["Reshape"] if axis else []), *(["Slice"] if len(addend) > size else [])]
    names = [w.fresh(f"{title}/{step.lower()}") for step in steps] + [made]
    w.quantized(real, names[0], f"{title}/quantize", zero_point)
    for step, source, result in zip(steps, names, names[1:], strict=False):
        given = [np.asarray((-1, len(addend)), np.int64)] if step == "Reshape" else [[0], [size], [1]]
        inputs = [w.stored(f"int64/{'x'.join(map(str, n))}", np.asarray(n, np.int64)) for n in given]
        w.add(step, [source, *inputs], result)


def _array(w: CodesWriter, name: str) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(w.initializers[name]))


def _one_more(operation: Operation, codes: Any, scale: Any, addend: Any, axis: int) -> tuple[Any, Any, Any]:
    """Append a channel of zeros with another bias, so that the biases are not all equal."""
    if operation.attributes.get("group", 1) != 1:
        raise ValueError(
            f"emit: style {STYLE!r} has no exact form for node {operation.node.name!r}: a grouped convolution whose "
            f"channels all have the same bias, {float(addend[0])} steps. Give them different biases, or none."
        )
    zeros = np.zeros_like(np.take(codes, [0], axis))
    return (
        np.concatenate([codes, zeros], axis),
        np.append(scale, scale[-1]),
        np.append(addend, addend[-1] + np.float32(1)),
    )


def _check_sums(node: Node, codes: np.ndarray, zero_point: int) -> None:
    """Raise a ValueError if a product's sum, zero points included, may exceed the integers that float32 represents.

    OpenVINO adds the contribution of the input's zero point after a matrix product, in float32.
    """
    reach = 255 * int(max(codes.clip(min=0).sum(0).max(), -codes.clip(max=0).sum(0).min())) if zero_point else 0
    if reach > _EXACT:
        raise ValueError(
            f"emit: style {STYLE!r} needs matrix products whose sums stay within 2^24, because OpenVINO adds the zero "
            f"point's contribution in float32. Got up to {reach} in {node.name!r}; give its input the zero point 0 (by "
            "a relu in front of it), or split the layer."
        )


def _elementwise(w: _Writer, operation: Operation, title: str) -> None:
    """The steps of an operation without weights."""
    node, real = operation.node, operation.real
    values = [w.centred(operand) for operand in operation.operands]
    if real == "AveragePool":
        _average_pool(w, operation, values[0], title)
        return
    if real == "Add":
        factors = [np.asarray(w.graph.constant(node, f"factor{i}")).reshape(()) for i in range(2)]
        terms = [w.step("Mul", x, w.number(factor)) for x, factor in zip(values, factors, strict=True)]
        value, scale = w.step("Add", *terms), 2.0 ** -int(np.asarray(w.graph.constant(node, "shift")).reshape(()))
    else:
        scale = _float32(w, node).reshape(())
        value = values[0]
        if real == "Mul":
            value = w.step("Mul", *values)
        elif real == "GlobalAveragePool":
            value = w.step("ReduceSum", value, w.stored("axes/spatial", np.asarray((2, 3), np.int64)), keepdims=1)
    zero_point = _zero_point(w, operation.result)
    scaled = w.step("Mul", value, w.number(scale))
    w.rounded(scaled, zero_point, operation.span, operation.result.codes, title)


def _average_pool(w: _Writer, operation: Operation, value: str, title: str) -> None:
    """Sums of windows as a convolution with ones; after Floor, lest OpenVINO moves the scale into the ones."""
    (name,), attributes = operation.node.inputs, operation.attributes
    order = channels_first(w.value(name), operation.node.attributes)
    assert order is not None
    channels = w.sizes(name)[order[1]]
    window = tuple(attributes["kernel_shape"])
    ones = w.stored(f"ones/{channels}x{'x'.join(map(str, window))}", np.ones((channels, 1, *window), np.float32))
    known = {key: attributes[key] for key in ("kernel_shape", "strides", "pads")}
    total = w.step("Floor", w.step("Conv", value, ones, group=channels, **known))
    # one scale, or one for each position if windows count different numbers of elements
    scale = _float32(w, operation.node)
    scale = scale.reshape((1,) * (len(order) - scale.ndim) + scale.shape).transpose(order)
    scaled = w.step("Mul", total, w.stored(f"{operation.node.output}/share", scale))
    w.rounded(scaled, _zero_point(w, operation.result), operation.span, operation.result.codes, title)


def _conv(w: CodesWriter, node: Node) -> bool:
    """Write a convolution, except for shapes for which OpenVINO 2026.4.1 computes wrong sums, or ends its process.

    These are windows that lie in the padding along an axis, windows of one element with padding, and grouped
    convolutions with one input channel and more than 8 output channels a group.
    """
    known = node.attributes
    spatial = known["lhs_layout"][2:]
    sizes = [w.sizes(node.inputs[0])[axis] for axis in spatial]
    windows = [w.sizes(node.constants["kernel"])[axis] for axis in known["rhs_layout"][2:]]
    padded = any(n for pair in known["padding"] for n in pair)
    axes = zip(sizes, windows, known["strides"], known["rhs_dilation"], known["padding"], strict=True)
    if (padded and all(n == 1 for n in windows)) or any(_misses(*axis) for axis in axes):
        return False
    output, inputs = (w.sizes(node.constants["kernel"])[axis] for axis in known["rhs_layout"][:2])
    if known["groups"] > 1 and inputs == 1 and output > 8 * known["groups"]:
        return False
    return OPERATIONS["conv"](w, node)


def _misses(size: int, window: int, stride: int, dilation: int, padding: Sequence[int]) -> bool:
    """Whether a window has no element inside of an axis."""
    places = (size + sum(padding) - (window - 1) * dilation - 1) // stride + 1
    taps = np.arange(places)[:, None] * stride - padding[0] + np.arange(window) * dilation
    return bool(np.any(~((taps >= 0) & (taps < size)).any(1)))


def _table(w: CodesWriter, node: Node) -> bool:
    if not fits(w.graph, node) or list(node.attributes["range"]) != [0, 255]:
        return False
    view = w.value(node.inputs[0])
    return w.write(node, view.axes, "table", [w.operand(node.inputs[0], view)])


_RUNTIME = Runtime(
    {**OPERATIONS, "conv": _conv, "table": _table},
    "openvino",
    {"add": "openvino_add", "multiply": "float32", "rescale": "float32", "mean": "float32", "average_pool": "float32"},
    weights.weight_of,
    _bias_of,
    clamps=False,
)
