"""Shows a node with all facts about its tensors, for predicates, a vendor's `prepare` and readers of the graph.

A node's own record is lean: defaults (32-bit accumulators) are left out, and properties of a tensor (scale, zero point,
range) are stored with the tensor. `NodeView` combines them, and `describe` prints them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax.graph.ir import Array, Graph, Node, Tensor
from qjax.graph.kernels import attributes
from qjax.graph.rounding_phrases import method_of
from qjax.graph.weighted_product import scale_in_rank
from qjax.numerics.accumulator import EXACT, Accumulator, bits_for
from qjax.ops import backend
from qjax.ops import get as get_op
from qjax.ops.channels import weight_to_result


class NodeView:
    """One node and the tensors around it. Arrays may be tracers if the graph is converted inside jit.

    Args:
      graph: the graph that contains the node.
      node: the node.

    Examples:
      ```python
      from qjax.export import match, op

      wide = match(graph, op("dot", where=lambda node: node.output.shape[-1] >= 16))
      ```
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def op(self) -> str:
        """The operation's name."""
        return self.node.op

    @property
    def location(self) -> str | None:
        """The user's file and line."""
        return self.node.location

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The input tensors, with shape (None is the batch), dtype and quantization."""
        return tuple(self.graph.tensors[name] for name in self.node.inputs)

    @property
    def output(self) -> Tensor:
        """The tensor that the node computes."""
        return self.graph.tensors[self.node.output]

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The node's attributes, extended by dtype, qmin and qmax of its output and by input_dtypes."""
        return attributes(self.graph, self.node)

    @property
    def constants(self) -> Mapping[str, Array]:
        """Role -> data: kernel, bias, the rule's constants, bounds."""
        return {role: self.graph.constant(self.node, role) for role in self.node.constants}

    @property
    def constant_tensors(self) -> Mapping[str, Tensor]:
        """Role -> tensor, with dtype, shape and (for a kernel) its scales."""
        return {role: self.graph.tensors[name] for role, name in self.node.constants.items()}

    @property
    def accumulator(self) -> Accumulator | None:
        """The register in which the node's products or codes are summed; None if codes only move."""
        if method_of(self.node) is None or self.op == backend.NAME:
            return None
        found = Accumulator.of_json(self.node.attributes.get("accumulator"))
        if "kernel" not in self.node.constants:
            return EXACT
        return found.on(self.inputs[0].dtype, self.constant_tensors["kernel"].dtype)

    @property
    def method(self) -> str | None:
        """The rule, formula or exact sum that turns accumulators into codes; None if codes only move."""
        return method_of(self.node)

    @property
    def weight_scale(self) -> Array:
        """The kernel's scales, float32, in a shape that broadcasts against the result's trailing axes; () for one."""
        kernel = self.constant_tensors["kernel"]
        assert kernel.quantization is not None
        if "channels" not in self.node.attributes:
            return kernel.quantization.scale
        return weight_to_result(scale_in_rank(kernel), self.node.attributes["channels"], self.node.attributes["rank"])

    @property
    def relu(self) -> bool:
        """Whether the codes are bounded by the code of 0 below and unbounded above.

        A ReLU is not a node: it is the constant `clamp_min` of the node that computes its input, or of a `clamp` if
        that input has its own quantizer.

        Raises:
          ValueError: inside jit, for a lower bound other than 0, whose code is not known there.
        """
        constants, quantization = self.constants, self.output.quantization
        if "clamp_min" not in constants or "clamp_max" in constants or quantization is None:
            return False
        low, zero = constants["clamp_min"], quantization.zero_point
        if low is zero:
            return True
        if isinstance(low, Tracer) or isinstance(zero, Tracer):
            raise ValueError(
                f"{self.location}: inside jit it is unknown whether {self.name!r} ends in a relu, because its lower "
                "bound is a constant other than 0. Match on its bounds (where=lambda node: 'clamp_min' in "
                "node.constants), and let the kernel clamp."
            )
        return bool(np.array_equal(np.asarray(low), np.asarray(zero)))

    @property
    def kind(self) -> str:
        """The name of the operation in tables: its own, or "chip:conv_add_relu" for a backend's kernel."""
        if self.op != backend.NAME:
            return self.op
        return f"{self.attributes['backend'] or 'fused'}:{self.attributes['pattern']}"

    @property
    def arithmetic(self) -> str:
        """A short description of the arithmetic: "int4 weights, int32, bias int32, nearest_even, relu"."""
        if self.op == backend.NAME:
            return " + ".join(member.op for member in backend.members_of(self.attributes).values())
        parts: list[str] = []
        kernel = self.constant_tensors.get("kernel")
        if kernel is not None and kernel.quantization is not None:
            parts.append(f"int{bits_for(kernel.quantization.qmin, kernel.quantization.qmax)} weights")
        own = get_op(self.op).arithmetic(self.node.attributes)
        if own is not None:
            parts.append(own)
        elif self.accumulator is not None:
            parts.append(accumulator_text(self))
        if own is None and self.method is not None:
            parts.append(self.method)
        if {"clamp_min", "clamp_max"} & set(self.node.constants):
            parts.append("relu" if self.relu else "clamp")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<{self.op} {self.name!r}>"


