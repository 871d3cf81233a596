"""Which constants of a file are weights: constants are folded first, so that a transposed weight is one weight."""

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence

import numpy as np

from qjax.contrib.float_models.evaluator import apply
from qjax.contrib.float_models.graph import OPERATORS, Call, FloatGraph, Node
from qjax.export.read_errors import ReadError

_MOST_FOLDED = 2**26
"""The most elements of a constant that is computed from others while the file is read."""
_REPEATING = ("ConstantOfShape", "Expand", "Tile")


class Folding:
    """The constants of a file, and what can be computed from them.

    constants: by name. origin: constant -> the stored one from which it was computed, whose name a parameter gets.
    uses: how many nodes read a value.
    """

    def __init__(self) -> None:
        self.constants: dict[str, np.ndarray] = {}
        self.origin: dict[str, str] = {}
        self.uses: dict[str, int] = {}

    def add(self, name: str, value: np.ndarray) -> None:
        """Add a constant that the file stores."""
        self.constants[name] = value
        self.origin[name] = name

    def count(self, nodes: Iterable[Node]) -> None:
        """Count the readers of every value; before `fold`."""
        for node in nodes:
            for name in node.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1

    def fold(self, node: Node) -> bool:
        """Compute a node whose inputs are constants, unless that would separate weights that are shared."""
        given = [name for name in node.inputs if name]
        if not all(name in self.constants for name in given) or has_branches(node):
            return False
        weights = [name for name in given if self.constants[name].ndim > 1 and self.constants[name].dtype.kind == "f"]
        if any(self.uses[name] > 1 for name in weights) or (node.op in _REPEATING and self._is_large(node)):
            return False
        found = apply(Call(node), [self.constants[name] if name else None for name in node.inputs])
        if sum(value.size for value in found if value is not None) > _MOST_FOLDED:
            return False
        for name, value in zip(node.outputs, found, strict=False):
            if name:
                self.constants[name] = value
                if weights:
                    self.origin[name] = self.origin.get(weights[0], weights[0])
        return True

    def _is_large(self, node: Node) -> bool:
        """Whether a node that repeats a constant would make a large one."""
        sizes = self.constants[node.inputs[-1]]
        size = math.prod(max(int(n), 1) for n in sizes.reshape(-1))
        return size * self.constants[node.inputs[0]].size > _MOST_FOLDED


def has_branches(node: Node) -> bool:
    """Whether a node contains graphs."""
    return any(isinstance(value, FloatGraph) for value in node.attributes.values())


def needed(nodes: Sequence[Node], outputs: Sequence[str], known: Container[str]) -> list[Node]:
    """The nodes that the outputs need, in order; known: the names of inputs and constants.

    Raises:
      ReadError: nothing computes an output.
    """
    made = {name for node in nodes for name in node.outputs}
    for name in outputs:
        if name not in made and name not in known:
            raise ReadError(f"no node computes the output {name[:80]!r}: the model is damaged.")
    wanted, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def weights_of(
    nodes: Sequence[Node], folding: Folding, outputs: Sequence[str]
) -> tuple[list[Node], dict[str, np.ndarray], dict[str, np.ndarray], frozenset[str]]:
    """The nodes with the final names of weights, the parameters, the constants, and the moving statistics.

    Parameters are the floats in the place of a weight, and the stored arrays of several floats that are operands of
    another operator. What decides about shapes, and numbers that are not finite (masks), remain constants.
    """
    constants, origin = folding.constants, folding.origin
    roles: dict[str, set[str]] = {}
    for node in nodes:
        own = OPERATORS[node.op]
        for index, name in enumerate(node.inputs):
            if name in constants:
                known = index in own.static or -1 in own.static or has_branches(node)
                moving = node.op == "BatchNormalization" and index > 2
                role = "static" if known else "moving" if moving else "weight" if index in own.weights else "operand"
                roles.setdefault(name, set()).add(role)
    chosen: list[str] = []
    for name, of in roles.items():
        value = constants[name]
        is_float = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
        if not is_float or "static" in of or name in outputs or not np.isfinite(value.astype(np.float32)).all():
            continue
        if of & {"weight", "moving"} or (name in origin and value.size > 1):
            chosen.append(name)
    firsts = [origin.get(name, name) for name in chosen]
    renamed = {n: first if firsts.count(first) == 1 else n for n, first in zip(chosen, firsts, strict=True)}
    nodes = [dataclasses.replace(n, inputs=tuple(renamed.get(i, i) for i in n.inputs)) for n in nodes]
    read = {name for node in nodes for name in node.inputs} | set(outputs)
    kept = {name: value for name, value in constants.items() if name in read and name not in renamed}
    parameters = {renamed[name]: constants[name] for name in chosen}
    moving = frozenset(renamed[name] for name in chosen if roles[name] == {"moving"})
    return nodes, parameters, kept, moving
