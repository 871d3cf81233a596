"""Style "qonnx": float operators with Quant nodes, for FINN, hls4ml and other tools that read QONNX.

Every tensor is a real number, code * scale. If the scales are powers of two, and no sum exceeds 2^24 steps, float32
represents every real number and every sum exactly, in any order. Then only the Quant nodes round: half to even, within
the range of their bits. That is the target `fpga`. Graphs with other scales are rejected, because their codes would
depend on how a tool adds.

| part | is written as |
| --- | --- |
| an input, and the result of an operation | Quant with the tensor's scale and bits |
| the weights of a product | Quant of their real numbers, with a scale per channel or one |
| a convolution, a dense layer | Conv with its bias; MatMul and Add |
| a sum, a product, a mean over a power of two of elements | Add, Mul, GlobalAveragePool |
| relu and other bounds | unsigned codes if the zero point is the lowest code; Relu or Clip otherwise |

Quant is in the domain qonnx.custom_op.general. Source: QONNX's documentation of that operator, qonnx 1.0.0.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax import ops
from qjax.export.emit.onnx import weights
from qjax.export.emit.onnx.codes import Bias, Operand, Operation, Options, Runtime, check_options, limits, refuse_vnni
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.operations import OPERATIONS
from qjax.export.onnx_ops import METADATA
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.ops import Role

STYLE, TARGET = "qonnx", "fpga"
DOMAIN = "qonnx.custom_op.general"
_OPSET, _IR = 16, 8
"""The opset and IR version of the files that QONNX's tools write."""
_RULE = "power_of_two:RND_CONV:SAT"
_EXACT = 2**24
"""float32 represents all integers up to this one."""
_MOVES = frozenset({"Transpose", "Reshape", "Concat", "Slice", "MaxPool", "Identity", "Squeeze", "Unsqueeze"})
"""The operators of moves of codes, which do the same to real numbers."""


def to_model(graph: Graph, **options: Any) -> onnx.ModelProto:
    """The model; options: those of `codes.Options`, without codes at the inputs and outputs.

    Raises:
      ValueError: a graph of another target; a scale that is no power of two; codes without a form in Quant; an
        operation, or a sum, that float32 does not represent exactly.
    """
    refuse_vnni(STYLE, options)
    made = Options(**options)
    if graph.target != TARGET:
        raise ValueError(
            f"emit: style {STYLE!r} has the arithmetic of the target {TARGET!r}, but the graph has that of "
            f"{graph.target!r}. Train for it: Recipe(target={TARGET!r}, method='tqt', weight_method='tqt', "
            "activations=QSpec(bits=8))."
        )
    check_options(made)
    if made.codes:
        raise ValueError(f"emit: style {STYLE!r} has float inputs and outputs. Got codes=True; leave it out.")
    check_integer(graph)
    for name in (*graph.inputs, *(node.output for node in graph.nodes)):
        quant_of(graph.tensors[name], "tensor")
    return _Writer(graph, Options(made.batch, codes=True, plain=True), STYLE, _write, _RUNTIME).model()


def quant_of(tensor: Tensor, what: str) -> tuple[int, dict[str, int]]:
    """The bits of a tensor's codes, and the attributes of their Quant node.

    Raises:
      ValueError: the codes have no form with the zero point 0.
    """
    grid = tensor.quantization
    low, high, zero = (0, 0, None) if grid is None else (grid.qmin, grid.qmax, np.unique(np.asarray(grid.zero_point)))
    if grid is None or zero is None or zero.size != 1 or np.any(np.frexp(np.asarray(grid.scale))[0] != 0.5):
        raise ValueError(
            f"emit: style {STYLE!r}: expected codes with one zero point and scales that are powers of two. Got "
            f"{what} {tensor.name!r} with {'none' if grid is None else np.asarray(grid.scale).reshape(-1)[:4]}; use "
            "method='tqt' and weight_method='tqt'."
        )
    first = int(zero[0])
    if first == low:
        bits = (high - low + 2).bit_length() - 1 if high - low + 2 == 1 << (high - low + 1).bit_length() else 0
        narrow = int(bits > 0)
        if not bits and high - low + 1 == 1 << (high - low).bit_length():
            bits = (high - low).bit_length()
        found = {"signed": 0, "narrow": narrow}
    else:
        bits = high.bit_length() + 1 if first == 0 and high + 1 == 1 << high.bit_length() else 0
        narrow = int(low == -high)
        bits = bits if low in (-high, -high - 1) else 0
        found = {"signed": 1, "narrow": narrow}
    if not bits:
        raise ValueError(
            f"emit: style {STYLE!r}: expected the full range of some number of bits, with the zero point 0 or their "
            f"lowest code. Got {what} {tensor.name!r} with codes {low} to {high} and the zero point {first}; use "
            "activations=QSpec(bits=8), which is symmetric."
        )
    return bits, found


