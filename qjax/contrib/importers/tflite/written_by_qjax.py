"""Reads back the graph that the TFLite emitter wrote.

The file's metadata "qjax" names the nodes and tensors; scales and data are the file's. See `restored`: the graph is
written again, and the result must equal the file, operator for operator and byte for byte of its data.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from qjax import targets
from qjax.assign import assign
from qjax.contrib.importers.restored import OPERATORS, check_version, restored
from qjax.export import document, strict_json
from qjax.export.tflite_schema import layouts
from qjax.export.tflite_schema.file import METADATA, METADATA_VERSION
from qjax.export.tflite_schema.model import FileTensor, Model, parse
from qjax.graph import kernels
from qjax.graph.check import check_integer
from qjax.graph.ir import INTEGER_DTYPES, REAL_DTYPE, Graph, Node, Quantization, Tensor
from qjax.ops.channels import weight_to_result
from qjax.ops.fields import OF_TARGETS
from qjax.run import interpreter


def read(model: Model) -> Graph:
    """The graph that was written.

    Raises:
      ReadError: the metadata is damaged, or does not describe the file.
      ModuleNotFoundError: ai-edge-litert is missing, with which the graph is written again.
    """
    start, end = model.metadata[METADATA]

    def make() -> Graph:
        where = f"its metadata {METADATA!r}"
        facts = strict_json.mapping(document.read(model.data[start:end], where), where)
        check_version(facts, METADATA_VERSION, OPERATORS)
        return _Claims(model, facts).graph()

    return restored(make, lambda graph: _difference(graph, model))


class _Claims:
    """The content of the metadata, with the data of the file."""

    def __init__(self, model: Model, facts: Mapping[str, Any]) -> None:
        self.model, self.facts = model, facts
        self.named: dict[str, list[FileTensor]] = {}
        for tensor in model.tensors:
            self.named.setdefault(tensor.name, []).append(tensor)
        self.claimed = {entry[0]: entry for entry in facts["tensors"]}
        if len(self.claimed) != len(facts["tensors"]):
            raise ValueError("two tensors of one name")

    def graph(self) -> Graph:
        """The graph under its target."""
        facts = self.facts
        target = targets.get(facts["target"])
        entries = facts["nodes"]
        held = self._constants(entries)
        computed = {*facts["inputs"], *(entry["output"] for entry in entries)}
        tensors = {
            name: self._tensor(name, held.get(name)) for name in self.claimed if name in computed or name in held
        }
        nodes = [self._bare(entry) for entry in entries]
        bare = Graph(tensors, tuple(nodes), tuple(facts["inputs"]), tuple(facts["outputs"]), "")
        self._check_shapes(bare)
        made = assign(bare, target)
        final = {name: tensors.get(name) for name in self.claimed}
        finished: list[Node] = []
        for entry, node in zip(entries, made.nodes, strict=True):
            if dict(node.attributes) != entry["attributes"] or node.constants.keys() != entry["constants"].keys():
                raise ValueError(f"node {node.name!r} differs from what the target {target.name!r} computes for it")
            for role, name in entry["constants"].items():
                if final[name] is None:
                    final[name] = self._tensor(name, np.asarray(made.constant(node, role)))
            finished.append(dataclasses.replace(node, attributes=entry["attributes"], constants=entry["constants"]))
        whole = {name: tensor for name, tensor in final.items() if tensor is not None}
        if len(whole) != len(final):
            raise ValueError("tensors that nothing computes")
        graph = made.replace(nodes=tuple(finished), tensors=whole, metadata=strict_json.mapping(facts["metadata"], ""))
        if graph.quantization != facts["quantization"]:
            raise ValueError(f"inputs are quantized as {facts['quantization']!r}")
        return check_integer(graph)

    def _tensor(self, name: str, value: np.ndarray | None) -> Tensor:
        _, shape, dtype, grid = self.claimed[name]
        if value is not None and (list(value.shape) != shape or str(value.dtype) != dtype):
            raise ValueError(f"tensor {name!r} is stated as {dtype} {shape}")
        if value is None and not (name in self.named and len(self.named[name][0].shape) == len(shape)):
            raise ValueError(f"the file has no tensor {name!r} of shape {shape}")
        quantization = None
        if grid is not None and len(grid) > 4:
            low, high, axes, _, scale, zero_point = grid
            codes = np.asarray(zero_point, np.int32)
            quantization = Quantization(np.asarray(scale, np.float32), codes, low, high, tuple(axes))
        elif grid is not None:
            low, high, axes, several = grid
            stored = self._all(name)
            sizes = [shape[axis] for axis in axes]
            if stored[0].blocks is not None:
                scale, zero = self.model.block_scales(stored[0]), 0
            else:
                scale = np.concatenate([t.scale for t in stored]) if len(stored) > 1 else stored[0].scale
                zero = stored[0].zero_point[0]
            scale = scale[:1].reshape(()) if not axes else scale.reshape(sizes)
            zero_point = np.full(sizes if several else (), zero, np.int32)
            quantization = Quantization(scale, zero_point, low, high, tuple(axes))
        return Tensor(name, tuple(shape), dtype, quantization, value)

    def _bare(self, entry: Mapping[str, Any]) -> Node:
        """A node without the constants and attributes of its target."""
        node = document.node_of({key: entry[key] for key in document.NODE})
        attributes = {key: value for key, value in node.attributes.items() if key not in OF_TARGETS}
        known = {"kernel", "bias", *entry.get("values", {})}
        constants = {role: name for role, name in node.constants.items() if role in known}
        return dataclasses.replace(node, constants=constants, attributes=attributes)

    def _constants(self, entries: list[Any]) -> dict[str, np.ndarray]:
        """The data of constants that belong to the model itself."""
        found: dict[str, np.ndarray] = {}
        computed = {*self.facts["inputs"], *(entry["output"] for entry in entries)}
        for entry in entries:
            # the tensors of a name are in the form in which the first node reads them
            for name in entry["inputs"]:
                if name not in computed and name not in found:
                    found[name] = self._data(name)
            constants = entry["constants"]
            for role, value in entry.get("values", {}).items():
                _, shape, dtype, _ = self.claimed[constants[role]]
                found[constants[role]] = _listed(value, dtype).reshape(shape)
            if "kernel" in constants and constants["kernel"] not in found:
                found[constants["kernel"]] = self._kernel(entry)
            if "bias" in constants and constants["bias"] not in found:
                found[constants["bias"]] = self._bias(entry, found[constants["kernel"]])
        return found

    def _all(self, name: str) -> list[FileTensor]:
        if name not in self.named:
            raise ValueError(f"the file has no tensor {name!r}")
        return self.named[name]

    def _data(self, name: str) -> np.ndarray:
        """The data of a name; for a convolution in groups, those of all groups concatenated."""
        stored = self._all(name)
        if any(tensor.span is None for tensor in stored):
            raise ValueError(f"the tensor {name!r} has no data")
        parts = [self.model.array(tensor) for tensor in stored]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _kernel(self, entry: Mapping[str, Any]) -> np.ndarray:
        name, attributes = entry["constants"]["kernel"], entry["attributes"]
        stored, shape = self._data(name), self.claimed[name][1]
        if entry["op"] == "dot":
            weight = attributes["weight"]
            own, other = ("lhs", "rhs") if weight == 1 else ("rhs", "lhs")
            summed = attributes[f"{own}_contracting"]
            order = sorted(range(len(summed)), key=lambda i: summed[i])
            contracting = [attributes[f"{other}_contracting"][i] for i in order]
            return np.ascontiguousarray(layouts.from_matrix(stored, shape, contracting))
        if entry["op"] == "conv":
            first, end = entry["operators"]
            names = {operator.name for operator in self.model.operators[first:end]}
            stored = layouts.depthwise(stored) if "DEPTHWISE_CONV_2D" in names else stored
            return np.ascontiguousarray(layouts.from_ohwi(stored, attributes["rhs_layout"]))
        # groups are consecutive in the file
        return stored.reshape(shape)

    def _bias(self, entry: Mapping[str, Any], kernel: np.ndarray) -> np.ndarray:
        name, attributes = entry["constants"]["bias"], entry["attributes"]
        if self.claimed[name][2] == REAL_DTYPE:
            return self._data(name)
        kept = [w for _, w in attributes["channels"]]
        sizes = [n if axis in kept else 1 for axis, n in enumerate(kernel.shape)]
        vector = weight_to_result(self._data(name).reshape(sizes), attributes["channels"], attributes["rank"])
        shape = self.claimed[name][1]
        rank = max(len(shape), vector.ndim)
        vector = vector.reshape((1,) * (rank - vector.ndim) + vector.shape)
        wanted = [1] * (rank - len(shape)) + shape
        # The file may repeat one value for every channel.
        parts = vector[tuple(slice(None) if n == m else slice(0, 1) for n, m in zip(wanted, vector.shape, strict=True))]
        return parts.reshape(shape).astype(np.int32)

    def _check_shapes(self, bare: Graph) -> None:
        """The claimed shapes must be the file's, because they bound what the operations may need."""
        sizes = {batch_of(bare, self.model)}
        for name in (*bare.inputs, *(node.output for node in bare.nodes)):
            stated = self._all(name)[0].shape
            for size, claimed in zip(stated, bare.tensors[name].shape, strict=True):
                if claimed is not None and size != claimed:
                    raise ValueError(f"tensor {name!r} has the shape {stated}")
                if claimed is None:
                    sizes.add(size)
        # An axis may hold several times the batch.
        batched = any(None in bare.tensors[name].shape for name in bare.inputs)
        if batched and min(sizes) and any(size % min(sizes) for size in sizes):
            raise ValueError(f"batches of {sorted(sizes)}")


