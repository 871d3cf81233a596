"""Translates elementwise equations on one value to the steps of an `elementary.Expression`.

    exp(-x); 1 + that; 1 / that    ->    the expression with the steps neg, exp, add, div

Calls that the tracer did not inline (`jax.nn.silu`, custom derivatives) are opened here. The expression holds only the
function's value; its derivative remains that of the equation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.numerics.elementary import PRIMITIVES, Expression
from qjax.numerics.elementary.expression import BOOLEAN, Operand, literal
from qjax.numerics.meshes import PLACEMENTS
from qjax.tracing.program import CALLED, Equation

_LOGIC = {"and", "or", "xor", "not"}
_PLAIN = frozenset(PRIMITIVES) - {"select", "integer_pow", "round_even", "round_away"} - _LOGIC
IDENTITIES = PLACEMENTS | frozenset(
    "copy copy_p stop_gradient optimization_barrier reduce_precision name identity".split()  # noqa: SIM905
)
"""Primitives that do not change numbers."""

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})


class NotElementwise(Exception):
    """Raised for equations that are no elementwise function of one value, or that no expression can represent."""


class Builder:
    """Collects steps. Operands are literals and numbers of values; those of parameters are negative until `done`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.steps: list[tuple[str, tuple[Operand, ...]]] = []
        self.parameters: list[Any] = []

    def parameter(self, key: Any) -> Operand:
        """A scalar that is known only when the model runs; `key` identifies it."""
        if key not in self.parameters:
            self.parameters.append(key)
        return -1 - self.parameters.index(key)

    def done(self, result: Operand) -> Expression:
        """The expression whose value is `result`."""
        if type(result) is not int or result <= 0:
            raise NotElementwise("the result is no step")
        live = {result}
        for number in range(result, 0, -1):
            if number in live:
                live.update(o for o in self.steps[number - 1][1] if type(o) is int and o > 0)
        count, kept = len(self.parameters), sorted(live)
        numbers = {old: count + new for new, old in enumerate(kept, 1)} | {0: 0}

        def renamed(operand: Operand) -> Operand:
            if type(operand) is not int:
                return operand
            return -operand if operand < 0 else numbers[operand]

        steps = (self.steps[number - 1] for number in kept)
        return Expression(tuple((name, tuple(map(renamed, given))) for name, given in steps), count)

    def equation(self, eqn: Equation, operands: Sequence[Operand]) -> list[Operand]:
        """Add the steps of an equation; returns the operands that stand for its outputs."""
        inner = called(eqn.primitive, eqn.source)
        if inner is not None:
            return self._call(inner, operands)
        dtypes = [value.dtype for value in eqn.inputs]
        return [self._step(eqn.primitive, eqn.params, operands, dtypes, eqn.outputs[0].shape, eqn.outputs[0].dtype)]

    def _call(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        env: dict[object, Operand] = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = constant(const)

        def read(var: Any) -> Operand:
            return constant(var.val) if hasattr(var, "val") else env[var]

        for eqn in closed.jaxpr.eqns:
            given = [read(var) for var in eqn.invars]
            inner = called(eqn.primitive.name, eqn)
            if inner is not None:
                outputs = self._call(inner, given)
            else:
                dtypes, out = [var.aval.dtype for var in eqn.invars], eqn.outvars[0].aval
                outputs = [self._step(eqn.primitive.name, eqn.params, given, dtypes, tuple(out.shape), out.dtype)]
            for var, output in zip(eqn.outvars, outputs, strict=len(outputs) > 1):
                env[var] = output
        return [read(var) for var in closed.jaxpr.outvars]

    def _step(
        self,
        primitive: str,
        params: Mapping[str, Any],
        given: Sequence[Operand],
        dtypes: Sequence[Any],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> Operand:
        first = given[0] if given else None
        if first is None or (any(_varies(o) for o in given) and shape != self.shape):
            raise NotElementwise(primitive)
        if primitive in IDENTITIES and len(given) == 1:
            return first
        if primitive in _MOVES:
            # moves of a scalar, and moves that keep the shape, do not change the value
            return first
        if primitive == "convert_element_type":
            return self._converted(first, dtypes[0], dtype)
        if primitive in _LOGIC or primitive in ("eq", "ne"):
            return self._logic(primitive, given, dtypes)
        if primitive == "select_n":
            if dtypes[0] != np.bool_ or len(given) != 3:
                raise NotElementwise(primitive)
            if dtypes[1] == np.bool_:
                return self._chosen(given)
            return self.add("select", *given)
        floats = dtypes if primitive in BOOLEAN else (*dtypes, dtype)
        if not all(jax.dtypes.issubdtype(d, np.floating) for d in floats):
            raise NotElementwise(primitive)
        special = _SPECIAL.get(primitive)
        if special is not None:
            return special(self, params, given)
        if primitive not in _PLAIN or len(given) != PRIMITIVES[primitive]:
            raise NotElementwise(primitive)
        return self.add(primitive, *given)

    def add(self, primitive: str, *given: Operand) -> Operand:
        """Add one step and return its operand."""
        self.steps.append((primitive, given))
        return len(self.steps)

    def _converted(self, operand: Operand, before: Any, after: Any) -> Operand:
        if type(operand) is not int:
            value = float.fromhex(operand) if isinstance(operand, str) else operand
            return literal(np.asarray(value).astype(after)[()])
        is_float = jax.dtypes.issubdtype(after, np.floating)
        if is_float and before == np.bool_:
            return self.add("select", operand, literal(0.0), literal(1.0))
        if is_float and jax.dtypes.issubdtype(before, np.floating):
            return operand
        if after == np.bool_ and jax.dtypes.issubdtype(before, np.floating):
            return self.add("ne", operand, literal(0.0))
        raise NotElementwise("convert_element_type")

    def _logic(self, primitive: str, given: Sequence[Operand], dtypes: Sequence[Any]) -> Operand:
        boolean = all(dtype == np.bool_ for dtype in dtypes)
        if primitive in ("eq", "ne") and not boolean:
            if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in dtypes):
                raise NotElementwise(primitive)
            return self.add(primitive, *given)
        if not boolean:
            raise NotElementwise(primitive)
        if primitive in ("eq", "ne"):
            differs = self.add("xor", *given)
            return self.add("not", differs) if primitive == "eq" else differs
        return self.add(primitive, *given)

    def _chosen(self, given: Sequence[Operand]) -> Operand:
        """`select_n` between truth values."""
        which, no, yes = given
        taken, other = self.add("and", which, yes), self.add("and", self.add("not", which), no)
        return self.add("or", taken, other)


def constant(value: Any) -> Operand:
    """The operand of a literal, or of an array's only element."""
    array = np.asarray(value)
    if array.size != 1:
        raise NotElementwise("constants of several elements")
    return literal(array.reshape(())[()])


def called(primitive: str, source: Any) -> Any:
    """The closed jaxpr of a call, or None."""
    name = getattr(getattr(source, "primitive", None), "name", None)
    if name in CALLED and primitive not in ("relu", "relu6"):
        return source.params[CALLED[name]]
    return None


def _varies(operand: Operand) -> bool:
    return type(operand) is int and operand >= 0


def _power(b: Builder, params: Mapping[str, Any], given: Sequence[Operand]) -> Operand:
    if abs(params["y"]) > 256:
        raise NotElementwise("integer_pow")
    return b.add("integer_pow", given[0], literal(params["y"]))


def _round(b: Builder, params: Mapping[str, Any], given: Sequence[Operand]) -> Operand:
    even = params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return b.add("round_even" if even else "round_away", given[0])


def _polynomial(b: Builder, params: Mapping[str, Any], given: Sequence[Operand]) -> Operand:
    """Ascending coefficients, by Horner's rule."""
    x, *coefficients = given
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = b.add("add", b.add("mul", total, x), coefficient)
    return total


_SPECIAL: Mapping[str, Callable[[Builder, Mapping[str, Any], Sequence[Operand]], Operand]] = {
    "add_any": lambda b, params, given: b.add("add", *given),
    "integer_pow": _power,
    "log2": lambda b, params, given: b.add("div", b.add("log", given[0]), b.add("log", literal(2.0))),
    "polynomial": _polynomial,
    "relu": lambda b, params, given: b.add("max", given[0], literal(0.0)),
    "relu6": lambda b, params, given: b.add("clamp", literal(0.0), given[0], literal(6.0)),
    "round": _round,
}
