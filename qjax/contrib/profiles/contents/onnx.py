"""The operators of an ONNX file, for `qjax.profiles`.

In a group DequantizeLinear, float operator, QuantizeLinear only the float operator is listed; its tensors are the
codes before and after the group. A Relu or Clip between it and QuantizeLinear is listed too, on the same codes.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qjax.contrib.profiles import Operator, Tensor
from qjax.export.read_errors import ReadError

_WEIGHTS = {"Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "MatMul": (1, None)}
_FUSED = ("Relu", "Clip", "LeakyRelu")
_CODES = ("int8", "uint8", "int16", "uint16", "int4", "uint4")
_FIRST_ONLY = (
    "Reshape",
    "Transpose",
    "Slice",
    "Pad",
    "Expand",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Clip",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceSum",
    "Tile",
    "TopK",
    "Gather",
)
"""Operators whose inputs other than the first are parameters: shapes, axes, bounds, indices."""

Places = Mapping[str, tuple[str, str | None]]
"""Name of a node or a tensor -> the node of the graph and the user's line."""


def operators_of(model: onnx.ModelProto, places: Places | None = None) -> list[Operator]:
    """The operators in execution order. places: those of the graph from which the file was made."""
    return _Walk(model, places or {}).run()


def operators_of_bytes(data: bytes) -> list[Operator]:
    """The operators in execution order, from a file's bytes.

    Raises:
      ReadError: the file is no ONNX model.
    """
    try:
        model = onnx.load_from_string(data)
        onnx.checker.check_model(model)
    except Exception as error:
        # protobuf and the checker raise their own exception classes.
        raise ReadError(f"damaged .onnx file: {str(error).splitlines()[0] if str(error) else error!r}.") from error
    return operators_of(model)


