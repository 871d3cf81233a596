"""The walk through a model's nodes: each operator has one handler, registered under its domain and name.

A handler takes what is known of a node's inputs (`values`) and returns what is known of its outputs. It raises
`Unsupported` for what it cannot express; the walk then continues, so that one error lists all such nodes.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from qjax.contrib.importers.onnx.draft import Draft, Grid
from qjax.contrib.importers.onnx.hints import Hints
from qjax.contrib.importers.onnx.model import Model, OnnxNode, Port
from qjax.contrib.importers.onnx.values import (
    Codes,
    FloatInput,
    Known,
    Pending,
    Real,
    Unknown,
    Value,
    Weight,
)
from qjax.export.read_errors import ReadError, reading
from qjax.graph.ir import Graph
from qjax.support.errors import Problems, Unsupported

Handler = Callable[["Walk", OnnxNode, list[Value | None]], list[Value]]

_HANDLERS: dict[tuple[str, str], Handler] = {}
_FOLDERS: dict[tuple[str, str], Handler] = {}

CODES = ("int8", "uint8", "int16", "uint16", "int32")
_INDICES = ("int32", "int64")
_CURES = {
    "DynamicQuantizeLinear": "its scale depends on the data: quantize statically, with calibration data",
    "DynamicQuantizeMatMul": "its scale depends on the data: quantize statically, with calibration data",
    **dict.fromkeys(
        ("DynamicQuantizeLSTM", "LSTM", "GRU", "RNN"),
        "ONNX Runtime computes its gates and its state in floats, which no integers reproduce: leave the layer out, "
        "or write its steps as products, Sigmoid, Tanh, Mul and Add between quantizers",
    ),
    "MatMulIntegerToFloat": "its result stays in floats: let a QuantizeLinear follow",
}


def _folds(node: OnnxNode, inputs: list[Value | None]) -> bool:
    """Whether a node is arithmetic with constants; quantizers of constants have their own handlers."""
    return all(value is None or isinstance(value, Known) for value in inputs)


def folds(*names: str) -> Callable[[Handler], Handler]:
    """Decorates the function that computes operators whose inputs are all constant."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _FOLDERS["", name] = handler
        return handler

    return register


def handles(*names: str, domain: str = "") -> Callable[[Handler], Handler]:
    """Decorates the handler of some operators."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[domain, name] = handler
        return handler

    return register


def handler(op: str) -> Handler:
    """The handler of an operator in ONNX's own domain."""
    return _HANDLERS["", op]


class Finisher(Protocol):
    """What the walk needs of `finish`: it writes an operation's nodes, once the parameters of its result are known."""

    def finish(self, walk: "Walk", value: Pending, name: str, grid: Grid) -> str: ...
    def accumulator(self, walk: "Walk", value: Pending, name: str) -> str: ...
    def in_between(self, walk: "Walk", value: Pending) -> list[str]: ...


