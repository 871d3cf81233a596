"""Finds factors that can move through a model, by following a tensor through everything that computes and reads it.

The tensors of a state (a key-value cache) begin with a label for every element along some of their axes. Every equation
that computes or reads a labelled tensor relates its labels to those of its other operands (`relations`), until
parameters absorb the factors. Whatever no relation covers has the factor 1, and so does everything that it meets: an
unknown operation, an argument that is not a state, a result. The factors of the remaining labels therefore change no
result, by construction:

- elements of a tensor are divided by the factors of their labels, and those with label -l multiplied by that of l;
- a product contracts labels with their inverses, such as those of keys with those of queries.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.post_training.labels import Labels, Union, compressed
from qjax.contrib.post_training.relations import RELATIONS
from qjax.model.call import Call
from qjax.tracing import Equation, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One float array of a state. name: of the model's input. before, after: the argument, and its next value."""

    name: str
    before: Value
    after: Value


@dataclasses.dataclass(frozen=True, eq=False)
class Symmetries:
    """What can change, and by which factors; label 0 stands for the factor 1.

    Attributes:
      states: the labels of each array of the state that has several.
      parameters: path -> labels.
      left: name of an array of the state -> why it has no factors.
    """

    states: Mapping[Leaf, Labels]
    parameters: Mapping[str, Labels]
    left: Mapping[str, str]


def find_symmetries(
    call: Call, leaves: Sequence[Leaf], parameters: Collection[str], weights: Collection[str], fixed: Collection[str]
) -> Symmetries:
    """Find the factors that can move between the arrays of a state and the parameters.

    Args:
      leaves: the float arrays of the state.
      parameters: the paths that may change. weights: those of them that a layer multiplies by unchanged. fixed: names
        of quantizers whose scale does not follow the data.
    """

    def run(axes: Mapping[Leaf, Collection[int]]) -> Symmetric:
        found = Symmetric(call, leaves, parameters, weights, fixed)
        for leaf in leaves:
            shape = [size if axis in axes[leaf] else 1 for axis, size in enumerate(leaf.after.shape)]
            found.begin(leaf, shape)
        found.follow()
        return found

    # Labels along one axis at a time show which axes have factors, because there are too many elements for all at once.
    free: dict[Leaf, set[int]] = {leaf: set() for leaf in leaves}
    why: dict[str, str] = {}
    for axis in range(max((len(leaf.after.shape) for leaf in leaves), default=0)):
        one = run({leaf: {axis} for leaf in leaves})
        for leaf in leaves:
            if axis < len(leaf.after.shape) and leaf.after.shape[axis] > 1:
                labels = one.union.free(one.labels[leaf.after])
                if len(np.unique(labels)) > 1:
                    free[leaf].add(axis)
                else:
                    reason = one.union.why(one.labels[leaf.after])
                    # The last axes are heads and channels, where a reason is more informative than along positions.
                    why[leaf.name] = reason or why.get(leaf.name, "all of its elements have one factor")
    return run(free).result(leaves, why)


