"""Codes of int8 as uint8: the same codes plus 128, which ONNX Runtime multiplies several times as fast.

| reads codes of int8 | gets |
| --- | --- |
| a product, a softmax | the unsigned form; its own result is unsigned, too |
| a move of codes, a maximum, a table, between two of these | the unsigned form |
| anything else | the signed form, because its float32 steps depend on the zero point |

A form that nothing reads is dropped.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax.export.emit.onnx import integer
from qjax.export.emit.onnx.builder import element_type
from qjax.export.emit.onnx.codes import Operand, Options
from qjax.graph.ir import Graph, Node
from qjax.support.names import Names

INT8, UINT8 = (element_type(dtype) for dtype in ("int8", "uint8"))
_MOVES = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Expand", "Tile"})
"""Operators whose first operand has the codes, and that do not change any code."""


class UnsignedWriter(integer.Writer):
    """A writer of operators on codes that tracks the unsigned form of each tensor, if it was made."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.plain, self.for_runtime = options.plain, not options.plain
        super().__init__(graph, options.batch, vnni=options.vnni)
        self.names = Names(graph.tensors, beside=self.initializers)
        self.unsigned: dict[str, str] = {}
        self.lowered: list[str] = []
        self._makers: dict[str, onnx.NodeProto | None] = {}

    def add(
        self, op: str, inputs: Sequence[str], output: str, *, domain: str = "", name: str = "", **attributes: Any
    ) -> str:
        """Append one node of the model; returns its output."""
        made = helper.make_node(op, inputs, [output], name or None, domain=domain or None, **attributes)
        self.nodes.append(made)
        return output

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        return self.names.fresh(name)

    def stored(self, name: str, value: Any) -> str:
        """An initializer; the same name and value are stored once."""
        array = np.asarray(value)
        proto = numpy_helper.from_array(array, self.unique(name))
        if proto.name in self.initializers and self.initializers[proto.name] != proto:
            proto.name = self.fresh(proto.name)
        self.initializers[proto.name] = proto
        return proto.name

    def shape(self, dims: Sequence[int]) -> str:
        """The initializer of a shape for Reshape."""
        return self.stored(f"shape/{'x'.join(map(str, dims))}", np.asarray(dims, np.int64))

    def dtype(self, operand: Operand) -> str:
        """The dtype of an operand's codes."""
        return helper.tensor_dtype_to_np_dtype(self.initializers[operand.zero_point].data_type).name

    def moves_to_unsigned(self, node: Node) -> bool:
        """Whether a product's activations become uint8."""
        return not self.plain and self.graph.tensors[node.inputs[0]].dtype == "int8"

    def unsigned_of(self, codes: str) -> str | None:
        """The unsigned form of codes if it exists, or exists in front of moves, which are then repeated on it."""
        if codes in self.unsigned:
            return self.unsigned[codes]
        maker = self._maker(codes)
        if maker is None or maker.op_type not in _MOVES or maker.domain:
            return None
        source = self.unsigned_of(maker.input[0])
        if source is None:
            return None
        moved = onnx.NodeProto()
        moved.CopyFrom(maker)
        moved.name = self.fresh(f"{maker.name or codes}/unsigned")
        moved.input[0], moved.output[0] = source, self.fresh(f"{codes}/unsigned")
        self.nodes.append(moved)
        self.unsigned[codes] = moved.output[0]
        self.lowered.append(codes)
        return self.unsigned[codes]

    def _maker(self, codes: str) -> onnx.NodeProto | None:
        """The node that computes a tensor."""
        if codes not in self._makers:
            # most tensors are read soon after they are made
            self._makers[codes] = next((node for node in reversed(self.nodes) if codes in node.output), None)
        return self._makers[codes]

    def factor(self, name: str, operand: Operand) -> Operand:
        """An operand of a product, whose codes become uint8, by adding 128, if they are int8. name: the tensor's."""
        if self.plain or self.dtype(operand) != "int8":
            return operand
        codes = self.unsigned_of(operand.codes)
        if codes is None:
            wrapped = self.add("Cast", [operand.codes], self.fresh(f"{operand.codes}/wrapped"), to=UINT8)
            half = self.stored("uint8/128", np.uint8(128))
            codes = self.add("Add", [wrapped, half], self.fresh(f"{operand.codes}/unsigned"))
            self.unsigned[operand.codes] = codes
        return Operand(codes, operand.scale, self.unsigned_zero_point(name))

    def unsigned_zero_point(self, name: str) -> str:
        """The initializer of the zero point of a tensor of int8 as uint8."""
        quantization = self.graph.tensors[name].quantization
        assert quantization is not None
        value = np.asarray(quantization.zero_point).reshape(()) + 128
        return self.stored(f"{name}/unsigned_zero_point", value.astype(np.uint8))

    def lower(self, name: str, result: str) -> None:
        """Compute the signed form of unsigned codes."""
        wrapped = self.add("Cast", [name], self.fresh(f"{name}/wrapped"), to=INT8)
        self.add("Add", [wrapped, self.stored("int8/-128", np.int8(-128))], result)
        self.unsigned[result] = name
        self.lowered += [wrapped, result]

    def drop_unread(self, graph: onnx.GraphProto) -> None:
        """Drop the signed forms that nothing reads."""
        makers = {name: node for node in graph.node for name in node.output}
        reads = Counter(name for node in graph.node for name in node.input)
        reads.update(value.name for value in graph.output)
        dropped: set[str] = set()
        for name in reversed(self.lowered):
            if not reads[name]:
                dropped.add(name)
                reads.subtract(makers[name].input)
        nodes = [node for node in graph.node if node.output[0] not in dropped]
        shapes = [value for value in graph.value_info if value.name not in dropped]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.value_info.extend(shapes)