def _listed(value: Any, dtype: str) -> np.ndarray:
    """Numbers of a document as an array of that type."""
    if dtype == REAL_DTYPE:
        return np.asarray(value, np.float32)
    if dtype not in INTEGER_DTYPES:
        raise ValueError(f"constants of {dtype}")
    numbers = np.asarray(value, np.int64)
    if not np.array_equal(numbers, numbers.astype(dtype)):
        raise ValueError(f"constants beyond {dtype}")
    return numbers.astype(dtype)


def batch_of(graph: Graph, model: Model) -> int:
    """The batch size that the file's shapes state."""
    for name in graph.inputs:
        if None in graph.tensors[name].shape:
            stated = next(model.tensors[i].shape for i in model.inputs if model.tensors[i].name == name)
            return stated[graph.tensors[name].shape.index(None)]
    return 1


def _difference(graph: Graph, model: Model) -> str:
    """How a file differs from the graph written again; "" if it does not."""
    from qjax.export.emit.tflite import to_bytes

    batch = batch_of(graph, model)
    shapes = jax.eval_shape(
        lambda inputs: interpreter.run(graph, kernels.prepare(graph), inputs),
        [
            jax.ShapeDtypeStruct(
                [batch if n is None else n for n in graph.tensors[name].shape], graph.tensors[name].dtype
            )
            for name in graph.inputs
        ],
    )
    for tensor in model.tensors:
        if tensor.name in shapes and tensor.span is None and shapes[tensor.name].shape != tensor.shape:
            return f"the shape of {tensor.name!r}"
    packed = any(tensor.dtype == "int4" for tensor in model.tensors)
    different = ""
    for int4 in (True, None) if packed else (False,):
        different = compared(parse(to_bytes(graph, batch=batch, int4=int4)), model)
        if not different:
            break
    return different


def compared(a: Model, b: Model) -> str:
    """Where two files differ in what a runtime reads; "" if they do not."""
    if (a.inputs, a.outputs, len(a.tensors), len(a.operators)) != (
        b.inputs,
        b.outputs,
        len(b.tensors),
        len(b.operators),
    ):
        return "the number of its tensors or operators"
    for x, y in zip(a.operators, b.operators, strict=True):
        if (x.name, x.inputs, x.outputs, x.options) != (y.name, y.inputs, y.outputs, y.options):
            return f"operator {y.index} {y.name}"
    for s, t in zip(a.tensors, b.tensors, strict=True):
        same = (s.name, s.shape, s.signature, s.dtype, s.unusual) == (t.name, t.shape, t.signature, t.dtype, t.unusual)
        same = same and s.blocks == t.blocks
        same = same and np.array_equal(s.scale, t.scale) and np.array_equal(s.zero_point, t.zero_point)
        if not same or s.axis != t.axis or _bytes(a, s) != _bytes(b, t):
            return f"tensor {t.name!r}"
    return ""


def _bytes(model: Model, tensor: FileTensor) -> bytes | None:
    return None if tensor.span is None else model.data[tensor.span[0] : tensor.span[1]]
