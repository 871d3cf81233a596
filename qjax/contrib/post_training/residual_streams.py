"""Finds residual streams: tensors that layers add to and that only norms and dense layers read.

A rotation of such a stream changes no result if everything that writes to it rotates its output, and everything that
reads it rotates back. Streams are found in the annotated program, whatever the layers are called:

- dense layers, rows of tables, added parameters, and sums of all these may write to it;
- norms over its last axis whose results only dense layers read, and dense layers themselves, may read it.
"""

import dataclasses
from collections import Counter
from typing import Any

from qjax.contrib.post_training.pairs import input_axis
from qjax.contrib.post_training.products import Product, find_products
from qjax.model.call import Call
from qjax.tracing import Equation, Value

_KEEPS = frozenset({"reshape", "broadcast_in_dim", "convert_element_type", "copy", "dropout", "slice", "squeeze"})
"""Operations that do not change the last axis as long as its length stays the same."""

_NORMS = frozenset({"layer_norm", "rms_norm"})


@dataclasses.dataclass
class Norm:
    """A norm that reads the stream.

    Attributes:
      scale, bias: the paths of its parameters, or None.
      read: the weights that read its result, with the axis of their inputs.
    """

    scale: str | None
    bias: str | None
    read: list[tuple[str, int]]


@dataclasses.dataclass
class Residual:
    """One stream.

    Attributes:
      width: the length of its last axis.
      written: parameters whose numbers along an axis are written to it, with that axis.
      read: weights that read it directly, with the axis of their inputs.
      norms: the norms that read it.
    """

    width: int
    written: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    read: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    norms: list[Norm] = dataclasses.field(default_factory=list[Norm])


class _Refused(Exception):
    """Why a tensor belongs to no stream."""


def find_residuals(call: Call, names: tuple[str, ...]) -> tuple[list[Residual], list[str]]:
    """The streams of a model, and the reasons why other tensors are none.

    Args:
      call: a call of the model. names: the weights that are unchanged parameters.
    """
    program = call.traced.program
    seen: set[Value] = set()
    found: list[Residual] = []
    left: dict[str, None] = {}
    for eqn in program.equations:
        layer = eqn.params.get("layer")
        if layer is None or eqn.primitive not in _NORMS or eqn.inputs[0] in seen:
            continue
        finder = _Finder(call, names, eqn.inputs[0].shape[-1])
        try:
            finder.expand(eqn.inputs[0])
            found.append(finder.residual)
        except _Refused as reason:
            left[str(reason)] = None
        seen |= finder.values
    return found, list(left)


class _Finder:
    def __init__(self, call: Call, names: tuple[str, ...], width: int) -> None:
        traced = call.traced
        self._made = {value: eqn for eqn in traced.program.equations for value in eqn.outputs}
        self._readers: dict[Value, list[Equation]] = {}
        for eqn in traced.program.equations:
            for value in eqn.inputs:
                self._readers.setdefault(value, []).append(eqn)
        own = zip(traced.program.inputs, traced.names, traced.constant, strict=True)
        self._path = {value: name for value, name, is_state in own if is_state}
        self._uses = Counter(value for eqn in traced.program.walk() for value in eqn.inputs)
        self._product = {product.equation: product for product in find_products(call, names)[0]}
        self._outputs = set(traced.program.outputs)
        self.residual, self.values = Residual(width), set[Value]()

    def expand(self, value: Value) -> None:
        """Add a tensor to the stream, with everything that writes and reads it."""
        todo = [value]
        while todo:
            value = todo.pop()
            if value in self.values:
                continue
            if not value.shape or value.shape[-1] != self.residual.width:
                raise _Refused("something of another width is added to it")
            if value in self._outputs and value in self._made:
                raise _Refused("the model returns it")
            self.values.add(value)
            todo += self._writers(value)
            for eqn in self._readers.get(value, ()):
                todo += self._read_by(eqn, value)

    def _writers(self, value: Value) -> list[Value]:
        eqn = self._made.get(value)
        if eqn is None:
            self.residual.written[self._own(value)] = len(value.shape) - 1
            return []
        if eqn in self._product:
            product = self._product[eqn]
            axis = dict(product.channels).get(len(value.shape) - 1)
            if axis is None:
                raise _Refused("a product with other channels writes to it")
            self.residual.written[product.name] = axis
            return []
        layer = eqn.params.get("layer")
        if layer is not None and "table" in layer.operands:
            table = eqn.inputs[layer.operands.index("table")]
            self.residual.written[self._own(table)] = 1
            return []
        if eqn.primitive == "add":
            return list(eqn.inputs)
        if eqn.primitive in _KEEPS:
            return [eqn.inputs[0]]
        raise _Refused(f"{eqn.primitive!r} writes to it")

    def _read_by(self, eqn: Equation, value: Value) -> list[Value]:
        layer = eqn.params.get("layer")
        if eqn.primitive == "add" or eqn.primitive in _KEEPS:
            return list(eqn.outputs)
        if eqn in self._product:
            name, axis = self._reading(self._product[eqn], value)
            self.residual.read[name] = axis
            return []
        if layer is not None and eqn.primitive in _NORMS and eqn.inputs[0] is value:
            self.residual.norms.append(self._norm(eqn, layer))
            return []
        raise _Refused(f"{eqn.primitive!r} reads it")

    def _norm(self, eqn: Equation, layer: Any) -> Norm:
        attributes, last = dict(layer.attributes), len(eqn.out_shapes[0]) - 1
        (output,) = eqn.outputs
        if tuple(attributes["axes"]) != (last,) or attributes.get("groups", 1) != 1 or output in self._outputs:
            raise _Refused("a norm over other axes reads it, or the model returns a norm's result")
        if tuple(attributes["feature_axes"]) not in ((last,), ()):
            raise _Refused("a norm with parameters of other axes reads it")
        paths = {
            name: self._own(eqn.inputs[layer.operands.index(name)])
            for name in ("scale", "bias")
            if name in layer.operands
        }
        read: list[tuple[str, int]] = []
        for reader in self._readers.get(output, ()):
            if reader not in self._product:
                raise _Refused(f"{reader.primitive!r} reads the result of a norm")
            read.append(self._reading(self._product[reader], output))
        return Norm(paths.get("scale"), paths.get("bias"), read)

    def _reading(self, product: Product, value: Value) -> tuple[str, int]:
        axes = input_axis(product)
        data = product.equation.inputs[1 - product.weight]
        if product.equation.primitive != "dot_general" or axes is None or data is not value:
            raise _Refused("a product that is not a dense layer reads it")
        if axes[0] != len(value.shape) - 1:
            raise _Refused("a dense layer over another axis reads it")
        return product.name, axes[1]

    def _own(self, value: Value) -> str:
        if value not in self._path or self._uses[value] != 1:
            raise _Refused("an input, a constant or a parameter that is used twice is added to it")
        return self._path[value]
