"""What ONNX Runtime refuses to load by the schemas of ONNX, the reader refuses too: the runtime here is the oracle."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from qjax.contrib.importers.onnx import read
from qjax.export.read_errors import ReadError


def model() -> onnx.ModelProto:
    """A convolution between quantizers, and a reshape."""
    constants = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "w": np.ones((3, 2, 1, 1), np.int8),
        "ws": np.full(3, 0.1, np.float32),
        "shape": np.array([0, 48], np.int64),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], axis=0),
        helper.make_node("Conv", ["d", "wd"], ["c"], kernel_shape=[1, 1]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        helper.make_node("Reshape", ["cq", "shape"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 48])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def loads(proto: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime takes the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


def node(proto: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.op_type == op)


def with_attribute(op: str, **attributes) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        node(proto, op).attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())

    return change


def with_constant(name: str, value) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        held = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
        held.CopyFrom(numpy_helper.from_array(np.asarray(value), name))

    return change


CHANGES = {
    "a foreign attribute": (with_attribute("Conv", foo=3), "ONNX has no attribute 'foo' here"),
    "an attribute of another opset": (with_attribute("Reshape", shape=[1]), "The operator's attributes: allowzero"),
    "an attribute of another kind": (with_attribute("Conv", group=1.0), "'group' to be of the kind INT"),
    "an attribute twice": (with_attribute("Conv", kernel_shape=[1, 1]), "every attribute once"),
    "a scale of integers": (with_constant("s", np.int32(1)), "ONNX wants one type for both"),
    "a scale of doubles": (with_constant("s", np.float64(0.1)), r"'s' is of tensor\(double\), but ONNX takes"),
    "a zero point of int64": (with_constant("z", np.int64(0)), r"'z' is of tensor\(int64\), but ONNX takes"),
    "weights of int64": (with_constant("w", np.ones((3, 2, 1, 1), np.int64)), r"'w' is of tensor\(int64\)"),
    "a shape of int32": (with_constant("shape", np.array([0, 48], np.int32)), r"takes tensor\(int64\) here"),
    "an input too few": (lambda m: node(m, "Conv").input.pop(), "expected 2 to 3 inputs, got 1"),
    "inputs too many": (lambda m: node(m, "Reshape").input.append("s"), "expected 2 to 2 inputs, got 3"),
    "an empty input": (lambda m: node(m, "Conv").input.__setitem__(1, ""), "its input 'W' is missing"),
    "an output too many": (lambda m: node(m, "Conv").output.append("c2"), "expected 1 to 1 outputs, got 2"),
    "a domain without an opset": (
        lambda m: setattr(node(m, "Reshape"), "domain", "my.own"),
        "has operators of the domain 'my.own', but imports no opset",
    ),
    "an operator of a later opset": (
        lambda m: setattr(m.opset_import[0], "version", 9),
        "no such operator in the opset 9",
    ),
    "an opset of the future": (lambda m: setattr(m.opset_import[0], "version", 999), "an opset of at most"),
    "a format of the future": (lambda m: setattr(m, "ir_version", 999), "an IR version of at most"),
    "an output of another type": (
        lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", TensorProto.INT8),
        r"declared as tensor\(int8\), but its operator returns tensor\(float\)",
    ),
}


def test_the_model_itself_is_taken() -> None:
    assert loads(model())
    assert len(read(model().SerializeToString()).nodes) == 2


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_runtime_refuses_is_refused(name: str) -> None:
    change, message = CHANGES[name]
    proto = model()
    change(proto)
    assert not loads(proto)
    with pytest.raises(ReadError, match=message):
        read(proto.SerializeToString())


@pytest.mark.exhaustive
def test_metadata_has_a_limit_of_values() -> None:
    from qjax.export import document

    text = document.packed([0] * 4_000_001)
    assert len(text) < 50_000
    with pytest.raises(ValueError, match="expected at most 4000000 JSON values"):
        document.uncompressed(text)
    proto = model()
    held = '{"style": "qdq", "version": 10, "document": "' + text + '"}'
    helper.set_model_props(proto, {"qjax": held})
    with pytest.raises(ReadError, match="expected at most 4000000 JSON values"):
        read(proto.SerializeToString())
