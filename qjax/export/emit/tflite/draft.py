"""A file under construction: the tensors of a graph, constants, and operators in order."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.tflite.support import takes_int4
from qjax.export.tflite_schema.file import File, Scales
from qjax.graph import kernels
from qjax.graph.batch_shapes import shapes_at
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.support.errors import Problems
from qjax.support.names import Names


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the file.

    shape: as the file states it. free: the axes whose size depends on the batch. quantization: None for indices.
    """

    index: int
    shape: tuple[int, ...]
    free: frozenset[int]
    dtype: str
    quantization: Quantization | None

    @property
    def zero_point(self) -> int:
        """The code of zero."""
        assert self.quantization is not None
        return int(np.asarray(self.quantization.zero_point))


Content = tuple[Any, ...]


@dataclasses.dataclass
class _Weights:
    """The tensors of one constant of the graph, by their content.

    owner: the node that read it first. tensors: those of that node, under the constant's name. others: those of later
    nodes, under their own names.
    """

    owner: str
    tensors: list[tuple[Content, int]] = dataclasses.field(default_factory=list)
    others: list[tuple[Content, int]] = dataclasses.field(default_factory=list)


class Draft:
    """A graph that is being written to a file.

    values: by tensor of the graph. spans: per node, the operators [first, end) that compute it. resizable: whether no
    operator contains the batch size as a number. unwritten: the tensors that no operator computes, because their node
    cannot be written.
    """

    def __init__(self, graph: Graph, batch: int, int4: bool | None) -> None:
        self.graph, self.int4 = graph, int4
        self.file = File()
        self.values: dict[str, Value] = {}
        self.spans: list[tuple[int, int]] = []
        self.problems = Problems()
        self.prepared = kernels.prepare(graph)
        self.shapes = shapes_at(graph, batch)
        self.resizable = True
        self.unwritten: list[int] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._weights: dict[str, _Weights] = {}
        self._names = Names(graph.tensors, between=":", bare=False)
        self._node, self._first = "input", 0

    # ------------------------------------------------------------------ tensors

    def input(self, node: Node, index: int = 0) -> Value:
        """A tensor that a node reads."""
        name = node.inputs[index]
        if name not in self.values:
            # a constant among the inputs
            tensor = self.graph.tensors[name]
            named = self._names.fresh(name) if name in self._weights else name
            self.values[name] = self.constant(tensor.value, tensor.dtype, tensor.quantization, named)
        return self.values[name]

    def grid(self, node: Node) -> tuple[str, Quantization | None]:
        """The dtype and quantization of a node's output."""
        tensor = self.graph.tensors[node.output]
        return tensor.dtype, tensor.quantization

    def constant(
        self, data: Any, dtype: str, quantization: Quantization | None = None, name: str | None = None
    ) -> Value:
        """A tensor with data; equal ones without a name become one tensor."""
        held = np.asarray(data)
        key = (dtype, held.shape, held.tobytes())
        if name is None and quantization is None and key in self._constants:
            return self._constants[key]
        scales = None if quantization is None else Scales(quantization.scale, quantization.zero_point)
        index = self.file.tensor(name or self._fresh(), held.shape, dtype, scales, held)
        value = Value(index, held.shape, frozenset(), dtype, quantization)
        if name is None and quantization is None:
            self._constants[key] = value
        return value

    def integers(self, numbers: Sequence[int] | np.ndarray) -> Value:
        """A vector of int32: axes, shapes, paddings."""
        return self.constant(np.asarray(numbers, np.int32), "int32")

    def weights(self, role: str, node: Node, codes: np.ndarray, scales: Scales | None, dtype: str) -> int:
        """The tensor of a kernel or a bias, named as in the graph; for groups of channels, one tensor each.

        A constant that several nodes read, such as the steps of a recurrent layer, is stored once. If a later node
        needs it with another layout or other scales, then that is a tensor with another name.
        """
        name = node.constants[role]
        # a constant that is also an input of a node already has its name
        held = self._weights.setdefault(name, _Weights("" if name in self.values else node.name))
        content = _content(codes, scales, dtype)
        if held.owner == node.name:
            held.tensors.append((content, self.file.tensor(name, codes.shape, dtype, scales, codes)))
            return held.tensors[-1][1]
        for known, index in (*held.tensors, *held.others):
            if known == content:
                return index
        index = self.file.tensor(self._names.fresh(name), codes.shape, dtype, scales, codes)
        held.others.append((content, index))
        return index

    def packs(self, operator: str, kernel: Tensor, depth: int) -> bool:
        """Whether a kernel is stored with 4 bits per code; depth: the last axis that it has in the file."""
        quantization = kernel.quantization
        fits = quantization is not None and quantization.qmin >= -8 and quantization.qmax <= 7
        return fits and (takes_int4(self.graph.target, operator, depth) if self.int4 is None else self.int4)

    # ------------------------------------------------------------------ operators

    def apply(
        self,
        operator: str,
        inputs: Sequence[Value | int],
        shape: Sequence[int],
        free: frozenset[int],
        dtype: str,
        quantization: Quantization | None,
        other: tuple[int, tuple[str, Quantization | None]] | None = None,
        **options: Any,
    ) -> Value:
        """Append an operator; returns the output that is used.

        other: for an operator with a second output of the same shape, the index of the output that is used (0 or 1),
        and dtype and quantization of the other one.
        """
        outputs: list[Value] = []
        if other is not None:
            outputs.append(self._value(self._fresh(), tuple(shape), free, *other[1]))
        value = self._value(self._fresh(), tuple(shape), free, dtype, quantization)
        outputs.insert(0 if other is None else other[0], value)
        indices = [one if isinstance(one, int) else one.index for one in inputs]
        self.file.operator(operator, indices, [one.index for one in outputs], **options)
        return value

    # ------------------------------------------------------------------ plumbing

    def name_after(self, node: str, first: int = 0) -> None:
        """Name the next tensors after a node's output, with numbers from `first` on."""
        self._node, self._first = node, first

    def tensor_of(self, name: str, tensor: Tensor) -> Value:
        """A tensor of the graph as a new tensor of the file."""
        free = frozenset(axis for axis, size in enumerate(tensor.shape) if size is None)
        return self._value(name, self.shapes[name], free, tensor.dtype, tensor.quantization)

    def _value(
        self, name: str, shape: tuple[int, ...], free: frozenset[int], dtype: str, quantization: Quantization | None
    ) -> Value:
        scales = None if quantization is None else Scales(quantization.scale, quantization.zero_point)
        signature = [-1 if axis in free else size for axis, size in enumerate(shape)] if free else None
        index = self.file.tensor(name, shape, dtype, scales, None, signature)
        return Value(index, tuple(shape), free, dtype, quantization)

    def _fresh(self) -> str:
        return self._names.fresh(self._node, self._first)


def _content(codes: np.ndarray, scales: Scales | None, dtype: str) -> Content:
    """What two tensors must share to be one."""
    parts = () if scales is None else (scales.scale, scales.zero_point)
    grid = tuple((np.shape(part), np.asarray(part).tobytes()) for part in parts)
    rest = None if scales is None else (scales.axis, scales.block)
    return dtype, codes.shape, hashlib.sha256(np.ascontiguousarray(codes)).digest(), grid, rest
