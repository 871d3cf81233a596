"""Translates nodes to operators, with one lowering per operation.

A lowering (`lowers`) is a function of the writer and the node that returns the computed value. The last tensor that it
makes gets the name of the node's output. Tensors and operators (`draft`), moves (`move_operators`) and clamps
(`clamping`) are methods of the writer.
"""

from collections.abc import Callable

from qjax.export.emit.tflite.clamping import Clamping
from qjax.export.emit.tflite.draft import Value
from qjax.graph.ir import Node
from qjax.support.errors import Unsupported

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