class Symmetric:
    """The labels of a program while they are followed."""

    def __init__(
        self,
        call: Call,
        leaves: Sequence[Leaf],
        parameters: Collection[str],
        weights: Collection[str],
        fixed: Collection[str],
    ) -> None:
        traced, self._annotation = call.traced, call.annotation
        program = traced.program
        self.union, self.labels = Union(), dict[Value, Labels]()
        self.chosen: dict[Equation, Any] = {}
        self.scales: dict[Value, None] = {}
        self.made = {value: eqn for eqn in program.equations for value in eqn.outputs}
        self.readers: dict[Value, list[Equation]] = {}
        for eqn in program.equations:
            for value in dict.fromkeys(eqn.inputs):
                self.readers.setdefault(value, []).append(eqn)
        own = zip(program.inputs, traced.names, traced.constant, strict=True)
        self._path = {value: name for value, name, is_state in own if is_state}
        self._allowed = {leaf.before for leaf in leaves}
        returned = Counter(traced.results.outputs)
        self._next = {leaf.after for leaf in leaves}
        self._returned = {value for value, times in returned.items() if times > 1 or value not in self._next}
        self._written = {value for name, value in traced.written()}
        self._parameters, self._weights, self._fixed = set(parameters), set(weights), set(fixed)
        self._pinned: dict[Value, str] = {}
        self._layered: dict[Value, bool] = {}
        self._todo: list[Equation] = []

    def begin(self, leaf: Leaf, shape: Sequence[int]) -> None:
        """Label the next value of an array of the state, and the array itself alike."""
        labels = self.union.fresh(shape)
        self.visit(leaf.after, labels)
        self.visit(leaf.before, labels)

    def follow(self) -> None:
        """Apply relations until no further tensor gets labels."""
        while self._todo:
            eqn = self._todo.pop()
            relation = RELATIONS.get(eqn.primitive)
            if relation is None or eqn.body is not None:
                self.refuse(eqn, f"{eqn.primitive!r} reads or makes it")
            else:
                relation(self, eqn)

    def visit(self, value: Value, labels: Labels) -> None:
        """Record that a tensor has these labels."""
        if value.constant is not None:
            if np.any(np.asarray(value.constant) != 0):
                self.union.none(labels, "a constant is added to it, or is the other branch of a select")
            return
        if value in self.labels:
            self.union.join(self.labels[value], labels)
            return
        self.labels[value] = labels
        why = self._pinned.get(value) or self._forbidden(value)
        if why is not None:
            self.union.none(labels, why)
        self._todo += [*self.readers.get(value, ()), *([self.made[value]] if value in self.made else [])]

    def pin(self, value: Value, why: str) -> None:
        """Record that a tensor has the factor 1."""
        self._pinned.setdefault(value, why)
        if value in self.labels:
            self.union.none(self.labels[value], why)

    def refuse(self, eqn: Equation, why: str) -> None:
        """Give all tensors of an equation the factor 1."""
        for value in (*eqn.inputs, *eqn.outputs):
            if value.constant is None:
                self.pin(value, why)

    def known(self, values: Sequence[Value]) -> list[Value]:
        """The values that have labels."""
        return [value for value in values if value in self.labels]

    def from_layers(self, value: Value) -> bool:
        """Whether a tensor depends on a product with a weight, or on the state. Sines of positions do not."""
        todo, seen = [value], set[Value]()
        while todo and value not in self._layered:
            one = todo.pop()
            eqn = self.made.get(one)
            weighted = (
                eqn is not None
                and eqn.primitive == "dot_general"
                and any((eqn, i) in self._annotation.weights for i in range(len(eqn.inputs)))
            )
            if self._layered.get(one) or one in self._allowed or weighted:
                self._layered[value] = True
            elif eqn is not None and one not in seen and one not in self._layered:
                todo += eqn.inputs
            seen.add(one)
        return self._layered.setdefault(value, False)

    def _forbidden(self, value: Value) -> str | None:
        """Why a tensor may not change; None if it may."""
        if not value.is_float:
            return "it is not a float tensor"
        if value in self._returned:
            return "the model returns a result computed from it"
        if value in self._written and value in self.made:
            return "the model stores a result computed from it"
        place = self._annotation.values.get(value)
        if place is not None and place.name in self._fixed:
            return f"the scale of {place.name!r} is fixed"
        for eqn in self.readers.get(value, ()):
            for index, one in enumerate(eqn.inputs):
                weight = self._annotation.weights.get((eqn, index))
                if one is value and weight is not None and weight.name not in self._weights:
                    return f"the weight {weight.name!r} is not an unchanged parameter"
        if value in self.made or value in self._allowed:
            return None
        if value not in self._path:
            return "it is combined with an argument that is not a state"
        return None if self._path[value] in self._parameters else f"{self._path[value]!r} is no parameter"

    def result(self, leaves: Sequence[Leaf], why: Mapping[str, str]) -> Symmetries:
        """Everything that has free labels."""
        free = {value: compressed(self.union.free(labels)) for value, labels in self.labels.items()}
        states = {leaf: free[leaf.after] for leaf in leaves if free[leaf.after].size > 1}
        own = np.unique(np.abs(np.concatenate([[0], *(labels.ravel() for labels in states.values())])))[1:]
        parameters = {
            self._path[value]: labels
            for value, labels in free.items()
            if value in self._path and np.any(np.isin(np.abs(labels), own))
        }
        left = {leaf.name: why.get(leaf.name, "no axis has factors") for leaf in leaves if leaf not in states}
        taken = [np.abs(free[value]).ravel() for value in self.scales if value in free]
        taken = np.intersect1d(np.concatenate([[0], *taken]), own)
        left |= {
            f"{leaf.name}, its heads": "a norm's scale, which all of them share, absorbs their factors"
            for leaf, labels in states.items()
            if np.any(np.isin(np.abs(labels), taken))
        }
        return Symmetries(states, parameters, left)