class Walk:
    """One reading of a model, with every free size set to a number."""

    def __init__(
        self, model: Model, batch: int, hints: Hints, finisher: "Finisher", *, floats: bool, pairs: bool
    ) -> None:
        """Start a reading.

        Args:
          finisher: writes the nodes of operations on real numbers (the module `close_quantizer`, which imports this
            one).
          floats: whether to read what the runtime computes in float.
          pairs: whether the target sums int16 pairs.
        """
        self.model = model
        self.batch = batch
        self.hints = hints
        self.floats = floats
        self.pairs = pairs
        names = {name for node in model.nodes for name in node.outputs}
        self.draft = Draft(names | {port.name for port in model.inputs} | set(model.initializers))
        self.values: dict[str, Value] = {}
        self.problems = Problems()
        self.in_floats: list[str] = []
        self.transposed: dict[tuple[str, tuple[int, ...]], str] = {}
        self.readers: dict[str, int] = {}
        for node in model.nodes:
            for name in node.inputs:
                self.readers[name] = self.readers.get(name, 0) + 1
        for port in model.outputs:
            self.readers[port.name] = self.readers.get(port.name, 0) + 1
        self.order: dict[str, str] = {}
        self.loose: dict[str, str] = {}
        self.in_formula: set[str] = set()
        self.on_codes = False
        self.options: dict[str, str] = {}
        self.settlements: dict[int, tuple[Pending, Value]] = {}
        self.finisher = finisher

    def run(self) -> Graph:
        """The graph of the whole model."""
        for port in self.model.inputs:
            try:
                self.values[port.name] = self._input(port)
            except Unsupported as reason:
                self.problems.found.append(reason.at(f"input {port.name!r}"))
                self.values[port.name] = Unknown()
        for node in self.model.nodes:
            self._node(node)
        outputs = tuple(self._output(port) for port in self.model.outputs)
        if self.problems:
            raise ReadError(_listed(self.problems.lines, self.model))
        # Float inputs became codes under other names, in the order of their quantizers. Restore the model's order.
        self.draft.inputs = [name for port in self.model.inputs for name in self._fed(port)]
        return self.draft.graph(outputs, self._metadata())

    # ------------------------------------------------------------------ ends

    def _input(self, port: Port) -> Value:
        if port.dims is None:
            raise Unsupported("has no rank: give the model shapes (onnx.shape_inference)")
        shape = tuple(size if isinstance(size, int) else self.batch for size in port.dims)
        if port.type in ("float32", "float16"):
            return FloatInput(port.name, shape)
        if port.type in ("int64", "bool"):
            kind = "bool" if port.type == "bool" else None
            self.order[port.name] = self.draft.tensor(port.name, shape, None, kind)
            return Codes(port.name)
        if port.type not in CODES:
            raise Unsupported(f"expected float32, int8, uint8, int16, uint16, bool or int64 indices, got {port.type}")
        self.order[port.name] = self.draft.tensor(
            port.name, shape, Grid(port.type) if port.type != "int32" else None, port.type
        )
        return Codes(port.name)

    def _fed(self, port: Port) -> list[str]:
        if port.name in self.order:
            return [self.order[port.name]]
        raise ReadError(f"input {port.name!r} is never quantized: nothing reads it, or only floats do.")

    def _output(self, port: Port) -> str:
        if port.name not in self.values:
            raise ReadError(f"output {port.name!r} is never computed.")
        value = self.values[port.name]
        try:
            if isinstance(value, Pending) and value.integers:
                return self.finisher.accumulator(self, value, port.name)
            if isinstance(value, (Codes, Real)):
                return self.plain(value)
            if isinstance(value, Pending):
                settled = self.settled(value)
                if isinstance(settled, Real):
                    return settled.tensor
                raise Unsupported("is a float result: put QuantizeLinear and DequantizeLinear after it")
            if isinstance(value, (Known, Weight)):
                raise Unsupported("is a constant")
            if isinstance(value, FloatInput):
                raise Unsupported("is a float input: put QuantizeLinear and DequantizeLinear after it")
        except Unsupported as reason:
            self.problems.found.append(reason.at(f"output {port.name!r}"))
        return port.name

    def _metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {"read_from": "onnx"}
        if self.model.producer:
            found["producer"] = self.model.producer
        if self.in_floats:
            found["floats_in_onnxruntime"] = sorted(set(self.in_floats))
        if self.options:
            found["onnxruntime_session"] = dict(sorted(self.options.items()))
        return found

    # ------------------------------------------------------------------ nodes

    def _node(self, node: OnnxNode) -> None:
        if not node.outputs or not node.outputs[0]:
            raise ReadError(f"{node.title} has no first output.")
        inputs: list[Value | None] = [self.value(name) if name else None for name in node.inputs]
        outputs: list[Value] | None = None
        try:
            found = _HANDLERS.get((node.domain, node.op))
            if found is None or _folds(node, inputs):
                found = _FOLDERS.get((node.domain, node.op), found)
            if found is None:
                raise Unsupported(_CURES.get(node.op, "has no form in integers here"))
            # If an input could not be read, only the operator's kind can be checked.
            if not any(isinstance(value, Unknown) for value in inputs):
                with reading(node.title, Unsupported):
                    outputs = found(self, node, inputs)
        except Unsupported as reason:
            self.problems.found.append(reason.at(node.title))
        for index, name in enumerate(node.outputs):
            if name:
                known = outputs is not None and index < len(outputs)
                self.values[name] = outputs[index] if outputs is not None and known else Unknown()

    def value(self, name: str) -> Value:
        """What is known of the value with a name."""
        if name not in self.values and name in self.model.initializers:
            self.values[name] = self.model.initializer(name)
        return self.values[name]

    def in_float(self, name: str, reasons: tuple[str, ...]) -> None:
        """Refuse what ONNX Runtime would compute in float, or record it if that is allowed."""
        if not reasons:
            return
        if not self.floats:
            raise Unsupported(
                f"ONNX Runtime computes it in floats ({'; '.join(reasons)}), which no integers reproduce bit for bit; "
                "read(..., floats=True) reads it as integers with one rounding"
            )
        self.in_floats.append(name)

    # ------------------------------------------------------------------ values

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value."""
        if isinstance(value, Known):
            return tuple(value.value.shape)
        if isinstance(value, Weight):
            return tuple(value.codes.shape)
        if isinstance(value, FloatInput):
            return value.shape
        if isinstance(value, Pending):
            return value.last_shape
        if isinstance(value, Real):
            shape = self.draft.shape(value.tensor)
            return shape if value.permutation is None else tuple(shape[axis] for axis in value.permutation)
        assert isinstance(value, Codes)
        return self.draft.shape(value.tensor)

    def real(self, value: Value | None, what: str = "an input") -> Real:
        """A value with quantization parameters."""
        if isinstance(value, Pending):
            value = self.settled(value)
        if isinstance(value, Real):
            return value
        if isinstance(value, Weight):
            return Real(self.constant(value))
        raise Unsupported(f"{what} {_describe_missing(value)}")

    def settled(self, value: Pending) -> Value:
        """A value that needs no quantizer, as codes: moves, a relu (zero is a code), parts on one grid."""
        if id(value) not in self.settlements:
            # Store the value too, so that no other object can get its id.
            self.settlements[id(value)] = value, self._settled(value)
        return self.settlements[id(value)][1]

    def _settled(self, value: Pending) -> Value:
        if value.high is not None or value.low not in (None, 0) or value.steps:
            return value
        if value.grid is None:
            return value
        if value.unchanged and value.low is None and not value.moves:
            return Real(value.inputs[0])
        tensor = self.finisher.finish(self, value, value.last_name, value.grid)
        reasons = self.finisher.in_between(self, value)
        if value.low is not None or not value.unchanged:
            reasons.append(f"no QuantizeLinear follows {value.last_name!r}")
        if reasons:
            self.loose[tensor] = reasons[0]
        return Real(tensor)

    def plain(self, value: Codes | Real) -> str:
        """The tensor of a value's codes, with its transpose written as a node."""
        if isinstance(value, Codes) or value.permutation is None:
            return value.tensor
        key = (value.tensor, value.permutation)
        if key not in self.transposed:
            grid = self.draft.grid(value.tensor)
            name = self.draft.tensor(self.name_for(value.name), self.shape(value), grid)
            self.draft.node("transpose", (value.tensor,), name, {"permutation": list(value.permutation)})
            self.transposed[key] = name
        return self.transposed[key]

    def name_for(self, name: str) -> str:
        """A name in the graph for a value of the file: its own, if that is free."""
        return name if name not in self.draft.tensors else self.draft.fresh(name)

    def constant(self, weight: Weight) -> str:
        """Constant codes as an ordinary tensor."""
        if weight.axis is not None:
            raise Unsupported(f"the constant {weight.name!r} has a scale per channel, where one for all is expected")
        if weight.stored not in CODES[:4]:
            raise Unsupported(f"the constant {weight.name!r} has codes of type {weight.stored}")
        grid = Grid(weight.stored, np.float32(weight.scale), int(weight.zero_point))
        return self.draft.constant(weight.name, weight.codes, None, grid)


