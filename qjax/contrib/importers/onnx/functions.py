"""Reads float functions of one variable between two quantizers, as tables of codes.

    DequantizeLinear, Sigmoid, Mul, QuantizeLinear    ->    one table of 256 codes

Their codes are ONNX Runtime's own (`runtime_tables`). For another target, or if floats are allowed, the table is that
of the real function instead, correctly rounded, as in a model that was trained with qjax.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from qjax.contrib.importers.onnx import runtime_tables
from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.moves import first
from qjax.contrib.importers.onnx.runtime_tables import Question, Step
from qjax.contrib.importers.onnx.tensors import code_range
from qjax.contrib.importers.onnx.values import Known, Move, Pending, Value
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.numerics.elementary import Expression, table
from qjax.numerics.elementary.expression import Operand, literal
from qjax.numerics.lookup import FUNCTIONS
from qjax.support.errors import Unsupported

Inputs = list[Value | None]
Steps = list[tuple[str, tuple[Operand, ...]]]

_ON_CODES = {"Sigmoid": "QLinearSigmoid", "LeakyRelu": "QLinearLeakyRelu"}


def _n(value: float) -> str | bool:
    return literal(np.float32(value))


def _bare(name: str) -> Callable[[OnnxNode], Steps]:
    return lambda node: [(name, (0,))]


def _leaky(node: OnnxNode) -> Steps:
    return slope(node.get("alpha", 0.01, float))


def slope(alpha: float) -> Steps:
    """x if it is not negative, else alpha x."""
    return [("mul", (0, _n(alpha))), ("ge", (0, _n(0))), ("select", (2, 1, 0))]


def _elu(node: OnnxNode) -> Steps:
    return _exponential(node.get("alpha", 1.0, float))


def _selu(node: OnnxNode) -> Steps:
    gamma = node.get("gamma", 1.05070102214813232421875, float)
    return [*_exponential(node.get("alpha", 1.67326319217681884765625, float)), ("mul", (4, _n(gamma)))]


def _celu(node: OnnxNode) -> Steps:
    alpha = _n(node.get("alpha", 1.0, float))
    negative: Steps = [("div", (0, alpha)), ("expm1", (1,)), ("mul", (2, alpha))]
    return [*negative, ("gt", (0, _n(0))), ("select", (4, 3, 0))]


def _exponential(alpha: float) -> Steps:
    return [("expm1", (0,)), ("mul", (1, _n(alpha))), ("gt", (0, _n(0))), ("select", (3, 2, 0))]


def _ramp(alpha: float, beta: float) -> Steps:
    return [("mul", (0, _n(alpha))), ("add", (1, _n(beta))), ("clamp", (_n(0), 2, _n(1)))]


def _hard_sigmoid(node: OnnxNode) -> Steps:
    return _ramp(node.get("alpha", 0.2, float), node.get("beta", 0.5, float))


def _gelu(node: OnnxNode) -> Steps:
    if node.get("approximate", "none", str) == "tanh" and not node.domain:
        root = literal(math.sqrt(2 / math.pi))
        inner: Steps = [("integer_pow", (0, _n(3))), ("mul", (1, _n(0.044715))), ("add", (0, 2)), ("mul", (3, root))]
        return [*inner, ("tanh", (4,)), ("add", (5, _n(1))), ("mul", (0, 6)), ("mul", (7, _n(0.5)))]
    scaled: Steps = [("mul", (0, literal(math.sqrt(0.5)))), ("erf", (1,))]
    return [*scaled, ("add", (2, _n(1))), ("mul", (0, 3)), ("mul", (4, _n(0.5)))]


def _thresholded(node: OnnxNode) -> Steps:
    return [("gt", (0, _n(node.get("alpha", 1.0, float)))), ("select", (1, _n(0), 0))]


FORMS: dict[str, Callable[[OnnxNode], Steps]] = {
    "Sigmoid": _bare("logistic"),
    "Tanh": _bare("tanh"),
    "Erf": _bare("erf"),
    "Exp": _bare("exp"),
    "Log": _bare("log"),
    "Sqrt": _bare("sqrt"),
    "Abs": _bare("abs"),
    "Neg": _bare("neg"),
    "Floor": _bare("floor"),
    "Ceil": _bare("ceil"),
    "Round": _bare("round_even"),
    "Sin": _bare("sin"),
    "Cos": _bare("cos"),
    "Atan": _bare("atan"),
    "Sinh": _bare("sinh"),
    "Cosh": _bare("cosh"),
    "Sign": _bare("sign"),
    "LeakyRelu": _leaky,
    "Elu": _elu,
    "Selu": _selu,
    "Celu": _celu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda node: [*_ramp(1 / 6, 0.5), ("mul", (0, 3))],
    "Softplus": lambda node: [("exp", (0,)), ("log1p", (1,))],
    "Softsign": lambda node: [("abs", (0,)), ("add", (1, _n(1))), ("div", (0, 2))],
    "Mish": lambda node: [("exp", (0,)), ("log1p", (1,)), ("tanh", (2,)), ("mul", (0, 3))],
    "Reciprocal": lambda node: [("div", (_n(1), 0))],
    "ThresholdedRelu": _thresholded,
}
"""Operator -> a function from its node to the steps of an `Expression`."""


@handles(*FORMS)
def _function(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if len(inputs) != 1:
        raise Unsupported("has other operands than one")
    return [applied(walk, node, first(node, inputs), FORMS[node.op](node), None)]


@handles("Gelu", domain="com.microsoft")
def _gelu_of_microsoft(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    return _function(walk, node, inputs)


@handles("PRelu", "Pow", "Div")
def _with_a_number(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    number = inputs[1] if len(inputs) == 2 else None
    if not isinstance(number, Known) or number.value.size != 1 or number.type not in ("float32", "int32", "int64"):
        raise Unsupported("its second operand is not one constant number")
    value = float(np.float32(number.value.reshape(())))
    if node.op == "Div" and not (math.isfinite(value) and value):
        raise Unsupported(f"it divides by {value}")
    forms: dict[str, Steps] = {
        "PRelu": slope(value),
        "Pow": [("pow", (0, _n(value)))],
        "Div": [("div", (0, _n(value)))],
    }
    return [applied(walk, node, first(node, inputs), forms[node.op], value)]


def applied(walk: Walk, node: OnnxNode, x: Value, steps: Steps, constant: float | None) -> Pending:
    """The function of a value on a grid, or of one that is already a function of such a value."""
    numbers = {key: value for key, value in sorted(node.attributes.items()) if isinstance(value, (int, float, str))}
    own = Step(node.op, node.domain, tuple(numbers.items()), constant)
    if isinstance(x, Pending) and x.write is written and x.low is None and x.high is None and not x.moves:
        before: Steps = x.attributes["steps"]
        shifted = [(name, tuple(_shift_operand(o, len(before)) for o in operands)) for name, operands in steps]
        known = {"steps": [*before, *shifted], "chain": (*x.attributes["chain"], own)}
        return x.replace(attributes=known, name=node.outputs[0], names=(*x.names, x.name))
    source = walk.real(x)
    known = {"steps": steps, "chain": (own,)}
    shape = walk.draft.shape(source.tensor)
    found = Pending("table", node.outputs[0], shape, (source.tensor,), known, write=written)
    if source.permutation is None:
        return found
    after = tuple(shape[axis] for axis in source.permutation)
    move = Move("transpose", {"permutation": list(source.permutation)}, after, node.outputs[0])
    return found.replace(moves=(move,))


def _shift_operand(operand: Operand, count: int) -> Operand:
    """An operand of a step that follows `count` others, whose last value is its variable."""
    return operand if type(operand) is not int else operand + count


def written(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    """Write the node, with ONNX Runtime's table if that is requested."""
    (source,) = value.inputs
    own = walk.draft.grid(source)
    expression = Expression(tuple(value.attributes["steps"]))
    low, high = code_range(own.dtype)
    constants: dict[str, str] = {}
    if not walk.floats:
        codes = _ask_runtime(walk, value, own, grid)
        expression = _hide_name(expression, codes, own, grid)
        constants["table"] = walk.draft.constant(f"{name}/table", codes)
    walk.draft.tensor(name, value.shape, grid)
    attributes: dict[str, Any] = {"expression": expression.to_json(), "range": [low, high]}
    return walk.draft.node("table", (source,), name, attributes, {**constants, **clamps})


