"""What the styles "qdq" and "qoperator" share: operations on codes, supported graphs, session options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node

TARGETS = ("onnxruntime", "onnxruntime_avx2")
CODES = ("int8", "uint8")
"""The dtypes of ONNX Runtime's 8-bit kernels."""

INT8_OPTION = "session.qdqisint8allowed"
RESCALE_OPTION = "session.disable_double_qdq_remover"


@dataclasses.dataclass(frozen=True)
class Options:
    """batch, codes, vnni: see `qjax.export.emit.onnx.emit`.

    plain: for other runtimes than ONNX Runtime. Products leave activations of int8 unchanged instead of converting them
    to uint8, and use weights of the same signedness. Functions of integers are those of style "integer". `portable` and
    style "qonnx" need this, because the quantizers that they write contain the grids of the graph.
    """

    batch: int | None = None
    codes: bool = False
    vnni: bool = False
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class Operand:
    """Codes and their grid: names of tensors of the model. axis: of a constant's scales, None for one."""

    codes: str
    scale: str
    zero_point: str
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Bias:
    """An int32 bias on the accumulator's grid; scale: the name of its step, axis: as an operand's.

    For a runtime whose rule takes the bias, codes are float32, and scale is the effective scale.
    """

    codes: str
    scale: str
    axis: int | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation on codes.

    real: the corresponding ONNX operator on floats; None for a requantization. result: the quantization parameters of
    the result, and the name of the tensor of its codes. node: the node of the graph that it represents. span: the
    lowest and the highest code of the result.
    """

    real: str | None
    operands: Sequence[Operand]
    result: Operand
    node: Node
    span: tuple[int, int]
    bias: Bias | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What a runtime supports on codes.

    operations: by the graph's operation, a function that writes a node of it as one of the runtime's, or reports that
    it cannot. rule: of its products. formulas: of its operations without weights, by the field of a target. weight_of,
    bias_of: the form of its weights and biases, see `weights`. clamps: whether it bounds codes. Otherwise an
    operation's `span` does.
    """

    operations: Mapping[str, Callable[[Any, Node], bool]]
    rule: str
    formulas: Mapping[str, str]
    weight_of: Callable[..., Operand | None]
    bias_of: Callable[..., Bias | None]
    clamps: bool = True


def limits(graph: Graph, node: Node) -> tuple[int, int]:
    """The lowest and the highest code of a node's output: of its tensor, and of the clamp after it."""
    quantization = graph.tensors[node.output].quantization
    assert quantization is not None
    low, high = quantization.qmin, quantization.qmax
    if "clamp_min" in node.constants:
        low = max(low, int(np.asarray(graph.constant(node, "clamp_min")).reshape(())))
    if "clamp_max" in node.constants:
        high = min(high, int(np.asarray(graph.constant(node, "clamp_max")).reshape(())))
    return low, max(low, high)


def is_narrower(dtype: str, low: int, high: int) -> bool:
    """Whether [low, high] excludes some codes of the dtype."""
    info = np.iinfo(dtype)
    return (low, high) != (info.min, info.max)


def checked(graph: Graph, style: str, options: Options) -> Graph:
    """The graph, if a style of ONNX Runtime's operators can represent it. Raises ValueError."""
    if graph.target not in TARGETS:
        raise ValueError(
            f"emit: style {style!r} has the arithmetic of the targets {', '.join(TARGETS)}, but the graph has that of "
            f"{graph.target!r}. graph.retarget('onnxruntime') changes its rounding; style='integer' preserves it."
        )
    check_options(options)
    if not options.codes and graph.quantization != "division":
        raise ValueError(
            f"emit: QuantizeLinear divides, but the graph quantizes its inputs by {graph.quantization!r}: emit it "
            "with codes=True and quantize outside, or convert the model for the target 'onnxruntime'."
        )
    return check_integer(graph)


def check_options(options: Options) -> None:
    """Raise a ValueError if the batch or `codes` has a wrong type or value."""
    batch, codes = options.batch, options.codes
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ValueError(f"emit: expected a batch of at least 1, or None for any. Got {batch!r}.")
    if type(codes) is not bool:
        raise ValueError(f"emit: expected codes=True for integer inputs and outputs, or False. Got {codes!r}.")


def refuse_vnni(style: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if vnni is set for a style that has one form."""
    if options.get("vnni"):
        raise ValueError(f"emit: style {style!r} is the same file for every CPU. Got vnni=True; leave it out.")


DOC = {
    "onnxruntime": "qjax, target onnxruntime: the bits of ONNX Runtime's CPU provider on x86.",
    "onnxruntime_avx2": "qjax, target onnxruntime_avx2: the bits of ONNX Runtime's CPU provider on an x86 CPU without "
    "VNNI, whose products of uint8 and int8 saturate to int16 in pairs; session.x64quantprecision must not be set.",
    "openvino_cpu": "qjax, target openvino_cpu: the bits of OpenVINO's CPU plugin on an x86 CPU with VNNI, under "
    "INFERENCE_PRECISION_HINT=f32.",
    "fpga": "qjax, target fpga: a QONNX model. Every number and every sum is exact in float32; the Quant nodes round.",
}
WHY = {
    INT8_OPTION: "without it operations on int8 codes between DequantizeLinear and QuantizeLinear stay in float32 on "
    "x86, all or some",
    RESCALE_OPTION: "without it two quantizers behind one another are merged into one",
}


def fits(graph: Graph, node: Node, *, wide: bool = False) -> bool:
    """Whether the 8-bit kernels support the tensors of a node: all codes of one dtype, with one scale each.

    wide: whether any dtype is allowed, for what is computed in float.
    """
    names = [*node.inputs, node.output]
    found = [graph.tensors[name] for name in names]
    kinds = {tensor.dtype for tensor in found}
    if any(t.quantization is None or np.size(t.quantization.scale) != 1 for t in found):
        return False
    if any(t.quantization is not None and np.size(t.quantization.zero_point) != 1 for t in found):
        return False
    if any(np.size(graph.constant(node, role)) != 1 for role in ("clamp_min", "clamp_max") if role in node.constants):
        return False
    if wide:
        return kinds <= {*CODES, "int16", "uint16"}
    return len(kinds) == 1 and kinds <= set(CODES)