def _describe_missing(value: Value | None) -> str:
    if isinstance(value, Pending):
        return f"is the result of {value.name!r} in floats: a QuantizeLinear and a DequantizeLinear are missing between"
    if isinstance(value, FloatInput):
        return f"is the float input {value.name!r}: a QuantizeLinear and a DequantizeLinear are missing behind it"
    if isinstance(value, Known):
        return "is a constant in floats: it needs QuantizeLinear and DequantizeLinear, or codes and DequantizeLinear"
    return "holds codes where floats are expected: a DequantizeLinear is missing" if value is not None else "is missing"


_QONNX = ("qonnx.", "onnx.brevitas")
"""Domains of operators that round floats."""


def _listed(problems: list[str], model: Model) -> str:
    shown = problems[:200]
    lines = "".join(f"\n  - {problem}." for problem in shown)
    more = f"\n  and {len(problems) - len(shown)} more." if len(problems) > len(shown) else ""
    cure = "Quantize these statically, replace them, or cut the model in front of them (onnx.utils.extract_model)."
    if any(node.domain.startswith(_QONNX) for node in model.nodes):
        cure = (
            "This is QONNX, whose tensors are floats that Quant nodes round. qjax writes such files for FPGAs, and "
            "reads files with integers: QDQ, QOperator, and its own other styles. Keep the file of graph.save for a "
            "model of qjax; of another tool take its QDQ export (of Brevitas, export_onnx_qcdq)."
        )
    return f"{len(problems)} of the model's operators cannot be read:{lines}{more}\n{cure}"