def _ask_runtime(walk: Walk, value: Pending, x: Grid, y: Grid) -> Any:
    if not runtime_tables.is_installed():
        raise Unsupported(
            "ONNX Runtime computes it in float, and only running it shows the last bits: pip install onnxruntime; or "
            "read(..., floats=True), which rounds the real function"
        )
    chain: tuple[Step, ...] = value.attributes["chain"]
    on_codes = _ON_CODES.get(chain[0].op) if walk.on_codes else None
    wide = any(grid.dtype.endswith("16") for grid in (x, y))
    grids = [(g.dtype, float(np.float32(1 if g.scale is None else g.scale)), int(g.zero_point)) for g in (x, y)]
    opset = min(max(walk.model.opset, 21 if wide else 13), 24)
    try:
        found = runtime_tables.answer(Question(chain, grids[0], grids[1], opset, on_codes))
    except ValueError as error:
        raise Unsupported(str(error)) from None
    if found.codes is None:
        raise Unsupported(
            "ONNX Runtime computes different results for equal codes, by their position in the tensor; read(..., "
            "floats=True) rounds the real function"
        )
    if found.option is not None:
        walk.options[found.option] = "1"
    return found.codes


def _hide_name(expression: Expression, codes: ArrayLike, x: Grid, y: Grid) -> Expression:
    """The function under a name that no target looks up, if the runtime's codes are not the correctly rounded ones.

    For named functions a target uses its own table, and that of ONNX Runtime counts as the correctly rounded one.
    """
    if expression.bare not in FUNCTIONS:
        return expression
    exact = table(
        expression, [], np.float32(1 if x.scale is None else x.scale), x.zero_point, code_range(x.dtype),
        np.float32(1 if y.scale is None else y.scale), y.zero_point, code_range(y.dtype),
    )  # fmt: skip
    if np.array_equal(exact, codes):
        return expression
    return dataclasses.replace(expression, steps=(*expression.steps, ("mul", (1, _n(1)))))