class _Writer(CodesWriter):
    def model(self) -> onnx.ModelProto:
        """The model, in which the names of codes are names of real numbers."""
        model = super().model()
        graph = model.graph
        first: list[onnx.NodeProto] = []
        before = len(self.nodes)
        for value in graph.input:
            codes = self.fresh(f"{value.name}/quantized")
            for node in graph.node:
                node.input[:] = [codes if name == value.name else name for name in node.input]
            self.quant(value.name, self.graph.tensors[value.name], codes, f"{value.name}/quant")
        first = self.nodes[before:]
        nodes = [*first, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        del graph.initializer[:]
        graph.initializer.extend(self.read_initializers(graph.node))
        # shapes and types of codes
        del graph.value_info[:]
        kept = [entry for entry in model.metadata_props if entry.key != METADATA]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
        del model.opset_import[:]
        model.opset_import.extend([helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)])
        model.ir_version = _IR
        return model

    def node(self, node: Node) -> None:
        """Write an operation between real numbers, or a move of them."""
        written = self.runtime.operations.get(node.op)
        if written is not None and node.name in self.own and written(self, node):
            return
        before = len(self.nodes)
        if ops.get(node.op).role is not Role.PRODUCER:
            super().node(node)
        made = {(found.domain, found.op_type) for found in self.nodes[before:]}
        if ops.get(node.op).role is Role.PRODUCER or not {op for _, op in made} <= _MOVES or any(d for d, _ in made):
            raise ValueError(
                f"emit: style {STYLE!r} has no exact form for node {node.name!r}, {node.op}. Compute it outside of the "
                "graph, or emit the graph in style='integer'."
            )

    def step(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add one node to the model with its own name; returns its output."""
        return self.add(op, inputs, self.fresh(f"{op.lower()}/real"), **attributes)

    def quant(self, real: str, tensor: Tensor, result: str, name: str, scale: Any = None) -> str:
        """The Quant node of a tensor. scale: of its codes in the layout of the file, else the tensor's only one."""
        bits, attributes = quant_of(tensor, "tensor")
        assert tensor.quantization is not None
        values = np.asarray(tensor.quantization.scale, np.float32).reshape(()) if scale is None else scale
        inputs = [
            real,
            self.stored(self.fresh(f"{name}/scale"), values),
            self.stored("float/0", np.float32(0)),
            self.stored(f"float/{bits}", np.float32(bits)),
        ]
        return self.add("Quant", inputs, result, domain=DOMAIN, name=name, rounding_mode="ROUND", **attributes)


def _weight_of(
    w: CodesWriter, node: Node, order: Sequence[int], shape: Sequence[int], channels: Sequence[int], axis: int
) -> Operand | None:
    """See `weights.weight_of`: the real weights, through Quant."""
    assert isinstance(w, _Writer)
    name = node.constants["kernel"]
    tensor = w.graph.tensors[name]
    grid = tensor.quantization
    if grid is None or not set(grid.axes) <= set(channels):
        return None
    codes = np.asarray(tensor.value).astype(np.float64)
    scale = weights.kernel_scale(grid, codes.shape, channels)
    laid = codes.transpose(order).reshape(shape)
    if scale.ndim:
        scale = scale.reshape([-1 if index == axis else 1 for index in range(laid.ndim)])
    real = w.stored(w.fresh(f"{node.output}/weight"), (laid * scale).astype(np.float32))
    made = w.quant(real, tensor, w.fresh(f"{node.output}/weight/quantized"), f"{node.output}/weight/quant", scale)
    return Operand(made, w.stored(w.fresh(f"{node.output}/weight/scale"), scale.reshape(-1)), "", axis)


def _bias_of(
    w: CodesWriter, node: Node, weight: Operand, order: Sequence[int], channels: Sequence[int], sizes: Sequence[int]
) -> Bias | None:
    """See `weights.bias_of`: the real bias."""
    value = np.asarray(w.graph.constant(node, "bias"))
    vector = weights.channel_vector(value, len(order), channels, sizes)
    if vector is None:
        return None
    _check_sum(w, node, int(np.abs(vector.astype(np.int64)).max(initial=0)))
    grid = _grid_of(w, node.inputs[0])
    step = np.asarray(grid.scale, np.float64).reshape(()) * numpy_helper.to_array(w.initializers[weight.scale])
    real = (vector.astype(np.float64) * step).astype(np.float32)
    return Bias(w.stored(w.fresh(f"{node.output}/bias"), real), weight.scale, 0)


def _grid_of(w: CodesWriter, name: str) -> Quantization:
    grid = w.graph.tensors[name].quantization
    assert grid is not None
    return grid


def _check_sum(w: CodesWriter, node: Node, bias: int) -> None:
    """Raise a ValueError if a product's sum may exceed the integers that float32 represents."""
    grid, kernel = _grid_of(w, node.inputs[0]), node.constants["kernel"]
    zero = int(np.asarray(grid.zero_point).reshape(()))
    greatest = max(grid.qmax - zero, zero - grid.qmin)
    codes = np.abs(np.asarray(w.graph.tensors[kernel].value).astype(np.int64))
    pairs = node.attributes["channels"]
    kept = [pair[1] for pair in pairs]
    sums = codes.sum(axis=tuple(axis for axis in range(codes.ndim) if axis not in kept))
    reach = greatest * int(sums.max(initial=0)) + bias
    if reach > _EXACT:
        raise ValueError(
            f"emit: style {STYLE!r} needs products whose sums stay within 2^24 steps, up to which float32 is exact. "
            f"Got up to {reach} in node {node.name!r}; use fewer bits, or split the layer."
        )


def _write(w: CodesWriter, operation: Operation, title: str) -> None:
    """Write the operator between real numbers, the bounds of its result, and Quant."""
    assert isinstance(w, _Writer)
    node, real = operation.node, operation.real
    operands = [operand.codes for operand in operation.operands]
    if real == "Gemm":
        assert operation.bias is not None
        value = w.step("Add", w.step("MatMul", *operands), operation.bias.codes)
    elif real == "Conv":
        assert operation.bias is not None
        value = w.step("Conv", *operands, operation.bias.codes, **operation.attributes)
    elif real is None:
        value = operands[0]
    else:
        value = w.step(real, *operands, **operation.attributes)
    tensor = w.graph.tensors[node.output]
    low, high = limits(w.graph, node)
    grid = _grid_of(w, node.output)
    if (low, high) != (grid.qmin, grid.qmax):
        zero, scale = int(np.asarray(grid.zero_point).reshape(())), float(np.asarray(grid.scale).reshape(()))
        if (low, high) == (zero, grid.qmax):
            value = w.step("Relu", value)
        else:
            bounds = [w.stored(w.fresh(f"{title}/bound"), np.float32((code - zero) * scale)) for code in (low, high)]
            value = w.step("Clip", value, *bounds)
    w.quant(value, tensor, operation.result.codes, title)


def _mean(w: CodesWriter, node: Node) -> bool:
    """Write a mean over a power of two of elements, whose quotient is exact."""
    count = math.prod(w.sizes(node.inputs[0])[axis] for axis in node.attributes["axes"])
    grid = _grid_of(w, node.inputs[0])
    exact = count > 0 and not count & (count - 1) and count * (grid.qmax - grid.qmin) <= _EXACT
    return exact and OPERATIONS["sum"](w, node)


_RUNTIME = Runtime(
    {
        **{name: OPERATIONS[name] for name in ("conv", "dot", "add", "multiply", "rescale", "max_pool")},
        "sum": _mean,
    },
    _RULE,
    {"add": "", "multiply": _RULE, "rescale": _RULE, "mean": ""},
    _weight_of,
    _bias_of,
    clamps=False,
)
