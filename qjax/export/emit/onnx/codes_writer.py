"""Styles "qdq" and "qoperator": a graph as operators that ONNX Runtime computes on codes, with its bits.

| node | becomes |
| --- | --- |
| an operation of the runtime, with exactly the constants that the target derives from the scales | that operation |
| a move of codes | standard operators on integers |
| any other | the function of style "integer" |

Layouts are those of `integer`: a tensor is stored in the axis order in which its producer computes it.

Products of int8 activations are computed on uint8, see `unsigned`: their sums and their rounding do not depend on the
zero point.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax import ops, targets
from qjax.assign.retarget import made_by_target
from qjax.export import document
from qjax.export.emit.onnx import tensors
from qjax.export.emit.onnx.builder import DOMAIN, VERSION, element_type
from qjax.export.emit.onnx.codes import (
    DOC,
    WHY,
    Bias,
    Operand,
    Operation,
    Options,
    Runtime,
    is_narrower,
    limits,
)
from qjax.export.emit.onnx.unsigned import UnsignedWriter
from qjax.export.emit.onnx.views import View
from qjax.export.onnx_ops import MICROSOFT
from qjax.graph.ir import Graph, Node
from qjax.ops import Role

Spelling = Callable[["CodesWriter", Operation, str], None]
"""Adds an operation to the model; the last argument is the name of its main node."""


class CodesWriter(UnsignedWriter):
    """Writes one model.

    style: its name. spelling: how it writes an operation. runtime: which operations it can write.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        style: str,
        spelling: Spelling,
        runtime: Runtime,
    ) -> None:
        super().__init__(graph, options)
        self.style, self.spelling, self.runtime, self.codes = style, spelling, runtime, options.codes
        self.options: dict[str, str] = {}
        self.reals: dict[Operand, str] = {}
        self.results: dict[str, str] = {}
        self.kept: set[str] = set()
        """The initializers of the file."""
        self.casts: dict[str, str] = {}
        self.readers = Counter(name for node in graph.nodes for name in set(node.constants.values()))
        """How many nodes read a constant."""
        self.shared: dict[tuple[str, bytes], str] = {}
        """The weights that several nodes read, by the tensor of the graph and by the stored data."""
        self.holders: dict[str, str] = {}
        """Tensor of the graph -> the initializer of another name that contains its data."""
        self.flat: dict[tuple[str, str], str] = {}
        self.pairs = targets.get(graph.target).accumulator.pairs
        self.own = made_by_target(graph)

    # ------------------------------------------------------------------ the model

    def model(self) -> onnx.ModelProto:
        """The model."""
        model = super().model()
        self.drop_unread(model.graph)
        self._drop_functions(model)
        if not self.codes:
            self._float_ends(model.graph)
        if any(node.domain == MICROSOFT for node in model.graph.node):
            model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        del model.metadata_props[:]
        tensors.put(model, self._facts())
        options = "".join(
            f" Session option {key}={value} is needed: {WHY[key]}." for key, value in self.options.items()
        )
        model.doc_string = f"{DOC[self.graph.target]}{options}"
        return model

    def _drop_functions(self, model: onnx.ModelProto) -> None:
        """Drop functions whose only calls were inlined."""
        called = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
        # functions come after those that they call
        for function in reversed(model.functions):
            if function.name in called:
                called |= {node.op_type for node in function.node if node.domain == DOMAIN}
        kept = [function for function in model.functions if function.name in called]
        del model.functions[:]
        model.functions.extend(kept)

    def _facts(self) -> dict[str, Any]:
        graph = self.graph
        renamed = {} if self.codes else {codes: port for port, codes in self._ports().items()}
        whole = {
            "tensors": [self._described(name) for name in graph.tensors],
            "nodes": [document.of_node(node) for node in graph.nodes],
        }
        return {
            "style": self.style,
            "version": VERSION,
            "batch": self.batch,
            "codes": self.codes,
            **({"vnni": True} if self.vnni else {}),
            "target": graph.target,
            "quantization": graph.quantization,
            "onnxruntime_session": self.options,
            "names": renamed,
            "inputs": list(graph.inputs),
            "outputs": list(graph.outputs),
            "document": document.packed(whole),
            "metadata": dict(graph.metadata),
        }

    def _described(self, name: str) -> dict[str, Any]:
        tensor = self.graph.tensors[name]
        if name in self.kept and tensors.taken(self.initializers[name]) is not None:
            return {"name": name}
        if self.holders.get(name) in self.kept:
            return {"name": name, "constant": self.holders[name]}
        return document.of_tensor(tensor, data=True)

    def read_initializers(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.TensorProto]:
        found = super().read_initializers(nodes)
        self.kept = {proto.name for proto in found}
        return found

    def unread(self) -> dict[str, Any]:
        """Nothing, because the metadata contain everything that the model does not mention."""
        return {}

    def info(self, view: View, name: str | None = None) -> onnx.ValueInfoProto:
        """The type alone, because the model's metadata contain the rest."""
        return super().info(view)

    # ------------------------------------------------------------------ ends

    def output(self, name: str, used: set[str]) -> onnx.ValueInfoProto:
        """The declaration of a result; a copy has a name that differs from its source's."""
        info = super().output(name, used)
        self.results[info.name] = name
        return info

    def _ports(self) -> dict[str, str]:
        """Input or output of the model -> the name of its codes, for those that are floats."""
        ends = {name: name for name in self.graph.inputs} | self.results
        return {port: self.unique(f"{port}/codes") for port, name in ends.items() if self._is_real(name)}

    def _is_real(self, name: str) -> bool:
        quantization = self.graph.tensors[name].quantization
        return quantization is not None and np.size(quantization.scale) == 1

    def _float_ends(self, graph: onnx.GraphProto) -> None:
        """QuantizeLinear after every input, DequantizeLinear before every output, with the names of the ports."""
        ports = self._ports()
        written = set(ports.values())
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [ports.get(name, name) for name in names]
        # an output that is a copy needs no Identity, because DequantizeLinear makes a new tensor anyway
        copies = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity" and n.output[0] in written}
        first: list[onnx.NodeProto] = []
        last: list[onnx.NodeProto] = []
        for values in (graph.input, graph.output):
            for value in values:
                port = value.name
                if port not in ports:
                    continue
                if ports[port] not in copies:
                    codes = graph.value_info.add()
                    codes.CopyFrom(value)
                    codes.name = ports[port]
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
                name = self.results.get(port, port)
                grid = [self.scale(name), self.zero_point(name)]
                if values is graph.input:
                    first += self._quantized(name, ports[port], grid)
                else:
                    source = copies.get(ports[port], ports[port])
                    made = helper.make_node("DequantizeLinear", [source, *grid], [port], f"{port}/dequantize")
                    last.append(made)
        nodes = [*first, *(node for node in graph.node if node.output[0] not in copies), *last]
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.initializer[:]
        graph.initializer.extend(self.read_initializers(graph.node))

    def _quantized(self, name: str, codes: str, grid: list[str]) -> list[onnx.NodeProto]:
        tensor = self.graph.tensors[name]
        assert tensor.quantization is not None
        span = tensor.quantization.qmin, tensor.quantization.qmax
        clips = is_narrower(tensor.dtype, *span)
        raw = self.fresh(f"{codes}/raw") if clips else codes
        found = [helper.make_node("QuantizeLinear", [name, *grid], [raw], f"{name}/quantize")]
        return found + (self.clip(tensor.dtype, raw, codes, *span) if clips else [])

    # ------------------------------------------------------------------ nodes

    def node(self, node: Node) -> None:
        """Write one node of the graph: one operation on codes, or moves of codes, or a function of integers."""
        written = self.runtime.operations.get(node.op)
        if written is not None and node.name in self.own and written(self, node):
            return
        super().node(node)
        if ops.get(node.op).role is not Role.PRODUCER:
            self._inlined(node)

    def _inlined(self, node: Node) -> None:
        """Put the body of the last called function in its place, because moves of codes are standard operators."""
        places = range(len(self.nodes) - 1, -1, -1)
        place = next(i for i in places if self.nodes[i].name == node.name and self.nodes[i].domain == DOMAIN)
        call = self.nodes[place]
        function = self.library.functions[call.op_type]
        if any(inner.domain == DOMAIN for inner in function.node):
            return
        names = dict(zip(function.input, call.input, strict=True)) | {function.output[0]: call.output[0]}
        found: list[onnx.NodeProto] = []
        for inner in function.node:
            if inner.op_type == "Constant":
                value = numpy_helper.to_array(inner.attribute[0].t)
                names[inner.output[0]] = self.stored(f"{node.output}/{inner.output[0]}", value)
                continue
            copy = onnx.NodeProto()
            copy.CopyFrom(inner)
            if any(attribute.HasField("g") for attribute in copy.attribute):
                return
            for name in inner.output:
                names.setdefault(name, self.fresh(f"{node.output}/{name}"))
            copy.input[:] = [names[name] if name else "" for name in inner.input]
            copy.output[:] = [names[name] for name in inner.output]
            copy.name = self.fresh(f"{node.name}/{inner.op_type.lower()}")
            found.append(copy)
        self.nodes[place : place + 1] = found

    def scale(self, name: str) -> str:
        """The initializer of a tensor's only scale."""
        quantization = self.graph.tensors[name].quantization
        assert quantization is not None
        return self.stored(f"{name}/scale", np.asarray(quantization.scale, np.float32).reshape(()))

    def operand(self, name: str, view: View) -> Operand:
        """A tensor of the graph as it is stored."""
        return Operand(view.name, self.scale(name), self.zero_point(name))

    def real(self, operand: Operand) -> str:
        """The dequantized codes, by one DequantizeLinear for all readers."""
        if operand not in self.reals:
            grid = [operand.scale, operand.zero_point]
            axis: dict[str, Any] = {} if operand.axis is None else {"axis": operand.axis}
            output = self.fresh(f"{operand.codes}/real")
            self.reals[operand] = self.add("DequantizeLinear", [operand.codes, *grid], output, **axis)
        return self.reals[operand]

    def cast(self, codes: str, kind: int) -> str:
        """Constant codes cast to a wider type, which the optimizer folds."""
        if codes not in self.casts:
            self.casts[codes] = self.add("Cast", [codes], self.fresh(f"{codes}/codes"), to=kind)
        return self.casts[codes]

    def clip(self, dtype: str, source: str, result: str, low: int, high: int) -> list[onnx.NodeProto]:
        """The nodes that bound codes; the runtime has Clip for 8 bits and 32, but not for 16."""
        wide = dtype if dtype in ("int8", "uint8") else "int32"
        bounds = [self.stored(f"{wide}/{n}", np.asarray(n, wide)) for n in (low, high)]
        if wide == dtype:
            return [helper.make_node("Clip", [source, *bounds], [result], self.fresh(f"{result}/clip"))]
        names = [source, self.fresh(f"{result}/wide"), self.fresh(f"{result}/bounded"), result]
        found = [
            helper.make_node("Cast", names[:1], names[1:2], to=element_type(wide)),
            helper.make_node("Clip", [names[1], *bounds], names[2:3], self.fresh(f"{result}/clip")),
            helper.make_node("Cast", names[2:3], names[3:], to=element_type(dtype)),
        ]
        return found

    def write(
        self,
        node: Node,
        order: Sequence[int],
        real: str | None,
        operands: Sequence[Operand],
        bias: Bias | None = None,
        shape: Sequence[int] | None = None,
        *,
        unsigned: bool = False,
        **attributes: Any,
    ) -> bool:
        """Write an operation and what follows it (bounds narrower than the dtype, a reshape); returns True.

        order: for each axis of the result, the axis of the graph's tensor. shape: the final shape, with -1 for a free
        size; None: unchanged. unsigned: whether a result of int8 is computed as uint8.
        """
        tensor = self.graph.tensors[node.output]
        assert tensor.quantization is not None
        span, dtype = limits(self.graph, node), tensor.dtype
        clips = self.runtime.clamps and is_narrower(dtype, *span)
        steps = ([] if not clips else ["clipped"]) + ([] if shape is None else ["reshaped"])
        place = name = self.place(node.output, order)
        if unsigned:
            name, dtype, span = self.fresh(f"{node.output}/unsigned"), "uint8", (span[0] + 128, span[1] + 128)
        names = [self.fresh(f"{node.output}/{step}") for step in ("raw", *steps[:-1])[: len(steps)]] + [name]
        zero_point = self.unsigned_zero_point if unsigned else self.zero_point
        result = Operand(names[0], self.scale(node.output), zero_point(node.output))
        self.spelling(self, Operation(real, operands, result, node, span, bias, attributes), node.name)
        if clips:
            self.nodes += self.clip(dtype, names[0], names[1], *span)
        if shape is not None:
            self.add("Reshape", [names[-2], self.shape(shape)], name, name=self.fresh(f"{node.name}/reshape"))
        if unsigned:
            self.lower(name, place)
            name = place
        self.placed(node.output, View.full(name, tensor.dtype, self.sizes(node.output), order))
        return True

    def sizes(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, with the number that represents the batch."""
        return self.shapes[name]

    def dims(self, sizes: Sequence[int]) -> list[int] | None:
        """A shape for Reshape, with -1 for the free size; None if two sizes are free."""
        free = [self.free is not None and n > 0 and n % self.free == 0 for n in sizes]
        return [-1 if follows else n for n, follows in zip(sizes, free, strict=True)] if sum(free) < 2 else None
