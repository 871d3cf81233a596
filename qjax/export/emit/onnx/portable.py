"""QDQ for other runtimes than ONNX Runtime: every operator is between DequantizeLinear and QuantizeLinear.

Style "qdq" is written for ONNX Runtime's bits: operators that only move codes (Transpose, Reshape, MaxPool) read codes,
clamps follow QuantizeLinear, biases are int32. Compilers for other devices recognise an 8-bit operator only if its
inputs and outputs are floats. This module rewrites such a model:

- an operator on codes gets a DequantizeLinear before it and a QuantizeLinear after it, with the grid of its codes;
- a Clip of codes becomes Relu or Clip of the floats in front of QuantizeLinear: the same codes, since rounding
  preserves the order and every bound is the value of a code;
- weights of uint8 with the zero point 128 become int8 with the zero point 0;
- a bias becomes float32, or stays int32 for devices that need codes.

The codes of every tensor are still those of the graph wherever the operators are computed exactly and rounded as in
ONNX Runtime's kernels. The device decides how it rounds.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax.export.onnx_ops import METADATA
from qjax.support.names import Names

_OPSET, _IR = 21, 10
"""The opset of the written file: the oldest with codes of 16 bits in QuantizeLinear."""


def portable(model: onnx.ModelProto, *, float_bias: bool) -> onnx.ModelProto:
    """The rewritten model. float_bias: whether biases become float32."""
    work = _Rewrite(model, float_bias)
    work.run()
    return work.model


class _Rewrite:
    def __init__(self, model: onnx.ModelProto, float_bias: bool) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.float_bias = float_bias
        graph = self.model.graph
        self.data = {proto.name: proto for proto in graph.initializer}
        used = (name for node in graph.node for name in (*node.input, *node.output))
        self.names = Names((*used, *self.data))
        self.grids: dict[str, list[str]] = {}
        for node in graph.node:
            if node.op_type == "QuantizeLinear":
                self.grids[node.output[0]] = list(node.input[1:])
            elif node.op_type == "DequantizeLinear" and node.input[0] not in self.data:
                self.grids.setdefault(node.input[0], list(node.input[1:]))

    def run(self) -> None:
        graph = self.model.graph
        self._propagate_grids()
        nodes: list[onnx.NodeProto] = []
        quantizers: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            codes = node.input[0] if node.input else ""
            if node.op_type == "DequantizeLinear" and codes in self.data:
                made = self._constant(node)
                nodes += [] if made is None else [made]
            elif node.op_type == "Clip" and codes in quantizers and node.domain == "":
                self._clamp(node, quantizers[codes], nodes)
                quantizers[node.output[0]] = quantizers.pop(codes)
            elif node.op_type not in ("QuantizeLinear", "DequantizeLinear") and codes in self.grids and not node.domain:
                nodes += self._lifted(node)
            else:
                nodes.append(node)
                if node.op_type == "QuantizeLinear":
                    quantizers[node.output[0]] = node
        del graph.node[:]
        graph.node.extend(nodes)
        self._finish()

    def _propagate_grids(self) -> None:
        """Propagate the grids of codes that are moved, forwards and backwards."""
        nodes = [n for n in self.model.graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear")]
        for _ in range(2):
            for node in (*nodes, *reversed(nodes)):
                if node.domain or not node.input:
                    continue
                source, made = node.input[0], node.output[0]
                if source in self.grids and source not in self.data and self._moves(node):
                    self.grids.setdefault(made, self.grids[source])
                elif made in self.grids and self._moves(node) and source not in self.data:
                    self.grids.setdefault(source, self.grids[made])

    def _moves(self, node: onnx.NodeProto) -> bool:
        maker = self._maker(node.input[0])
        return maker is None or maker.op_type != "DequantizeLinear"

    def _maker(self, name: str) -> onnx.NodeProto | None:
        return next((node for node in self.model.graph.node if name in node.output), None)

    def _constant(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """A DequantizeLinear of a constant, a bias or weights."""
        proto = self.data[node.input[0]]
        codes = numpy_helper.to_array(proto)
        if proto.data_type == onnx.TensorProto.INT32:
            if self.float_bias:
                scale = numpy_helper.to_array(self.data[node.input[1]])
                self._store(node.output[0], (codes.astype(np.float64) * scale).astype(np.float32))
                return None
            return node
        if proto.data_type == onnx.TensorProto.UINT8 and len(node.input) > 2:
            zero = numpy_helper.to_array(self.data[node.input[2]])
            if np.all(zero == 128):
                signed = (codes.astype(np.int16) - 128).astype(np.int8)
                node.input[0] = self._store(self.names.fresh(f"{node.input[0]}/signed"), signed)
                node.input[2] = self._store(self.names.fresh(f"{node.input[2]}/signed"), np.zeros(zero.shape, np.int8))
        return node

    def _clamp(self, clip: onnx.NodeProto, quantizer: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> None:
        """Turn bounds of codes into bounds of the floats in front of their QuantizeLinear."""
        scale = float(numpy_helper.to_array(self.data[quantizer.input[1]]))
        proto = self.data[quantizer.input[2]]
        zero = int(numpy_helper.to_array(proto))
        info = np.iinfo(numpy_helper.to_array(proto).dtype)
        low, high = (int(numpy_helper.to_array(self.data[name])) for name in clip.input[1:3])
        floats = self.names.fresh(f"{clip.output[0]}/clamped")
        at = nodes.index(quantizer)
        if (low, high) == (zero, info.max):
            made = helper.make_node("Relu", [quantizer.input[0]], [floats], f"{clip.output[0]}/relu")
        else:
            bounds = [np.float32((code - zero) * scale) for code in (low, high)]
            kept = [self._store(self.names.fresh(f"{clip.output[0]}/bound"), value) for value in bounds]
            made = helper.make_node("Clip", [quantizer.input[0], *kept], [floats], f"{clip.output[0]}/clip")
        nodes.insert(at, made)
        quantizer.input[0] = floats
        quantizer.output[0] = clip.output[0]

    def _lifted(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """An operator on codes, rewritten as one on floats."""
        found: list[onnx.NodeProto] = []
        for index, name in enumerate(node.input):
            if name not in self.grids or name in self.data:
                continue
            floats = self.names.fresh(f"{name}/float")
            found.append(helper.make_node("DequantizeLinear", [name, *self.grids[name]], [floats]))
            node.input[index] = floats
        found.append(node)
        for index, name in enumerate(node.output):
            grid = self.grids.get(name, self.grids.get(next(iter(node.input), ""), []))
            if not grid:
                continue
            floats = self.names.fresh(f"{name}/float")
            found.append(helper.make_node("QuantizeLinear", [floats, *grid], [name]))
            node.output[index] = floats
        return found

    def _finish(self) -> None:
        graph = self.model.graph
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        del graph.initializer[:]
        graph.initializer.extend(proto for name, proto in self.data.items() if name in used)
        # shapes and types of tensors that do not exist any more
        del graph.value_info[:]
        kept = [entry for entry in self.model.metadata_props if entry.key != METADATA]
        del self.model.metadata_props[:]
        self.model.metadata_props.extend(kept)
        self.model.doc_string = "qjax: a quantized model for runtimes that read DequantizeLinear and QuantizeLinear."
        for held in (self.model, *self.model.functions):
            for entry in held.opset_import:
                if entry.domain in ("", "ai.onnx"):
                    entry.version = _OPSET
        self.model.ir_version = _IR
        onnx.checker.check_model(self.model)

    def _store(self, name: str, value: Any) -> str:
        self.data[name] = numpy_helper.from_array(np.asarray(value), name)
        self.names.add(name)
        return name
