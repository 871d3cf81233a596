"""A QDQ model as the PyTorch module that ExecuTorch's quantizer would produce: the same tensors with the same codes.

The model is what `graph.emit("onnx", style="qdq", portable="floats")` writes: operators of float32 between
DequantizeLinear and QuantizeLinear. Each becomes one of PyTorch. QuantizeLinear and DequantizeLinear become
`quantized_decomposed.quantize_per_tensor` and `dequantize_per_tensor`, which ExecuTorch's partitioner recognises.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.support.errors import Unsupported

_INT8 = (-128, 127)
_INT32 = (-(2**31), 2**31 - 1)
_CURE = 'Recipe(profile="executorch_xnnpack") checks what the delegate supports'

Arrays = Mapping[str, np.ndarray]


def module_of(model: Any) -> Any:
    """The module; its arguments and results are those of the model, an `onnx.ModelProto`.

    Raises:
      Unsupported: an operator, codes or a bias that ExecuTorch's XNNPACK delegate does not support.
    """
    torch, onnx = importlib.import_module("torch"), importlib.import_module("onnx")
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [_Node(node, onnx.helper.get_attribute_value) for node in model.graph.node]
    for node in nodes:
        if node.op not in _OPERATORS:
            raise Unsupported(f"ExecuTorch: {node.op} has no form in a module of this runtime", _CURE, what=node.name)
    weights = {node.output for node in nodes if node.op == "DequantizeLinear" and node.inputs[0] in held}
    inputs, outputs = [x.name for x in model.graph.input], [y.name for y in model.graph.output]

    class Model(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        """The nodes in order; weights and float biases are parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict()
            for index, node in enumerate(nodes):
                weight = _weight(node, nodes, held)
                if weight is not None:
                    self.layers[str(index)] = _layer(torch, node, *weight)

        def forward(self, *given: Any) -> Any:
            """Compute the outputs of the model."""
            values = dict(zip(inputs, given, strict=True))
            dequantized = {node.output: node for node in nodes if node.op == "DequantizeLinear"}

            def read(name: str) -> Any:
                # The partitioner needs a separate dequantize_per_tensor for each reader, because a shared one leads to
                # cycles.
                node = dequantized.get(name)
                if node is not None and node.inputs[0] in held:
                    raise Unsupported(
                        "ExecuTorch: an operator that combines a constant with an activation", _CURE, what=node.name
                    )
                return values[name] if node is None else _dequantize(torch, node, [values[node.inputs[0]]], held, None)

            layers = dict(self.layers.items())
            for index, node in enumerate(nodes):
                if node.op == "DequantizeLinear":
                    continue
                layer = layers.get(str(index))
                x = [
                    read(name)
                    for name in node.inputs
                    if name not in held and not (layer is not None and name in weights)
                ]
                values[node.output] = _OPERATORS[node.op](torch, node, x, held, layer)
            return tuple(read(name) for name in outputs)

    return Model().eval()


class _Node:
    """A node of the model: op, name, inputs, output, attributes."""

    def __init__(self, node: Any, value: Callable[[Any], Any]) -> None:
        self.op, self.name, self.inputs, self.output = node.op_type, node.name, list(node.input), node.output[0]
        self.attributes = {attribute.name: value(attribute) for attribute in node.attribute}


def _weight(node: _Node, nodes: Sequence[_Node], held: Arrays) -> tuple[np.ndarray, np.ndarray, Any, Any] | None:
    """For a product with a weight: codes (output channels first), scale, float bias or None, the input's scale."""
    if node.op not in ("Conv", "Gemm", "MatMul"):
        return None
    made = {other.output: other for other in nodes}
    second = made.get(node.inputs[1])
    if second is None or second.op != "DequantizeLinear" or second.inputs[0] not in held:
        return None
    codes, scale, zero_point = (held[name] for name in second.inputs)
    if codes.dtype != np.int8 or np.any(zero_point):
        raise Unsupported(
            f"ExecuTorch: expected int8 weights with the zero point 0, got {codes.dtype}", _CURE, what=node.name
        )
    if node.op != "Conv" and not node.attributes.get("transB"):
        codes = codes.T
    bias = held[node.inputs[2]] if len(node.inputs) > 2 else None
    return np.ascontiguousarray(codes), scale, bias, held[made[node.inputs[0]].inputs[1]]


