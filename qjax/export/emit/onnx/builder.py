"""Writes the bodies of functions: nodes with unique names, in which equal constants and expressions exist only once.

A `Library` collects the model-local functions (domain "qjax") of one model. Equal bodies become one function, so nodes
with the same computation call the same function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from jax.typing import DTypeLike
from onnx import helper, numpy_helper

from qjax.support.names import Names

DOMAIN = "qjax"
OPSET = 26
"""The newest opset that ONNX Runtime 1.31 runs."""
IR_VERSION = 13
VERSION = 10
"""The version of the file format, as the metadata state it. Readers reject any other."""


def opset_imports() -> list[onnx.OperatorSetIdProto]:
    """What every function and model of this package imports."""
    return [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]


def element_type(dtype: DTypeLike) -> int:
    """ONNX's number for a numpy dtype or its name."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


class Library:
    """The model-local functions of one model, in the order of their definition.

    signed: whether MatMulInteger may combine weights of int8 with activations of uint8, whatever their size.
    for_runtime: whether the file is for ONNX Runtime alone: with float64 where that is exact, and optimised for its
    speed.
    """

    def __init__(self, *, signed: bool = False, for_runtime: bool = False) -> None:
        self.signed, self.for_runtime = signed, for_runtime
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.bodies: dict[Any, Any] = {}
        """What was written for a call, by the call's `nodes.key_of`."""
        self._by_body: dict[bytes, str] = {}
        self._names = Names()

    def add(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        nodes: Sequence[onnx.NodeProto],
        doc: str = "",
        attributes: Sequence[str] = (),
    ) -> str:
        """The name of the function with that body; `name`, or `name_2` and so on if another body has that name."""
        function = helper.make_function(
            DOMAIN, name, inputs, outputs, nodes, opset_imports(), attributes, doc_string=doc.strip()
        )
        key = function.SerializeToString(deterministic=True)
        if key not in self._by_body:
            function.name = self._names.fresh(name)
            self.functions[function.name] = function
            self._by_body[key] = function.name
        return self._by_body[key]


class Builder:
    """The nodes of one body. reserved: names that have another meaning in it."""

    def __init__(self, library: Library, reserved: Sequence[str] = (), parent: "Builder | None" = None) -> None:
        self.library = library
        self.nodes: list[onnx.NodeProto] = []
        # a subgraph sees the outer names and must not reuse one of them
        self._names = parent._names if parent is not None else Names(bare=False)
        self._names.add(*reserved)
        self._known: dict[object, str] = {}

    def fresh(self, hint: str) -> str:
        """A name that nothing in the body has so far."""
        return self._names.fresh(hint)

    def op(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """The output of a node; the same operation on the same inputs is one node."""
        key = (op, domain, inputs, tuple(sorted((name, str(value)) for name, value in attributes.items())))
        if key not in self._known:
            output = self.fresh(op.lower())
            self.nodes.append(helper.make_node(op, inputs, [output], domain=domain or None, **attributes))
            self._known[key] = output
        return self._known[key]

    def several(self, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """The outputs of a node that has several."""
        names = [self.fresh(op.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def call(self, function: str, *inputs: str) -> str:
        """The output of a function of this library."""
        return self.op(function, *inputs, domain=DOMAIN)

    def constant(self, value: Any) -> str:
        """A constant, once per value."""
        array = np.asarray(value)
        key = ("constant", array.dtype.name, array.shape, array.tobytes())
        if key not in self._known:
            output = self.fresh("constant")
            tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
            self.nodes.append(helper.make_node("Constant", [], [output], value=tensor))
            self._known[key] = output
        return self._known[key]

    def integers(self, values: Sequence[int]) -> str:
        """A constant of axes, shapes or indices."""
        return self.constant(np.asarray(values, np.int64))

    def cast(self, name: str, dtype: DTypeLike) -> str:
        """The same integers in another dtype; what does not fit keeps its low bits, as defined by ONNX's Cast."""
        return self.op("Cast", name, to=element_type(dtype))

    def live(self, outputs: Sequence[str]) -> list[onnx.NodeProto]:
        """The nodes that the outputs need."""
        needed, kept = set(outputs), list[onnx.NodeProto]()
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed |= _reads(node)
                kept.append(node)
        return kept[::-1]


def _reads(node: onnx.NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            names |= {value.name for value in attribute.g.output}
            names |= {name for inner in attribute.g.node for name in _reads(inner)}
    return names


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a node without those that are None."""
    return {name: value for name, value in values.items() if value is not None}
