"""The float32 networks as ONNX models, channels first: what the artifacts' run times are divided by.

Written with operators that ONNX Runtime knows best (Conv, BatchNormalization, Gemm), so that its optimizer folds and
fuses them as it does an exporter's model.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from flax import nnx
from onnx import helper, numpy_helper

from benchmarks.networks import Depthwise
from experiments.models import MLP, ResidualBlock, ResNet

OPSET, IR_VERSION = 21, 10


class Writer:
    """One model under construction; every method returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, value: Any) -> str:
        name = f"constant{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name))
        return name

    def integers(self, *values: int) -> str:
        """A shape."""
        name = f"constant{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def conv(self, x: str, layer: nnx.Conv) -> str:
        """A channels-last layer of Flax with padding "SAME", channels first."""
        if layer.padding != "SAME":
            raise ValueError(f"float_onnx: expected a convolution with padding SAME, got {layer.padding!r}.")
        kernel = np.asarray(layer.kernel[...])
        bias = [] if layer.bias is None else [self.constant(layer.bias[...])]
        steps = np.broadcast_to(np.asarray(1 if layer.strides is None else layer.strides), kernel.ndim - 2)
        return self.add(
            "Conv",
            x,
            self.constant(kernel.transpose(3, 2, 0, 1)),
            *bias,
            kernel_shape=kernel.shape[:2],
            strides=[int(n) for n in steps],
            group=layer.feature_group_count,
            auto_pad="SAME_UPPER",
        )

    def norm(self, x: str, layer: nnx.BatchNorm) -> str:
        assert layer.scale is not None
        assert layer.bias is not None
        values = (layer.scale, layer.bias, layer.mean, layer.var)
        return self.add("BatchNormalization", x, *(self.constant(v[...]) for v in values), epsilon=layer.epsilon)

    def linear(self, x: str, layer: nnx.Linear, image: tuple[int, int] | None = None) -> str:
        """image: height and width, where x is an image that Flax would flatten with its channels last."""
        kernel = np.asarray(layer.kernel[...])
        if image is not None:
            kernel = kernel.reshape(*image, -1, kernel.shape[1]).transpose(2, 0, 1, 3).reshape(kernel.shape)
        assert layer.bias is not None
        return self.add("Gemm", self.add("Flatten", x), self.constant(kernel), self.constant(layer.bias[...]))

    def relu(self, x: str) -> str:
        return self.add("Relu", x)


def _block(w: Writer, x: str, block: ResidualBlock) -> str:
    y = w.relu(w.norm(w.conv(x, block.conv1), block.norm1))
    y = w.norm(w.conv(y, block.conv2), block.norm2)
    return w.relu(w.add("Add", y, x if block.shortcut is None else w.conv(x, block.shortcut)))


def _resnet(w: Writer, x: str, model: ResNet) -> str:
    x = w.relu(w.norm(w.conv(x, model.stem), model.norm))
    x = _block(w, _block(w, x, model.block1), model.block2)
    return w.linear(w.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), model.head, (2, 2))


def _depthwise(w: Writer, x: str, model: Depthwise) -> str:
    for layer, norm in zip(model.convolutions, model.norms, strict=True):
        x = w.relu(w.norm(w.conv(x, layer), norm))
    return w.linear(w.add("GlobalAveragePool", x), model.head)


def _mlp(w: Writer, x: str, model: MLP) -> str:
    for layer in model.layers:
        x = w.relu(w.linear(x, layer))
    return w.linear(x, model.head)


_BODIES: dict[type, Callable[[Writer, str, Any], str]] = {ResNet: _resnet, Depthwise: _depthwise, MLP: _mlp}


def model_of(model: Any) -> onnx.ModelProto:
    """float32 [batch, 1, 8, 8] -> float32 [batch, 10]."""
    writer = Writer()
    result = _BODIES[type(model)](writer, "x", model)
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", ["batch", 1, 8, 8]), (result, ["batch", 10]))
    ]
    graph = helper.make_graph(writer.nodes, "float32", ports[:1], ports[1:], writer.initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(made, full_check=True)
    return made
