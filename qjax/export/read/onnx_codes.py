"""Reads back what the ONNX emitter's styles "qdq" and "qoperator" wrote: the very graph.

The model's metadata under the key "qjax" holds the structure of the graph, its initializers hold the weights. Nothing
of this is believed: the graph is emitted again, and must be the file, bit for bit. If it is not, because another tool
changed the file or another version wrote it, the file is refused. `metadata=False` reads it as any other ONNX model, by
what its operators compute.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from qjax.export.check import check_integer
from qjax.export.emit.onnx import qdq, qoperator, tensors
from qjax.export.emit.onnx.codes import VERSION
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.read.errors import ReadError
from qjax.export.retarget import retarget
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.targets import Target

_STYLES = ("qdq", "qoperator")


def matches(model: onnx.ModelProto) -> bool:
    """Whether a model says of itself that one of the two styles wrote it."""
    try:
        facts = tensors.taken(model)
    except (ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and facts.get("style") in _STYLES  # pyright: ignore[reportUnknownMemberType]


_CURE = "Read it with metadata=False, which reads its operators alone."


def read(model: onnx.ModelProto, target: "str | Target | None" = None) -> Graph:
    """The graph that was written, under another target if one is given.

    Raises:
      ReadError: the file is not what qjax writes for the graph in its metadata.
    """
    try:
        facts = tensors.taken(model)
        if type(facts["version"]) is not int or not 1 <= facts["version"] <= VERSION:
            raise ReadError(f"the file's metadata is of version {facts['version']!r}, expected 1 to {VERSION}. {_CURE}")
        graph = _graph(model, facts)
        write = {"qdq": qdq.to_model, "qoperator": qoperator.to_model}[facts["style"]]
        options = {"batch": facts["batch"], "codes": facts["codes"], "vnni": facts.get("vnni", False)}
        again = write(graph, **options, version=facts["version"])
    except ReadError:
        raise
    except Exception as error:
        # A changed file may fail anywhere.
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReadError(f"the graph in the file's metadata is damaged ({reason}). {_CURE}") from error
    # Another version of qjax may write the same file.
    again.producer_version = model.producer_version
    if again.SerializeToString(deterministic=True) != model.SerializeToString(deterministic=True):
        raise ReadError(
            "the graph in the file's metadata is not what its operators compute: something changed the file since qjax "
            f"wrote it, or another version wrote it. {_CURE}"
        )
    return graph if target is None else retarget(graph, target)


def _graph(model: onnx.ModelProto, facts: Mapping[str, Any]) -> Graph:
    held = {constant.name: constant for constant in model.graph.initializer}
    found = [_tensor(described, held) for described in facts["tensors"]]
    known = INPUT_QUANTIZATIONS[INPUT_QUANTIZATIONS.index(facts["quantization"])]
    graph = Graph(
        tensors={tensor.name: tensor for tensor in found},
        nodes=tuple(_node(described) for described in facts["nodes"]),
        inputs=tuple(facts["inputs"]),
        outputs=tuple(facts["outputs"]),
        target=facts["target"],
        metadata=facts["metadata"],
        quantization=known,
    )
    return check_integer(graph)


def _node(described: Mapping[str, Any]) -> Node:
    return Node(
        name=described["name"],
        op=described["op"],
        inputs=tuple(described["inputs"]),
        output=described["output"],
        constants=dict(described["constants"]),
        attributes=dict(described["attributes"]),
        location=described["location"],
    )


def _tensor(described: Mapping[str, Any], held: Mapping[str, onnx.TensorProto]) -> Tensor:
    name = described["name"]
    if "shape" in described:
        value = described.get("value")
        return tensors.tensor_of(name, described, None if value is None else np.asarray(value, np.int64))
    constant = held[name]
    if constant.data_location == onnx.TensorProto.EXTERNAL or constant.external_data:
        raise ValueError(f"initializer {name!r}: its data lies in another file.")
    facts = tensors.taken(constant)
    codes = numpy_helper.to_array(constant).astype(np.int64) - facts.get("offset", 0)
    order = facts.get("order", range(len(facts["shape"])))
    return tensors.tensor_of(name, facts, codes.reshape([facts["shape"][axis] for axis in order]))


__all__ = ["matches", "read"]
