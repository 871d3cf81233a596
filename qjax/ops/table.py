"""Elementwise functions of one tensor as tables of codes: activations, roots, powers, and any chain of them.

    y = f(x)    ->    table[q - qmin], with the entries round(f((q - z) s) / s_y) + z_y

The rewriter `tracing.rewrites.tables` turns such a chain into one equation "table" with an `elementary.Expression`. The
table has an entry for every possible code of the input: 256, or 65,536 for codes of 16 bits (64 KiB of int8, 128 KiB of
int16). Each entry is correctly rounded. There is no interpolation.
"""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.elementary import Expression, float32, table, with_finite_slope
from qjax.numerics.lookup import FUNCTIONS
from qjax.numerics.tables import GEMMLOWP_GRIDS, function_table
from qjax.ops.base import (
    Attributes,
    Constants,
    Elementwise,
    Equation,
    Preparation,
    Prepared,
    Role,
    Unit,
    real,
    register,
)
from qjax.ops.epilogue import clamp_codes
from qjax.ops.float_accumulator import Pending
from qjax.ops.values import Quantized

_UNITS: dict[str | None, Unit] = {"logistic": "unsigned", "tanh": "signed"}


class PreparedFields(TypedDict):
    """range: the first and the last code that the table covers."""

    range: list[int]


class Fields(TypedDict):
    """expression: the function, see `ops.recomputed`. range: the codes that the table covers."""

    expression: Any
    range: NotRequired[list[int]]


@register
class Table(Elementwise):
    """y = f(x), element by element, from the constant `table`; attributes: `expression` and the input's `range`."""

    name = "table"
    fields = Fields
    prepared = PreparedFields
    role = Role.PRODUCER
    primitives = ("table",)
    takes_steps = False
    tabulates = True
    may_be_probabilities = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and all(constant[1:])

    def unit(self, eqn: Equation) -> Unit | None:
        return _UNITS.get(_expression(eqn).bare)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"expression": _expression(eqn).to_json()}

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {f"parameter{index - 1}": index for index in range(1, len(eqn.in_shapes))}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *parameters = inputs
        dtype = eqn.out_dtypes[0]
        wide = x.real32() if hasattr(x, "real32") else jnp.asarray(x).astype(jnp.float32)
        numbers = [real(p) for p in parameters]

        def function(x: jax.Array, *numbers: Any) -> jax.Array:
            # in float32 these are the model's own equations, with their own derivatives
            return eqn.bind(x, *numbers)[0] if eqn.params["float32"] else float32(_expression(eqn), x, numbers)

        steep = isinstance(x, Quantized) and eqn.params["steep"]
        y = with_finite_slope(function, wide, x.scale, numbers) if steep else function(wide, *numbers)
        return [Pending.of_real(y, dtype)]

    def prepare(self, given: Preparation) -> Prepared:
        expression = Expression.from_json(given.attributes["expression"])
        x, y = given.inputs[0], given.output
        assert x.qmin is not None
        assert x.qmax is not None
        attributes = {"range": [x.qmin, x.qmax]}
        parameters = [given.constants[f"parameter{i}"] for i in range(expression.parameters)]
        operands = [x.scale, x.zero_point, y.scale, y.zero_point, *parameters]

        def made(*values: Any) -> np.ndarray:
            return _codes(expression, given, *(np.asarray(v) for v in values))

        if host_or_trace(*operands) is np:
            return Prepared({"table": made(*operands)}, attributes)
        result = jax.ShapeDtypeStruct((x.qmax - x.qmin + 1,), np.dtype(y.dtype))
        # the table is a constant of the graph: no gradient flows through it
        stopped = [lax.stop_gradient(jnp.asarray(v)) for v in operands]
        return Prepared({"table": jax.pure_callback(made, result, *stopped, vmap_method="sequential")}, attributes)

    def restated(self, given: Preparation) -> Prepared | None:
        expression = Expression.from_json(given.attributes["expression"])
        if "table" in given.constants and expression.bare not in FUNCTIONS:
            # the codes are those of the exact function, so they do not depend on the target
            return None
        return self.prepare(given)

    def arithmetic(self, attributes: Attributes) -> str:
        low, high = attributes["range"]
        return f"a table of {high - low + 1} codes"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        index = inputs[0].astype(jnp.int32) - np.int32(attributes["range"][0])
        codes = jnp.take(jnp.asarray(constants["table"]), index, axis=0, mode="clip")
        return clamp_codes(codes, constants)


def _expression(eqn: Equation) -> Expression:
    return Expression.from_json(eqn.params["expression"])


def _codes(expression: Expression, given: Preparation, *values: np.ndarray) -> np.ndarray:
    """The table, on the host."""
    s_x, z_x, s_y, z_y, *parameters = values
    x, y = given.inputs[0], given.output
    assert x.qmin is not None
    assert x.qmax is not None
    assert y.qmin is not None
    assert y.qmax is not None
    x_range, y_range = (x.qmin, x.qmax), (y.qmin, y.qmax)
    method, name = given.target.tables, expression.bare
    eight_bits = np.dtype(x.dtype).itemsize == 1 and np.dtype(y.dtype).itemsize == 1
    if method != "exact" and name is not None and name in FUNCTIONS and eight_bits:
        grid = float(s_y.reshape(())), int(z_y.reshape(()))
        whole = x_range == y_range == (-128, 127)
        if method != "gemmlowp" or (whole and grid == GEMMLOWP_GRIDS[name]):
            numbers = np.float32(s_x.reshape(())), int(z_x.reshape(())), np.float32(grid[0]), grid[1]
            return function_table(method, name, *numbers, x_range=x_range, y_range=y_range).astype(y.dtype)
    return table(expression, parameters, s_x, z_x, x_range, s_y, z_y, y_range).astype(y.dtype)