def describe(graph: Any) -> str:
    """Return every node with its full attributes, types and constants, as text.

    Args:
      graph: an `IntegerGraph`, or its `ir`.

    Examples:
      ```python
      from qjax.export import describe

      print(describe(graph))
      ```
    """
    ir = getattr(graph, "ir", graph)
    lines: list[str] = []
    for node in ir.nodes:
        lines += [*describe_node(NodeView(ir, node)), ""]
    return "\n".join(lines[:-1])


def describe_node(view: NodeView) -> list[str]:
    """The lines of one node."""
    where = f"  # {view.location}" if view.location else ""
    lines = [f"{view.name} = {view.op}{where}"]
    lines += [f"  input {tensor_text(tensor)}" for tensor in view.inputs]
    lines.append(f"  output {tensor_text(view.output)}")
    if view.accumulator is not None:
        lines.append(f"  accumulator {accumulator_text(view)}")
    if view.method is not None:
        lines.append(f"  {'computed by' if view.op == backend.NAME else 'requantization'} {view.method}")
    implied = get_op(view.op).implied(view.node.inputs)
    if implied is not None:
        lines.append(f"  {implied}")
    for role, tensor in view.constant_tensors.items():
        lines.append(f"  constant {role}: {tensor_text(tensor)}")
    if view.op == backend.NAME:
        for member in backend.members_of(view.attributes).values():
            sources = ", ".join(view.node.inputs[s] if isinstance(s, int) else s for s in member.inputs)
            where = f"  # {member.location}" if member.location else ""
            shape = "x".join("batch" if size is None else str(size) for size in member.shape)
            lines.append(f"  member {member.label} = {member.op}({sources}): {member.dtype} {shape}{where}")
            lines.append(f"    node {member.name}, codes {member.qmin}..{member.qmax}")
            lines += [f"    {key} = {value}" for key, value in member.attributes.items() if key not in _FACTS]
        return lines
    lines += [f"  {key} = {value}" for key, value in view.node.attributes.items() if key not in _SAID]
    return lines


_SAID = ("rule", "formula", "rounding", "accumulator")
_FACTS = ("dtype", "input_dtypes", "qmin", "qmax")


def accumulator_text(view: NodeView) -> str:
    """The types of the register and of the bias: "int32, bias int32"."""
    register = view.accumulator
    assert register is not None
    if register == EXACT:
        text = "int32"
    else:
        text = str(register) if register.pairs else f"int{register}"
    if view.method is not None and view.method.startswith("exact sum"):
        text += ", scaled and added in int64"
    bias = view.constant_tensors.get("bias")
    return text if bias is None else f"{text}, bias {bias.dtype}"


def tensor_text(tensor: Tensor) -> str:
    """Name, dtype, shape, scale, zero point, range and axes."""
    shape = "x".join("batch" if size is None else str(size) for size in tensor.shape)
    text = f"{tensor.name}: {tensor.dtype} {shape or 'scalar'}"
    q = tensor.quantization
    if q is None:
        return text
    axes = f" along {', '.join(map(str, q.axes))}" if q.axes else ""
    return f"{text}, scale {_span(q.scale)}{axes}, zero point {_span(q.zero_point)}, codes {q.qmin}..{q.qmax}"


def _span(values: Any) -> str:
    array = np.asarray(values)
    if not array.size:
        return "none"
    low, high = array.min(), array.max()
    text = "{:.6g}".format if array.dtype.kind == "f" else str
    return text(low) if low == high else f"{text(low)} .. {text(high)}"
