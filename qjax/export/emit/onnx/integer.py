"""Style "integer": a graph as standard ONNX operators on integers, for any target, bit for bit.

The model has no float tensor: its inputs and outputs are codes. Each node of the graph is one node of the model. It
calls a function of the domain "qjax", whose body consists of standard operators (see `nodes`), so that a viewer shows
the graph and a runtime inlines the functions. The model's values have the names of the graph's tensors. Scales, ranges
and axes are in the metadata of each tensor, as JSON under the key "qjax".

Convolutions are channels-first in ONNX. A tensor is stored in the axis order in which its producer computes it, and its
metadata contain the order. Channels-last networks therefore have one transpose at the input, and one where they need
their order.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax import ops
from qjax.export import document
from qjax.export.emit.onnx import nodes, tensors
from qjax.export.emit.onnx.builder import DOMAIN, IR_VERSION, VERSION, Library, opset_imports
from qjax.export.emit.onnx.tensors import encoded
from qjax.export.emit.onnx.tracing import PRIME
from qjax.export.emit.onnx.views import NeedsBatch, View
from qjax.graph.batch_shapes import shapes_at
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node
from qjax.graph.kernels import attributes as attributes_of
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS
from qjax.ops import Role
from qjax.ops.facts import ProductFacts
from qjax.support.errors import Unsupported
from qjax.support.names import lengthened
from qjax.support.version import __version__

STYLE = "integer"


def to_model(graph: Graph, *, batch: int | None = None, vnni: bool = False) -> onnx.ModelProto:
    """The model. batch, vnni: see `qjax.export.emit.onnx.emit`.

    Raises:
      ValueError: a node whose bits depend on an element's position, or on the batch size, although that is free; a
        graph that is not finished.
    """
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ValueError(f"emit: expected a batch of at least 1, or None for any. Got {batch!r}.")
    from qjax.export.emit.onnx.rolled import Rolled, loops_of

    loops = loops_of(check_integer(graph))
    if loops:
        try:
            return Rolled(graph, batch, vnni=vnni, loops=loops).model()
        except Unsupported:
            pass  # each node may have a form, or its own message
    return Writer(graph, batch, vnni=vnni).model()


class Writer:
    """One model under construction; `node` decides what a node of the graph becomes.

    for_runtime: see `Library`.
    """

    for_runtime = False

    def __init__(self, graph: Graph, batch: int | None, *, vnni: bool = False) -> None:
        self.graph, self.batch, self.vnni = graph, batch, vnni
        self.library = Library(signed=vnni, for_runtime=self.for_runtime)
        self.size = PRIME if batch is None else batch
        self.free = PRIME if batch is None and _has_batch(graph) else None
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.values: list[onnx.ValueInfoProto] = []
        self.views: dict[str, View] = {}
        # constants that are read as codes keep their dtype
        self.data = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
        self.ordered: dict[tuple[str, tuple[int, ...]], View] = {}
        self.unread_codes: set[str] = set()
        """Constants of 4 bits that some function takes but does not read: ONNX Runtime has no type for its input."""

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, with the number that represents the batch."""
        return shapes_at(self.graph, self.size)

    def model(self) -> onnx.ModelProto:
        graph = self.graph
        for name in graph.inputs:
            tensor = graph.tensors[name]
            shape = tuple(self.size if n is None else n for n in tensor.shape)
            self.views[name] = View.full(name, tensor.dtype, shape)
        self.every_node()
        used: set[str] = set()
        outputs = [self.output(name, used) for name in graph.outputs]
        unread = self.unread()
        proto = helper.make_graph(
            self.nodes,
            "qjax",
            [self.info(self.views[name], name) for name in graph.inputs],
            outputs,
            self.read_initializers(self.nodes),
            value_info=self.values,
        )
        model = helper.make_model(
            proto,
            functions=list(self.library.functions.values()),
            opset_imports=opset_imports(),
            ir_version=IR_VERSION,
            producer_name="qjax",
            producer_version=_versions(),
        )
        tensors.put(model, {**self.facts(), "unread": unread, "metadata": dict(graph.metadata)})
        return model

    def every_node(self) -> None:
        """Write the nodes."""
        for node in self.graph.nodes:
            self.node(node)

    def facts(self) -> dict[str, Any]:
        """What the model's metadata contain about the graph, apart from its own metadata."""
        graph = self.graph
        return {
            "style": STYLE,
            "version": VERSION,
            "batch": self.batch,
            **({"vnni": True} if self.vnni else {}),
            "target": graph.target,
            "quantization": graph.quantization,
            **({"dequantization": graph.dequantization} if graph.dequantization != OUTPUT_DEQUANTIZATIONS[0] else {}),
            "inputs": list(graph.inputs),
            "outputs": list(graph.outputs),
            "tensors": list(graph.tensors),
        }

    def node(self, node: Node) -> None:
        graph = self.graph
        known = attributes_of(graph, node)
        constants = {role: self.constant(node, role, name) for role, name in node.constants.items()}
        points = {f"zero_point{i}": name for i, name in enumerate(node.inputs)} | {"y_zero_point": node.output}
        points = {role: name for role, name in points.items() if graph.tensors[name].quantization is not None}
        inputs = [self.value(name) for name in node.inputs]
        stored = {role: graph.tensors[name].dtype for role, name in points.items()}
        choices = {role: np.asarray(graph.constant(node, role)) for role in node.constants if role in nodes.CHOICES}
        ranges = [self.certain_range(name) for name in node.inputs]
        facts = self.facts_of(node, points)
        call = nodes.Call(node.op, known, tuple(inputs), constants, stored, choices, facts, ranges)
        if nodes.is_native(call):
            call = dataclasses.replace(call, range=self.range(node.inputs[0]))
        order = nodes.wanted_order(call)
        if order is None and ops.get(node.op).one_order and len({view.axes for view in inputs}) > 1:
            order = next(view.axes for view in inputs if list(view.axes) != list(range(len(view.axes))))
        if order is not None:
            inputs = [self.in_order(view, tuple(order)) for view in inputs]
            call = dataclasses.replace(call, inputs=tuple(inputs))
        narrow = {
            role: constants[role].dtype
            for role, name in node.constants.items()
            if name not in self.data and tensors.narrow_type(graph.tensors[name]) is not None
        }
        try:
            body = nodes.write(self.library, call, self.free, narrow)
        except NeedsBatch:
            how = known.get("rule") or known.get("formula") or "its kernel"
            raise Unsupported(
                f"{how} depends on an element's position in the tensor or on the batch size, so the file needs a "
                "fixed batch size: emit it with batch=1, or the size you run.",
                what=f"Node {node.name!r} ({node.op})",
            ) from None
        except ValueError as error:
            raise Unsupported(str(error), what=f"Node {node.name!r} ({node.op})") from None
        read = {given for made in self.library.functions[body.function].node for given in made.input}
        self.unread_codes |= {node.constants[role] for role in narrow if role not in read}
        name = self.place(node.output, body.output.axes)
        view = View.full(name, body.output.dtype, body.output.shape, body.output.axes)
        names = [view.name for view in inputs] + list(node.constants.values())
        names += [self.zero_point(points[role]) for role in body.zero_points]
        call_node = helper.make_node(body.function, names, [name], name=node.name, domain=DOMAIN)
        for key, value in node.attributes.items():
            call_node.attribute.append(encoded(key, value))
        tensors.put(call_node, {"op": node.op, "location": node.location, "output": node.output})
        self.nodes.append(call_node)
        self.placed(node.output, view)

    def range(self, name: str) -> tuple[int, int, int]:
        """The lowest and the highest code of a tensor, and its zero point; a user may feed any code of the dtype."""
        tensor = self.graph.tensors[name]
        q, info = tensor.quantization, np.iinfo(tensor.dtype)
        assert q is not None
        ends = (q.qmin, q.qmax) if self.graph.producer(name) is not None else (int(info.min), int(info.max))
        return *ends, int(np.asarray(q.zero_point).reshape(()))

    def facts_of(self, node: Node, points: Mapping[str, str]) -> dict[str, np.ndarray]:
        """The values of a node's constants, and of its zero points, by role. points: the tensor of each zero point."""
        found = {role: np.asarray(self.graph.constant(node, role)) for role in node.constants}
        for role, name in points.items():
            quantization = self.graph.tensors[name].quantization
            assert quantization is not None
            found[role] = np.asarray(quantization.zero_point, np.int32)
        return found

    def certain_range(self, name: str) -> tuple[int, int] | None:
        """The codes that a tensor can have: those of its grid only if a kernel clamps them."""
        made, quantization = self.graph.producer(name), self.graph.tensors[name].quantization
        if made is None or quantization is None or ops.get(made.op).role is not Role.PRODUCER:
            return None
        return quantization.qmin, quantization.qmax

    def place(self, output: str, axes: Sequence[int]) -> str:
        """The name under which a node's output is computed: its own, unless it is transposed afterwards."""
        canonical = list(axes) == list(range(len(axes)))
        return self.derived(output, axes) if output in self.graph.outputs and not canonical else output

    def placed(self, output: str, view: View) -> None:
        """Register a node's output, which the last node of the model computes under the name `place`."""
        self.views[output] = view
        if view.name != output:
            self.values.append(self.info(view))
            self.nodes.append(_transpose(view, output))
            self.views[output] = View.full(output, view.dtype, view.shape)
            self.ordered[output, view.axes] = view
        elif output not in self.graph.outputs:
            self.values.append(self.info(view, output))

    def value(self, name: str) -> View:
        """A tensor that a node reads: an input, a result, or a constant."""
        if name not in self.views:
            tensor = self.graph.tensors[name]
            self.initializers[name] = tensors.initializer(name, tensor, plain=True)
            self.views[name] = View.full(name, tensor.dtype, _sizes(tensor.shape))
        return self.views[name]

    def constant(self, node: Node, role: str, name: str) -> View:
        """A constant of a node's kernel; a convolution's weights are channels-first, as in ONNX."""
        tensor = self.graph.tensors[name]
        shape = _sizes(tensor.shape)
        order = tuple(range(len(shape)))
        op = ops.get(node.op)
        if role == "kernel" and isinstance(op, ProductFacts) and op.is_convolution:
            order = tuple(node.attributes["rhs_layout"])
        if name not in self.initializers:
            self.initializers[name] = tensors.initializer(name, tensor, order, plain=name in self.data)
            self.views[name] = View.full(name, tensor.dtype, shape, order)
        return self.views[name]

    def read_initializers(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.TensorProto]:
        """The initializers that some node reads; ONNX Runtime warns of any other when it loads a file."""
        read = {name for node in nodes for name in node.input} | set(self.graph.outputs)
        for name in self.unread_codes:
            self.initializers[name] = tensors.initializer(
                name, self.graph.tensors[name], self.views[name].axes, plain=True
            )
        return [proto for name, proto in self.initializers.items() if name in read]

    def zero_point(self, name: str) -> str:
        """The initializer of a tensor's zero point, in the dtype of its codes."""
        key = self.unique(f"{name}/zero_point")
        if key not in self.initializers:
            tensor = self.graph.tensors[name]
            assert tensor.quantization is not None
            value = np.asarray(tensor.quantization.zero_point).astype(tensor.dtype)
            self.initializers[key] = numpy_helper.from_array(value, key)
        return key

    def derived(self, name: str, axes: Sequence[int]) -> str:
        """A name for a tensor in another order of its axes."""
        return self.unique(f"{name}/axes_{'_'.join(map(str, axes))}")

    def unique(self, name: str) -> str:
        """The name, extended if a tensor of the graph has it already."""
        return lengthened(name, self.graph.tensors)

    def in_order(self, view: View, order: tuple[int, ...]) -> View:
        """The tensor with its axes in that order, by one Transpose for all readers."""
        if view.axes == order:
            return view
        name = next(key for key, value in self.views.items() if value is view)
        key = name, order
        if key not in self.ordered:
            moved = View.full(self.derived(name, order), view.dtype, view.shape, order)
            permutation = [view.axes.index(axis) for axis in order]
            self.nodes.append(helper.make_node("Transpose", [view.name], [moved.name], perm=permutation))
            self.values.append(self.info(moved))
            self.ordered[key] = moved
        return self.ordered[key]

    def output(self, name: str, used: set[str]) -> onnx.ValueInfoProto:
        """The declaration of a result, which is a copy if the tensor is an input, a constant or a result already."""
        view = self.value(name)
        if self.graph.producer(name) is None or name in used:
            copy = self.unique(f"{name}/output")
            self.nodes.append(helper.make_node("Identity", [view.name], [copy]))
            view = View.full(copy, view.dtype, view.shape)
        used.add(name)
        return self.info(view, name)

    def unread(self) -> dict[str, Any]:
        """Tensors that the model does not mention, and constants that it mentions but nothing reads."""
        graph, found = self.graph, dict[str, Any]()
        read = {name for node in graph.nodes for name in (*node.inputs, *node.constants.values(), node.output)}
        for name, tensor in graph.tensors.items():
            if name in read or name in graph.inputs or name in graph.outputs:
                continue
            if tensor.value is None:
                found[name] = document.of_tensor(tensor)
            else:
                self.initializers[name] = tensors.initializer(name, tensor)
        return found

    def info(self, view: View, name: str | None = None) -> onnx.ValueInfoProto:
        """The type of a tensor of the model; name: of the graph's tensor that it represents."""
        sizes: list[int | str] = []
        for n in view.stored:
            follows = self.free is not None and n and n % self.free == 0
            times = n // PRIME
            sizes.append(("batch" if times == 1 else f"{times}*batch") if follows else n)
        facts = None if name is None else document.of_tensor(self.graph.tensors[name], view.axes)
        return tensors.value_info(view.name, view.dtype, sizes, facts)


def _versions() -> str:
    """The versions to which these bodies belong: another JAX may trace the same kernel to other primitives."""
    return f"{__version__} with jax {jax.__version__}"


def _transpose(view: View, output: str) -> onnx.NodeProto:
    permutation = [view.axes.index(axis) for axis in range(len(view.axes))]
    return helper.make_node("Transpose", [view.name], [output], perm=permutation)


def _has_batch(graph: Graph) -> bool:
    return any(None in graph.tensors[name].shape for name in graph.inputs)


def _sizes(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(size for size in shape if size is not None)
