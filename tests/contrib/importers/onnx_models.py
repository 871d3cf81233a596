"""Float ONNX models, ONNX Runtime's own quantizer for them, and sessions whose bits do not depend on the CPU."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from qjax.contrib.importers.onnx import read
from qjax.export.integer_graph import IntegerGraph

onnxruntime.set_default_logger_severity(4)

OPSET, IR = 17, 9


class Maker:
    """Nodes and constants of a model under construction."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.constants = [], []

    def node(self, op, inputs, output, domain="", **attributes):
        outputs = [output] if isinstance(output, str) else output
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}", domain=domain, **attributes))
        return output

    def constant(self, name, value):
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, name, *shape):
        scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.2
        return self.constant(name, (self.rng.standard_normal(shape) * scale).astype(np.float32))

    def grid(self, name, scale, zero_point, dtype="uint8"):
        self.constant(f"{name}_s", np.asarray(scale, np.float32))
        return [f"{name}_s", self.constant(f"{name}_z", np.array(zero_point, dtype))]

    def quantize(self, x, name, scale, zero_point, dtype="uint8"):
        """x -> codes `name`."""
        return self.node("QuantizeLinear", [x, *self.grid(name, scale, zero_point, dtype)], name)

    def dequantize(self, x, name, scale, zero_point, dtype="uint8", **attributes):
        return self.node("DequantizeLinear", [x, *self.grid(name, scale, zero_point, dtype)], name, **attributes)

    def through(self, x, name, scale, zero_point, dtype="uint8"):
        """x -> codes `name_q` -> reals `name`."""
        self.quantize(x, f"{name}_q", scale, zero_point, dtype)
        return self.dequantize(f"{name}_q", name, scale, zero_point, dtype)

    def codes(
        self, name, shape, dtype="int8", scale: Any = 0.01, zero_point: Any = 0, low=None, high=None, **attributes
    ):
        """Constant codes `name_codes` -> reals `name`."""
        info = np.iinfo(dtype)
        low, high = max(info.min, -127) if low is None else low, info.max if high is None else high
        codes = self.rng.integers(low, high + 1, shape).astype(dtype)
        self.constant(f"{name}_codes", codes)
        return self.dequantize(f"{name}_codes", name, scale, zero_point, dtype, **attributes)

    def model(self, inputs, outputs, opset=OPSET, kind=TensorProto.FLOAT, functions=(), out_kind=None):
        infos = [helper.make_tensor_value_info(n, kind, s) for n, s in inputs.items()]
        outs = [helper.make_tensor_value_info(n, out_kind or kind, s) for n, s in outputs.items()]
        graph = helper.make_graph(self.nodes, "g", infos, outs, self.constants)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR, functions=list(functions))


def mlp(seed=0):
    m = Maker(seed)
    m.node("Gemm", ["x", m.weight("w0", 12, 20), m.weight("b0", 20)], "g0")
    m.node("Relu", ["g0"], "r0")
    m.node("MatMul", ["r0", m.weight("w1", 20, 16)], "m1")
    m.node("Add", ["m1", m.weight("b1", 16)], "a1")
    m.node("Relu", ["a1"], "r1")
    m.node("Gemm", ["r1", m.weight("w2", 10, 16), m.weight("b2", 10)], "y", transB=1)
    return m.model({"x": ["batch", 12]}, {"y": ["batch", 10]}), (12,)


def cnn(seed=0):
    m = Maker(seed)
    m.node("Conv", ["x", m.weight("w0", 8, 3, 3, 3), m.weight("b0", 8)], "c0", pads=[1, 1, 1, 1], strides=[2, 2])
    m.node("Relu", ["c0"], "r0")
    m.node("Conv", ["r0", m.weight("w1", 8, 1, 3, 3), m.weight("b1", 8)], "c1", pads=[1, 1, 1, 1], group=8)
    m.node("Clip", ["c1", m.constant("zero", np.float32(0)), m.constant("six", np.float32(6))], "r1")
    m.node("Conv", ["r1", m.weight("w2", 8, 8, 1, 1)], "c2")
    m.node("Add", ["c2", "r0"], "s0")
    m.node("MaxPool", ["s0"], "p0", kernel_shape=[2, 2], strides=[2, 2])
    m.node("AveragePool", ["s0"], "p1", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    m.node("Concat", ["p0", "p1"], "j", axis=1)
    m.node(
        "Conv",
        ["j", m.weight("w3", 12, 8, 3, 3), m.weight("b3", 12)],
        "c3",
        group=2,
        dilations=[2, 2],
        pads=[2, 2, 2, 2],
    )
    m.node("Mul", ["c3", "c3"], "q3")
    m.node("GlobalAveragePool", ["q3"], "gap")
    m.node("Flatten", ["gap"], "flat")
    m.node("Gemm", ["flat", m.weight("w4", 12, 10), m.weight("b4", 10)], "y")
    return m.model({"x": ["batch", 3, 16, 16]}, {"y": ["batch", 10], "q3": None}), (3, 16, 16)


class Reader(CalibrationDataReader):
    def __init__(self, shape, name="x"):
        rng = np.random.default_rng(1)
        self.feeds = iter([{name: rng.standard_normal((8, *shape)).astype(np.float32)} for _ in range(3)])

    def get_next(self):
        return next(self.feeds, None)


def quantized(model, shape, tmp_path, **options):
    """A model through ONNX Runtime's static quantization, as bytes."""
    source, path = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    onnx.save(model, source)
    quantize_static(source, path, Reader(shape), calibrate_method=CalibrationMethod.MinMax, **options)
    return path.read_bytes()


def session(data, config, *, optimized=True):
    """A session under the options that a graph's metadata lists."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def both(data, feeds, **options):
    """The outputs of the graph that is read and those of ONNX Runtime, and the graph."""
    graph = IntegerGraph(read(data, **options))
    expected = session(data, graph.ir.metadata.get("onnxruntime_session", {})).run(None, feeds)
    # in the order of the graph's inputs, which is that of the model's
    found = graph(*feeds.values())
    return list(found) if isinstance(found, tuple) else [found], expected, graph


def normal(*shape, seed=7, scale=1.5):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


FORMATS = {"qdq": QuantFormat.QDQ, "operators": QuantFormat.QOperator}
TYPES = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8, "uint16": QuantType.QUInt16, "int16": QuantType.QInt16}
