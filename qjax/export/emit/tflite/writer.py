"""From nodes to operators: the tensors of the file, and the few operators that stand around the native ones.

Every operation of qjax has one lowering (`lowers`), a function of the writer and the node that returns the value it
computed; the last tensor that a lowering makes takes the name of the node's output. Operators that only move codes
(RESHAPE, TRANSPOSE, PAD, SLICE) are added by the methods here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.export import interpreter
from qjax.export.emit.tflite.problems import Problems, Unsupported
from qjax.export.emit.tflite.support import MICRO, takes_int4
from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.export.tflite_schema.activations import activation_codes
from qjax.export.tflite_schema.file import File, Scales

Lowering = Callable[["Writer", Node], "Value"]

LOWERINGS: dict[str, Lowering] = {}
"""By operation of qjax."""

ACTIVATIONS = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6")


def lowers(op: str) -> Callable[[Lowering], Lowering]:
    """Decorator: the function writes nodes of that operation."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS[op] = function
        return function

    return register


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the file.

    shape: as the file states it. free: the axes whose size follows the batch. quantization: None for indices.
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


class Writer:
    """One graph on its way into a file.

    values: by tensor of the graph. spans: per node, the operators [first, end) that compute it. resizable: no operator
    holds the batch as a number.
    """

    def __init__(self, graph: Graph, batch: int, int4: bool | None) -> None:
        self.graph, self.int4 = graph, int4
        self.file = File()
        self.values: dict[str, Value] = {}
        self.spans: list[tuple[int, int]] = []
        self.problems = Problems()
        self.prepared = interpreter.prepare(graph)
        self.shapes = _shapes(graph, batch, self.prepared)
        self.resizable = True
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._node = "input"
        self._made = 0
        self._names = set(graph.tensors)

    def run(self) -> None:
        """Write every node; what cannot be written is collected in `problems`."""
        for name in self.graph.inputs:
            self.values[name] = self._tensor(name, self.graph.tensors[name])
        for node in self.graph.nodes:
            first = len(self.file.operators)
            self._node, self._made = node.output, 0
            before = len(self.file.tensors)
            try:
                value = LOWERINGS[node.op](self, node)
            except Unsupported as error:
                self.problems.add(node, error.why, error.cure)
                # the nodes behind it are still looked at
                value = self._tensor(node.output, self.graph.tensors[node.output])
            if value.index < before:
                value = self.copy(value)
            assert value.shape == self.shapes[node.output], (node.name, value.shape, self.shapes[node.output])
            self.file.rename(value.index, node.output)
            self.values[node.output] = value
            self.spans.append((first, len(self.file.operators)))

    def outputs(self) -> list[int]:
        """The file's outputs; one that is an input, or there twice, is copied."""
        found: list[int] = []
        for name in self.graph.outputs:
            value = self.values[name]
            if value.index in found or name in self.graph.inputs:
                self._node, self._made = f"{name}/copy", len(found)
                value = self.copy(value)
            found.append(value.index)
        return found

    # ------------------------------------------------------------------ tensors

    def input(self, node: Node, index: int = 0) -> Value:
        """What a node reads."""
        name = node.inputs[index]
        if name not in self.values:
            # a constant among the inputs
            tensor = self.graph.tensors[name]
            self.values[name] = self.constant(tensor.value, tensor.dtype, tensor.quantization, name)
        return self.values[name]

    def grid(self, node: Node) -> tuple[str, Quantization | None]:
        """The dtype and quantization of a node's output."""
        tensor = self.graph.tensors[node.output]
        return tensor.dtype, tensor.quantization

    def constant(
        self, data: Any, dtype: str, quantization: Quantization | None = None, name: str | None = None
    ) -> Value:
        """A tensor with data; equal ones without a name of their own are one tensor."""
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

    def weights(self, role: str, node: Node, codes: np.ndarray, scales: Scales, dtype: str) -> int:
        """The tensor of a kernel or a bias, named as in the graph."""
        return self.file.tensor(node.constants[role], codes.shape, dtype, scales, codes)

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
        """Append an operator; the output that is used.

        other: of an operator with a second output of that shape, the place of the one that is used (0 or 1), and dtype
        and quantization of the other one.
        """
        outputs: list[Value] = []
        if other is not None:
            outputs.append(self._value(self._fresh(), tuple(shape), free, *other[1]))
        value = self._value(self._fresh(), tuple(shape), free, dtype, quantization)
        outputs.insert(0 if other is None else other[0], value)
        indices = [one if isinstance(one, int) else one.index for one in inputs]
        self.file.operator(operator, indices, [one.index for one in outputs], **options)
        return value

    def moved(
        self,
        operator: str,
        inputs: Sequence[Value | int],
        shape: Sequence[int],
        free: frozenset[int],
        of: Value,
        **options: Any,
    ) -> Value:
        """Append an operator that moves the codes of `of`."""
        return self.apply(operator, inputs, shape, free, of.dtype, of.quantization, **options)

    def copy(self, x: Value) -> Value:
        """The same tensor again, as the output of an operator."""
        return self._reshape(x, x.shape, x.free)

    def reshape(self, x: Value, shape: Sequence[int], free: frozenset[int] | None = None) -> Value:
        """The codes in another shape; free: its axes that follow the batch (by default those at the same place)."""
        shape = tuple(shape)
        free = frozenset(axis for axis in x.free if axis < len(shape)) if free is None else free
        return x if shape == x.shape else self._reshape(x, shape, free)

    def _reshape(self, x: Value, shape: tuple[int, ...], free: frozenset[int]) -> Value:
        if len(free) > 1:
            self.resizable = False
        numbers = [-1 if axis in free and len(free) == 1 else size for axis, size in enumerate(shape)]
        return self.moved("RESHAPE", [x, self.integers(numbers)], shape, free, x, newShape=numbers)

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """The axes in another order."""
        order = list(permutation)
        if order == sorted(order):
            return x
        shape = [x.shape[axis] for axis in order]
        if [axis for axis in order if x.shape[axis] != 1 or axis in x.free] == sorted(
            axis for axis in order if x.shape[axis] != 1 or axis in x.free
        ):
            # only axes of one element move
            return self._reshape(x, tuple(shape), frozenset(order.index(axis) for axis in x.free))
        if len(order) > (5 if self.graph.target in MICRO else 6):
            return self._transpose_merged(x, order)
        if self.graph.target in MICRO and x.dtype in ("bool", "int32"):
            return self._transpose_numbers(x, order)
        free = frozenset(order.index(axis) for axis in x.free)
        return self.moved("TRANSPOSE", [x, self.integers(order)], shape, free, x)

    def _transpose_numbers(self, x: Value, order: list[int]) -> Value:
        """TFLite Micro transposes codes only: booleans as such."""
        if x.dtype != "bool":
            raise Unsupported(f"a transposition of {x.dtype}", "TFLite Micro has none: transpose the codes before")
        kinds: dict[str, Any] = {"inDataType": "bool", "outDataType": "int8"}
        turned = self.transpose(self.apply("CAST", [x], x.shape, x.free, "int8", None, **kinds), order)
        kinds = {"inDataType": "int8", "outDataType": "bool"}
        return self.apply("CAST", [turned], turned.shape, turned.free, "bool", None, **kinds)

    def _transpose_merged(self, x: Value, order: list[int]) -> Value:
        """A transposition of many axes: those that stay neighbours become one, those of one element go."""
        groups: list[list[int]] = []
        for axis in order:
            if x.shape[axis] == 1 and axis not in x.free:
                continue
            if groups and axis == groups[-1][-1] + 1:
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if len(groups) > (5 if self.graph.target in MICRO else 6):
            raise Unsupported(
                f"a transposition of {len(x.shape)} dimensions",
                "TFLite has at most 6, TFLite Micro 5: do it in two steps",
            )
        by_place = sorted(groups)

        def free(parts: list[list[int]]) -> frozenset[int]:
            return frozenset(i for i, part in enumerate(parts) if x.free & set(part))

        sizes = [math.prod(x.shape[axis] for axis in group) for group in by_place]
        turned = self.transpose(self.reshape(x, sizes, free(by_place)), [by_place.index(group) for group in groups])
        shape = [x.shape[axis] for axis in order]
        return self.reshape(turned, shape, frozenset(order.index(axis) for axis in x.free))

    def pad(self, x: Value, padding: Sequence[Sequence[int]], fill: int) -> Value:
        """Put `fill` around the codes: (low, high) per axis, negative to cut off."""
        cut = [[max(-low, 0), max(-high, 0)] for low, high in padding]
        if any(map(any, cut)):
            starts = [low for low, _ in cut]
            x = self.slice(x, starts, [x.shape[a] - low - high for a, (low, high) in enumerate(cut)])
        added = [[max(low, 0), max(high, 0)] for low, high in padding]
        if not any(map(any, added)):
            return x
        shape = [size + low + high for size, (low, high) in zip(x.shape, added, strict=True)]
        pads = self.constant(np.asarray(added, np.int32), "int32")
        if fill == (0 if x.quantization is None else x.zero_point):
            return self.moved("PAD", [x, pads], shape, x.free, x)
        # its quantization must be that of the input
        value = self.constant(np.asarray([fill], x.dtype), x.dtype, x.quantization)
        return self.moved("PADV2", [x, pads, value], shape, x.free, x)

    def dilate(self, x: Value, axis: int, step: int, fill: int) -> Value:
        """Put `step - 1` codes `fill` between neighbours along an axis."""
        size = x.shape[axis]
        if step == 1 or size == 0:
            return x
        outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        free = frozenset({0} if any(a < axis for a in x.free) else ())
        if any(a >= axis for a in x.free):
            self.resizable = False
        rows = self.reshape(x, (outer, size, inner), free)
        rows = self.pad(rows, [(0, 0), (0, 0), (0, (step - 1) * inner)], fill)
        shape = (*x.shape[:axis], size * step, *x.shape[axis + 1 :])
        grown = self.reshape(rows, shape, x.free)
        return self.pad(grown, [(0, 1 - step if a == axis else 0) for a in range(len(shape))], fill)

    def slice(self, x: Value, starts: Sequence[int], sizes: Sequence[int]) -> Value:
        """A part of the codes; axes that follow the batch are whole."""
        if tuple(sizes) == x.shape:
            return x
        whole = frozenset(axis for axis in x.free if starts[axis] == 0 and sizes[axis] == x.shape[axis])
        if whole != x.free:
            self.resizable = False
        asked = [-1 if axis in whole else size for axis, size in enumerate(sizes)]
        return self.moved("SLICE", [x, self.integers(list(starts)), self.integers(asked)], sizes, whole, x)

    # ------------------------------------------------------------------ clamps

    def activation(self, node: Node) -> str:
        """The fused activation whose bounds are the node's, or as many of them as one expresses."""
        return self._fused(node)[0]

    def bounded(self, node: Node, x: Value, activation: str | None = "NONE") -> Value:
        """Clamp the codes to the bounds that `activation` (None: the operator cannot have one) left."""
        low, high = self.bounds(node)
        dtype, quantization = self.grid(node)
        info = np.iinfo(dtype)
        done_low, done_high = (info.min, info.max)
        if activation is not None and activation != "NONE":
            done_low, done_high = self._fused(node)[1]
        if low > done_low:
            x = self._limited("MAXIMUM", x, low, quantization)
        if high < done_high:
            x = self._limited("MINIMUM", x, high, quantization)
        return x

    def _limited(self, operator: str, x: Value, bound: int, quantization: Quantization | None) -> Value:
        limit = self.constant(np.asarray([bound] if x.shape else bound, x.dtype), x.dtype, quantization)
        return self.moved(operator, [x, limit], x.shape, x.free, x)

    def bounds(self, node: Node) -> tuple[int, int]:
        """The least and the greatest code of a node."""
        _, quantization = self.grid(node)
        assert quantization is not None
        low, high = quantization.qmin, quantization.qmax
        constants = self.prepared[node.name]
        if "clamp_min" in constants:
            low, high = (max(bound, int(np.asarray(constants["clamp_min"]))) for bound in (low, high))
        if "clamp_max" in constants:
            low, high = (min(bound, int(np.asarray(constants["clamp_max"]))) for bound in (low, high))
        return low, high

    def _fused(self, node: Node) -> tuple[str, tuple[int, int]]:
        low, high = self.bounds(node)
        dtype, quantization = self.grid(node)
        assert quantization is not None
        info = np.iinfo(dtype)
        for activation in ("RELU6", "RELU_N1_TO_1", "RELU"):
            codes = activation_codes(activation, quantization.scale, quantization.zero_point, info.min, info.max)
            if codes is None or codes[0] > low or codes[1] < high:
                # it would cut off codes that the node has
                continue
            if codes == (low, high) or (activation == "RELU" and codes[0] == low):
                return activation, codes
        return "NONE", (info.min, info.max)

    # ------------------------------------------------------------------ plumbing

    def _tensor(self, name: str, tensor: Tensor) -> Value:
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
        while True:
            name = f"{self._node}:{self._made}"
            self._made += 1
            if name not in self._names:
                self._names.add(name)
                return name


def _shapes(graph: Graph, batch: int, prepared: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor for a batch of that size."""
    given = [
        jax.ShapeDtypeStruct(
            tuple(batch if size is None else size for size in graph.tensors[name].shape),
            jnp.dtype(graph.tensors[name].dtype),
        )
        for name in graph.inputs
    ]

    def every(inputs: list[Any]) -> dict[str, Any]:
        env = interpreter.run(graph, prepared, inputs)
        return {name: env[name] for name in (*graph.inputs, *(node.output for node in graph.nodes))}

    return {name: tuple(found.shape) for name, found in jax.eval_shape(every, given).items()}