def _layer(torch: Any, node: _Node, codes: np.ndarray, scale: np.ndarray, bias: Any, s_x: np.ndarray) -> Any:
    """The parameters of a product.

    Raises:
      Unsupported: ExecuTorch, which quantizes the float bias at s_x * s_w, would store another int32 than the graph.
    """
    layer = torch.nn.Module()
    frozen = torch.nn.Parameter
    layer.weight = frozen(torch.from_numpy(codes), requires_grad=False)
    layer.bias = None if bias is None else frozen(torch.from_numpy(bias.copy()), requires_grad=False)
    layer.scale = float(scale) if scale.size == 1 and scale.ndim == 0 else None
    if layer.scale is None:
        layer.register_buffer("scales", torch.from_numpy(scale.copy()))
        layer.register_buffer("zero_points", torch.zeros(scale.size, dtype=torch.int64))
    if bias is not None:
        share = 1 / (layer.scale * float(s_x)) if layer.scale is not None else np.float32(1) / (scale * s_x)
        stored = np.rint(bias * np.float32(share))
        exact = np.rint(bias.astype(np.float64) / (scale.astype(np.float64) * np.float64(s_x)))
        if not np.array_equal(stored.astype(np.float64), exact):
            raise Unsupported(
                f"ExecuTorch: float32 cannot represent a bias of {int(np.max(np.abs(exact)))} steps of its accumulator",
                "Give the layer a wider input or weight range, so that the steps are larger",
                what=node.name,
            )
    return layer


def _dequantized(torch: Any, layer: Any) -> Any:
    operators = torch.ops.quantized_decomposed
    if layer.scale is not None:
        return operators.dequantize_per_tensor(layer.weight, layer.scale, 0, -127, 127, torch.int8)
    return operators.dequantize_per_channel(layer.weight, layer.scales, layer.zero_points, 0, -127, 127, torch.int8)


def _grid(torch: Any, node: _Node, held: Arrays) -> tuple[Any, ...]:
    scale, zero_point = (held[name] for name in node.inputs[1:])
    if zero_point.dtype != np.int8 or scale.ndim:
        raise Unsupported(
            f"ExecuTorch: expected int8 tensors with one scale, got {zero_point.dtype}", _CURE, what=node.name
        )
    return float(scale), int(zero_point), *_INT8, torch.int8


def _quantize(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    return torch.ops.quantized_decomposed.quantize_per_tensor(x[0], *_grid(torch, node, held))


def _dequantize(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    return torch.ops.quantized_decomposed.dequantize_per_tensor(x[0], *_grid(torch, node, held))


def _alike(node: _Node) -> list[int]:
    """Padding of height and width that is equal on both sides."""
    pads = list(node.attributes.get("pads", [0, 0, 0, 0]))
    if len(pads) != 4 or pads[:2] != pads[2:]:
        raise Unsupported(f"ExecuTorch: expected equal padding on both sides of images, got {pads}", what=node.name)
    return pads[:2]


def _conv(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    if layer is None:
        raise Unsupported("ExecuTorch: expected a constant kernel", _CURE, what=node.name)
    a = node.attributes
    known = (a["strides"], _alike(node), a["dilations"], a["group"])
    return torch.nn.functional.conv2d(x[0], _dequantized(torch, layer), layer.bias, *known)


def _product(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    if layer is None:
        raise Unsupported("ExecuTorch: a product of two activations runs in float32", _CURE, what=node.name)
    return torch.nn.functional.linear(x[0], _dequantized(torch, layer), layer.bias)


def _max_pool(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    a = node.attributes
    return torch.nn.functional.max_pool2d(
        x[0], a["kernel_shape"], a["strides"], _alike(node), a.get("dilations", [1, 1])
    )


def _clip(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    low, high = (float(held[name]) if name else None for name in (*node.inputs[1:], "", "")[:2])
    return torch.clamp(x[0], low, high)


def _mean(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    axes = node.attributes.get("axes") or held[node.inputs[1]].tolist()
    if x[0].dim() != 4 or sorted(axes) != [2, 3]:
        raise Unsupported(f"ExecuTorch: a mean over the axes {axes} of NCHW runs in float32", _CURE, what=node.name)
    return torch.mean(x[0], axes, keepdim=bool(node.attributes.get("keepdims", 1)))


def _of_shape(torch: Any, node: _Node, x: list[Any], held: Arrays, layer: Any) -> Any:
    return torch.reshape(x[0], held[node.inputs[1]].tolist())


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda torch, node, x, held, layer: torch.add(*x),
    "Clip": _clip,
    "Concat": lambda torch, node, x, held, layer: torch.cat(x, node.attributes["axis"]),
    "Conv": _conv,
    "DequantizeLinear": _dequantize,
    "Gemm": _product,
    "GlobalAveragePool": lambda torch, node, x, held, layer: torch.mean(x[0], (2, 3), True),
    "MatMul": _product,
    "MaxPool": _max_pool,
    "Mul": lambda torch, node, x, held, layer: torch.mul(*x),
    "QuantizeLinear": _quantize,
    "ReduceMean": _mean,
    "Relu": lambda torch, node, x, held, layer: torch.relu(x[0]),
    "Reshape": _of_shape,
    "Transpose": lambda torch, node, x, held, layer: torch.permute(x[0], node.attributes["perm"]),
}
"""By the operator of ONNX: (torch, node, inputs that are no constants, initializers, layer or None) -> the output."""
