"""Every operation as a .tflite file: the living runtimes give the graph's codes, or an error says why not."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from qjax import targets
from qjax.assign import assign
from qjax.assign.retarget import stated
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.tflite import to_bytes
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.run.interpreter import Interpreter
from tests.export.emit.nodes import of_operations
from tests.export.emit.tflite_runtimes import MODES, TARGETS, litert, micro
from tests.export.graphs import differences

STEP = "that an affine step follows"
EXACT = "with a mask|of other codes, axes or grids than the runtime"
NO_FORM = {
    "embed_bytes": "integers of uint8",
    "max_pool": "a window with gaps",
    "window_sum": "a sum over windows that is no average",
    **{f"integer_{function}": f"{function} of the bits of int32" for function in ("abs", "sign")},
    "integer_cumsum": "the operation cumulative_integer",
    "integer_pad": "padding of integers",
    "add": STEP,
    "multiply": STEP,
    "matmul": STEP,
    "grouped_dot": "a scale for every group",
    "prod": "the operation prod",
    "sort": "the operation sort",
    "argsort": "the operation argsort",
    "pair_table": "the operation pair_table",
    **dict.fromkeys(("resize_bilinear_grid", "resize_bilinear_wide"), "a bilinear resize to another grid"),
    **dict.fromkeys(("embed_rows", "embed_rows_columns", "embed_rows_groups"), "whose rows have different scales"),
    **dict.fromkeys(("softmax", "softmax_wide", "softmax_uniform", "softmax_zero"), EXACT),
    **dict.fromkeys(("log_softmax", "log_softmax_wide", "log_softmax_masked"), "a log_softmax"),
    **dict.fromkeys(("logsumexp", "logsumexp_kept", "logsumexp_masked"), "a logsumexp"),
    **dict.fromkeys(("layer_norm", "norm", "group_norm"), "a normalization over the data"),
}
"""What the error says of the others."""
NOT_IN_MICRO = {"rescale": STEP}


def signed(graph: Graph, inputs: list[np.ndarray]) -> tuple[Graph, list[np.ndarray]]:
    """The same node on signed codes: no kernel of TFLite takes unsigned ones that qjax writes."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in graph.tensors.items():
        q = tensor.quantization
        if q is not None and tensor.dtype.startswith("uint"):
            half = np.iinfo(tensor.dtype).max // 2 + 1
            zero_point = 0 if half > 128 else int(q.zero_point) - half
            q = Quantization(q.scale, np.asarray(zero_point, np.int32), q.qmin - half, q.qmax - half)
            tensor = Tensor(name, tensor.shape, tensor.dtype[1:], q)
        elif tensor.dtype == "uint8" and tensor.value is not None:
            codes = (np.asarray(tensor.value).astype(np.int32) - 128).astype(np.int8)
            tensor = Tensor(name, tensor.shape, "int8", None, codes)
        tensors[name] = tensor
    moved: list[np.ndarray] = []
    for name, codes in zip(graph.inputs, inputs, strict=True):
        if graph.tensors[name].dtype != tensors[name].dtype:
            codes = (codes.astype(np.int32) - (np.iinfo(codes.dtype).max // 2 + 1)).astype(tensors[name].dtype)
        moved.append(codes)
    return graph.replace(tensors=tensors), moved


def merged(graphs: dict[str, Graph]) -> Graph:
    """Graphs side by side in one, every name behind that of its graph."""
    tensors: dict[str, Tensor] = {}
    nodes: list[Node] = []
    inputs, outputs = list[str](), list[str]()
    for label, graph in graphs.items():
        own = {name: f"{label}/{name}" for name in graph.tensors}
        for name, tensor in graph.tensors.items():
            tensors[own[name]] = dataclasses.replace(tensor, name=own[name])
        for node in graph.nodes:
            constants = {role: own[name] for role, name in node.constants.items()}
            named = tuple(own[name] for name in node.inputs)
            nodes.append(Node(f"{label}/node", node.op, named, own[node.output], constants, node.attributes))
        inputs += [own[name] for name in graph.inputs]
        outputs += [own[name] for name in graph.outputs]
    return check_integer(Graph(tensors, tuple(nodes), tuple(inputs), tuple(outputs), "nearest_even"))


def targeted(graph: Graph, target: str) -> Graph:
    """Nodes made by hand, with the constants that a target makes of their scales."""
    return assign(stated(graph), targets.get(target))


@pytest.fixture(scope="module")
def nodes() -> dict[str, Any]:
    # products with weights are in the matrix, with the scales that a target makes its constants of
    return {n: signed(*found) for n, found in of_operations().items() if "rule" not in found[0].nodes[0].attributes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.sampled(2)
def test_every_operation_is_the_runtimes(nodes, target):
    refused = NO_FORM | (NOT_IN_MICRO if target == "tflite_micro" else {})
    known = {name: found for name, found in nodes.items() if name not in refused}
    graph = targeted(merged({name: graph for name, (graph, _) in known.items()}), target)
    inputs = [codes for _, held in known.values() for codes in held]
    expected = [np.asarray(y) for y in Interpreter(graph)(*inputs)]
    file = to_bytes(graph)
    run = (
        micro(file, inputs, graph.outputs) if target not in MODES else litert(file, MODES[target], inputs, every=False)
    )
    count, wrong = 0, dict[str, Any]()
    for output, y in zip(graph.outputs, expected, strict=True):
        count += y.size
        assert (run[output].dtype, run[output].shape) == (y.dtype, y.shape), output
        if not np.array_equal(run[output], y):
            wrong[output] = int(np.sum(run[output] != y))
    assert wrong == {}
    assert count > 2500
    if target == "tflite_micro":
        assert not differences(reader.read(file), graph)


@pytest.mark.parametrize("target", ["tflite_micro", "tflite_xnnpack"])
def test_the_others_are_one_error(nodes, target):
    refused = NO_FORM | (NOT_IN_MICRO if target == "tflite_micro" else {})
    # types are looked at first
    with pytest.raises(ValueError, match=refused.pop("embed_bytes")):
        to_bytes(targeted(nodes["embed_bytes"][0], target))
    graph = targeted(merged({name: nodes[name][0] for name in refused}), target)
    with pytest.raises(ValueError, match=f"{len(refused)} parts of the graph") as caught:
        to_bytes(graph)
    lines = str(caught.value).splitlines()[1:]
    for name, why in refused.items():
        (line,) = [line for line in lines if f"'{name}/" in line]
        assert re.search(why, line)