class _Walk:
    def __init__(self, model: onnx.ModelProto, places: Places) -> None:
        # If shapes cannot be inferred, they remain unknown, and rules about shapes do not apply.
        with contextlib.suppress(RuntimeError, ValueError):
            model = onnx.shape_inference.infer_shapes(model)
        self.graph, self.places = model.graph, places
        self.data = {proto.name: proto for proto in model.graph.initializer}
        self.maker = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
        self.infos = {value.name: value.type.tensor_type for value in values}
        self.grids: dict[str, tuple[str, str, Any]] = {}
        for node in model.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                codes = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
                self.grids.setdefault(codes, (node.input[1], node.input[2] if len(node.input) > 2 else "", node))

    def run(self) -> list[Operator]:
        found: list[Operator] = []
        for node in self.graph.node:
            if node.op_type == "DequantizeLinear" and not self._ends(node):
                continue
            if node.op_type == "QuantizeLinear" and not self._begins(node):
                continue
            if node.op_type == "Cast" and node.input[0] in self.data:
                continue
            found.append(self._operator(node))
        return found

    def _begins(self, node: onnx.NodeProto) -> bool:
        """Whether a QuantizeLinear quantizes floats that no operator computed, or changes a grid."""
        maker = self.maker.get(node.input[0])
        return node.input[0] not in self.data and (maker is None or maker.op_type == "DequantizeLinear")

    def _ends(self, node: onnx.NodeProto) -> bool:
        """Whether a DequantizeLinear makes an output of the model."""
        return any(value.name == node.output[0] for value in self.graph.output)

    def _operator(self, node: onnx.NodeProto) -> Operator:
        name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}:{node.op_type}"
        attributes = {
            a.name: helper.get_attribute_value(a) for a in node.attribute if a.type != onnx.AttributeProto.GRAPH
        }
        title, location = self._place(node)
        if name == "QuantizeLinear":
            source = self.maker.get(node.input[0])
            inputs = () if source is None else (self.tensor(source.input[0]),)
            return Operator(name, title, inputs, (self.tensor(node.output[0]),), attributes, location)
        if name == "DequantizeLinear":
            return Operator(name, title, (self.tensor(node.input[0]),), (), attributes, location)
        used = node.input[:1] if name in _FIRST_ONLY else node.input
        inputs = tuple(self.behind(given) if given else None for given in used)
        outputs = tuple(self.ahead(made) for made in node.output if made)
        weight, bias = _WEIGHTS.get(name, (None, None))
        if weight is not None and (len(inputs) <= weight or inputs[weight] is None or not inputs[weight].constant):  # pyright: ignore[reportOptionalMemberAccess]
            weight, bias = (None, None) if name == "MatMul" else (weight, bias)
        on_codes = any(self.dtype(given) in _CODES for given in used if given)
        return Operator(name, title, inputs, outputs, attributes, location, weight, bias, on_codes)

    def _place(self, node: onnx.NodeProto) -> tuple[str, str | None]:
        for name in (node.name, *node.output):
            while name:
                if name in self.places:
                    return self.places[name]
                name = name.rpartition("/")[0]
        return node.name or node.op_type, None

    def behind(self, name: str) -> Tensor:
        """What an operator reads: the codes before a DequantizeLinear, or what a fused operator passes on."""
        node = self.maker.get(name)
        if node is None:
            return self.tensor(name)
        if node.op_type == "DequantizeLinear":
            codes = self.tensor(node.input[0], node)
            return dataclasses.replace(codes, shape=self.shape(name) or codes.shape)
        if node.op_type == "Cast" and node.input[0] in self.data:
            return self.tensor(name)
        return self.ahead(name)

    def ahead(self, name: str) -> Tensor:
        """What an operator writes: the codes that a QuantizeLinear makes of it, after Relu and Clip."""
        shape = self.shape(name)
        current = name
        for _ in range(4):
            readers = self.readers.get(current, [])
            quantizers = [node for node in readers if node.op_type == "QuantizeLinear" and node.input[0] == current]
            if readers and len(quantizers) == len(readers):
                return dataclasses.replace(self.tensor(quantizers[0].output[0]), shape=shape)
            if len(readers) == 1 and readers[0].op_type in _FUSED:
                current = readers[0].output[0]
                continue
            break
        return self.tensor(name)

    def tensor(self, name: str, quantizer: onnx.NodeProto | None = None) -> Tensor:
        """A tensor under its own name; quantizer: the one whose scales are used."""
        scale, zero, axis, blocks = self._grid(name, quantizer)
        return Tensor(name, self.shape(name), self.dtype(name), scale, zero, axis, blocks, self._value(name))

    def _value(self, name: str) -> Any:
        node = self.maker.get(name)
        if node is not None and node.op_type == "Cast":
            return self._value(node.input[0])
        if name not in self.data:
            return None
        proto = self.data[name]
        return lambda: np.asarray(numpy_helper.to_array(proto)).astype(np.int64)

    def _grid(self, name: str, quantizer: onnx.NodeProto | None) -> tuple[Any, Any, int | None, bool]:
        if quantizer is not None:
            given = (quantizer.input[1], quantizer.input[2] if len(quantizer.input) > 2 else "", quantizer)
        elif name in self.grids:
            given = self.grids[name]
        else:
            return None, None, None, False
        scale = self._array(given[0])
        if scale is None:
            return None, None, None, False
        zero = self._array(given[1]) if given[1] else np.zeros(scale.shape, np.int64)
        attributes = {a.name: helper.get_attribute_value(a) for a in given[2].attribute}
        axis = int(attributes.get("axis", 1)) if scale.size > 1 else None
        if axis is not None and axis < 0:
            axis += len(self.shape(name))
        blocked = bool(attributes.get("block_size", 0))
        return scale.astype(np.float32), None if zero is None else zero.astype(np.int64), axis, blocked

    def _array(self, name: str) -> Any:
        return numpy_helper.to_array(self.data[name]) if name in self.data else None

    def dtype(self, name: str) -> str:
        """The dtype's name; for constants after a Cast, that of the stored constant."""
        node = self.maker.get(name)
        if node is not None and node.op_type == "Cast" and node.input[0] in self.data:
            return self.dtype(node.input[0])
        if name in self.data:
            number = self.data[name].data_type
        elif name in self.infos:
            number = self.infos[name].elem_type
        elif node is not None and node.op_type == "QuantizeLinear":
            number = self.data[node.input[2]].data_type if len(node.input) > 2 and node.input[2] in self.data else 2
        else:
            return "unknown"
        return onnx.TensorProto.DataType.Name(number).lower() if number != onnx.TensorProto.FLOAT else "float32"

    def shape(self, name: str) -> tuple[int | None, ...]:
        """The sizes, None if they are free or not known."""
        if name in self.data:
            return tuple(self.data[name].dims)
        info = self.infos.get(name)
        if info is None or not info.HasField("shape"):
            return ()
        return tuple(d.dim_value if d.HasField("dim_value") else None for d in info.shape.dim)
