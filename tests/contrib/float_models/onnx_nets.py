"""Small float models, as PyTorch exports them: names with dots, channels on axis 1."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """An ONNX graph under construction."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def weight(self, name: str, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        return self.constant(name, self.rng.uniform(low, high, shape).astype(np.float32))

    def constant(self, name: str, value: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, *inputs: str, out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"/{out}/{op}", **attributes))
        return out

    def model(self, inputs: dict[str, Any], outputs: list[str], opset: int = 17) -> onnx.ModelProto:
        """inputs: name -> (type, dims)."""
        ports = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
        found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", ports, found, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def cnn(batch: Any = "batch") -> onnx.ModelProto:
    """A convolution with a batch norm, a depthwise one in a residual block, a chain of shapes, a dense layer."""
    n = Net()
    n.node("Conv", "x", n.weight("stem.conv.weight", 8, 3, 3, 3), out="a", pads=[1, 1, 1, 1], strides=[2, 2])
    n.node(
        "BatchNormalization", "a", n.weight("stem.bn.weight", 8, low=0.5, high=1.5), n.weight("stem.bn.bias", 8),
        n.weight("stem.bn.running_mean", 8), n.weight("stem.bn.running_var", 8, low=0.5, high=1.5), out="b",
    )  # fmt: skip
    n.node("Relu", "b", out="c")
    n.node(
        "Conv", "c", n.weight("block.0.weight", 8, 1, 3, 3), n.weight("block.0.bias", 8), out="d",
        pads=[1, 1, 1, 1], group=8,
    )  # fmt: skip
    n.node("Add", "c", "d", out="e")
    n.node("MaxPool", "e", out="f", kernel_shape=[2, 2], strides=[2, 2])
    n.node("Shape", "f", out="s")
    n.node("Gather", "s", n.constant("zero", np.array(0)), out="s0", axis=0)
    n.node("Unsqueeze", "s0", n.constant("axes", np.array([0])), out="s1")
    n.node("Concat", "s1", n.constant("rest", np.array([-1])), out="s2", axis=0)
    n.node("Reshape", "f", "s2", out="g")
    n.node("Gemm", "g", n.weight("fc.weight", 10, 32), n.weight("fc.bias", 10), out="scores", transB=1)
    return n.model({"x": (TensorProto.FLOAT, [batch, 3, 8, 8])}, ["scores"])


def attention(batch: Any) -> onnx.ModelProto:
    """A class token, and two heads that are a part of a merged axis, as exports with a fixed batch have them."""
    n = Net(1)
    one = batch if isinstance(batch, int) else 1
    n.node("Concat", n.weight("token", one, 1, 8), "x", out="a", axis=1)
    n.node("MatMul", "a", n.weight("q", 8, 8), out="b")
    n.node("Reshape", "b", n.constant("heads", np.array([one, 5, 2, 4])), out="c")
    n.node("Transpose", "c", out="d", perm=[0, 2, 1, 3])
    n.node("Transpose", "c", out="e", perm=[0, 2, 3, 1])
    n.node("MatMul", "d", "e", out="f")
    n.node("Softmax", "f", out="g", axis=-1)
    n.node("MatMul", "g", "d", out="h")
    n.node("Transpose", "h", out="i", perm=[0, 2, 1, 3])
    n.node("Reshape", "i", n.constant("back", np.array([one, 5, 8])), out="j")
    n.node("Add", "a", "j", out="k")
    n.node("ReduceMean", "k", out="y", axes=[1], keepdims=0)
    return n.model({"x": (TensorProto.FLOAT, [batch, 4, 8])}, ["y", "j"])
