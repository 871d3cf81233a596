"""Translates nodes to operators, with one lowering per operation.

A lowering (`lowers`) is a function of the writer and the node that returns the computed value. The last tensor that it
makes gets the name of the node's output. Tensors and operators (`draft`), moves (`move_operators`) and clamps
(`clamping`) are methods of the writer.
"""

from collections.abc import Callable

import numpy as np

from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.move_operators import Moving
from qjax.export.tflite_schema.activations import activation_codes
from qjax.graph.ir import Node, Quantization
from qjax.support.errors import Unsupported

# ----------------------------------------------------------------------------------------------------------------------
# The bounds of a node's codes: a fused activation if one has these bounds, otherwise MAXIMUM and MINIMUM.


class Clamping(Moving):
    """A draft with methods that bound codes."""

    def activation(self, node: Node) -> str:
        """The fused activation that expresses the node's bounds, or as many of them as possible."""
        return self._fused(node)[0]

    def bounded(self, node: Node, x: Value, activation: str | None = "NONE") -> Value:
        """Clamp the codes to the bounds that `activation` (None: the operator cannot have one) does not express."""
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
        """The lowest and the highest code of a node."""
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
                # this activation would clip codes inside the node's bounds
                continue
            if codes == (low, high) or (activation == "RELU" and codes[0] == low):
                return activation, codes
        return "NONE", (info.min, info.max)


Lowering = Callable[["Writer", Node], Value]

LOWERINGS: dict[str, Lowering] = {}
"""Operation of qjax -> its lowering."""


def lowers(op: str) -> Callable[[Lowering], Lowering]:
    """Decorates the function that writes nodes of that operation."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS[op] = function
        return function

    return register


class Writer(Clamping):
    """A draft that is written from its graph."""

    def run(self) -> None:
        """Write every node; those that cannot be written are collected in `problems`."""
        for name in self.graph.inputs:
            self.values[name] = self.tensor_of(name, self.graph.tensors[name])
        for node in self.graph.nodes:
            first = len(self.file.operators)
            self.name_after(node.output)
            before = len(self.file.tensors)
            try:
                if node.op not in LOWERINGS:
                    raise Unsupported(f"the operation {node.op}", "No operator of TFLite is written for it")
                value = LOWERINGS[node.op](self, node)
            except Unsupported as error:
                self.problems.found.append(error.at(f"{node.op} {node.name!r}", node.location))
                # continue with the following nodes, to report their problems too
                value = self.tensor_of(node.output, self.graph.tensors[node.output])
                self.unwritten.append(value.index)
            if value.index < before:
                value = self.copy(value)
            assert value.shape == self.shapes[node.output], (node.name, value.shape, self.shapes[node.output])
            self.file.rename(value.index, node.output)
            self.values[node.output] = value
            self.spans.append((first, len(self.file.operators)))

    def outputs(self) -> list[int]:
        """The file's outputs; an output that is an input, or occurs twice, is copied."""
        found: list[int] = []
        for name in self.graph.outputs:
            value = self.values[name]
            if value.index in found or name in self.graph.inputs:
                self.name_after(f"{name}/copy", len(found))
                value = self.copy(value)
            found.append(value.index)
        return found
