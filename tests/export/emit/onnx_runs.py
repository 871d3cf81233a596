"""Runs ONNX models as ONNX Runtime and as ONNX's own reference evaluator do."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

ort.set_default_logger_severity(3)

LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


def checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, after ONNX's checker and its strict shape inference had nothing to say."""
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    return model


def by_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The outputs without any optimisation, and with all."""
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        yield level.name, [np.asarray(value) for value in session.run(None, dict(feeds))]


def by_reference(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[np.ndarray]:
    """The outputs of onnx.reference.ReferenceEvaluator."""
    outputs: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    return [np.asarray(value) for value in outputs]


def differing(got: list[np.ndarray], want: list[np.ndarray]) -> int:
    """How many codes differ; outputs of another dtype or shape differ everywhere."""
    count = 0
    for a, b in zip(got, want, strict=True):
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        count += int(np.sum(a != b)) if same else max(a.size, b.size, 1)
    return count


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node: of the graph, of its functions, of their subgraphs."""
    pending: list[Any] = [model.graph, *model.functions]
    while pending:
        for node in pending.pop().node:
            yield node
            pending += [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def element_types(model: onnx.ModelProto) -> set[int]:
    """The element types of everything that is declared, stored or cast to."""
    tensors = list(model.graph.initializer)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    found: set[int] = set()
    for node in nodes_of(model):
        for attribute in node.attribute:
            assert not attribute.HasField("f"), f"{node.op_type} has a float attribute {attribute.name}"
            assert not attribute.floats, f"{node.op_type} has float attributes {attribute.name}"
            if attribute.HasField("t"):
                tensors.append(attribute.t)
            if attribute.HasField("g"):
                values += [*attribute.g.input, *attribute.g.output, *attribute.g.value_info]
                tensors += list(attribute.g.initializer)
            if node.op_type == "Cast" and attribute.name == "to":
                found.add(attribute.i)
    found |= {tensor.data_type for tensor in tensors}
    return found | {value.type.tensor_type.elem_type for value in values}
