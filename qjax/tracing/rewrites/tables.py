"""Combines elementwise functions: each chain of equations on one value becomes one equation "table".

    a = neg(x); b = exp(a); c = add(b, 1); y = div(x, c)    ->    y = table[x / (1 + exp(-x))](x)

Every value has a root, of which it is an elementwise function. The root is found by going back through elementwise
equations whose other operands are single numbers (literals, or parameters of one element). Affine steps and clamps are
not changed, because after an accumulator they are free. Any other chain becomes one function of its root, however many
equations it has: `x * sigmoid(x)`, `where(x >= 0, x, a * x)`, `tanh(2 * x)`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer

from qjax.numerics.elementary import is_steep
from qjax.numerics.elementary.expression import Operand
from qjax.tracing.composite import composite
from qjax.tracing.expressions import IDENTITIES, Builder, NotElementwise, constant
from qjax.tracing.program import Equation, Program, Value, has_own_backward

_OTHERS = frozenset({"softmax", "log_softmax", "logsumexp", "standardize"})
"""Functions over an axis, whose steps are not tables on their own."""

_STEPS = frozenset({"add", "sub", "mul", "div", "add_any"})
_CLAMPS = frozenset({"max", "min", "clamp", "relu", "relu6"})


def find_tables(program: Program) -> Program:
    """Replace each elementwise function that needs a table by one equation with the operands x and parameters."""
    return _Tables(program).rewritten()


class _Tables:
    """roots: of values that are elementwise functions of another. linear: whether affine steps and clamps suffice."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {value: eqn for eqn in program.equations for value in eqn.outputs}
        self.roots: dict[Value, Value] = {}
        self.linear: dict[Value, bool] = {}
        self.members: set[Equation] = set()
        for eqn in program.equations:
            self._visit(eqn)

    # ------------------------------------------------------------------ what depends on what

    def _visit(self, eqn: Equation) -> None:
        if eqn.body is not None or eqn.function in _OTHERS or all(self._fixed(v) for v in eqn.inputs):
            return
        data = list(dict.fromkeys(v for v in eqn.inputs if self._scalar(v) is None))
        roots = {self.roots.get(v, v) for v in data}
        if len(roots) != 1 or len(eqn.outputs) != 1:
            return
        (root,) = roots
        (output,) = eqn.outputs
        if not root.is_float or any(v.shape != root.shape for v in (*data, output)):
            return
        try:
            builder = Builder(root.shape)
            builder.equation(eqn, [self._operand(builder, v, 0) for v in eqn.inputs])
        except NotElementwise:
            return
        self.members.add(eqn)
        self.roots[output] = root
        self.linear[output] = output.is_float and all(self.linear.get(v, True) for v in data) and self._is_linear(eqn)

    def _is_linear(self, eqn: Equation) -> bool:
        numbers = [self._scalar(v) is not None for v in eqn.inputs]
        if eqn.primitive in _STEPS:
            if not any(numbers):
                # a sum of two affine functions of x is computed by the addition of tensors
                return eqn.primitive in ("add", "sub", "add_any")
            return eqn.primitive != "div" or not numbers[0]
        if eqn.primitive in _CLAMPS:
            return sum(not known for known in numbers) == 1 and (eqn.primitive != "clamp" or not numbers[1])
        if eqn.primitive == "convert_element_type":
            return eqn.inputs[0].is_float
        return eqn.primitive in IDENTITIES or eqn.primitive == "neg"

    @staticmethod
    def _fixed(value: Value) -> bool:
        return value.fixed or value.constant is not None

    def _scalar(self, value: Value) -> "Operand | Value | None":
        """The single number that a fixed value holds: a literal, or the one-element value that contains it."""
        kinds = (np.floating, np.bool_) if value.constant is None else (np.floating, np.integer, np.bool_)
        if not self._fixed(value) or not any(jax.dtypes.issubdtype(value.dtype, kind) for kind in kinds):
            return None
        if value.constant is not None:
            if int(np.prod(value.shape)) != 1:
                return None
            return value if isinstance(value.constant, Tracer) else constant(value.constant)
        eqn = self.made.get(value)
        if eqn is not None and eqn.primitive in ("broadcast_in_dim", "reshape", "squeeze", "copy"):
            found = self._scalar(eqn.inputs[0])
            if found is not None:
                return found
        if eqn is not None and eqn.primitive == "convert_element_type":
            found = self._scalar(eqn.inputs[0])
            if found is not None and not isinstance(found, Value):
                return Builder(()).equation(eqn, [found])[0]
        return value if int(np.prod(value.shape)) == 1 else None

    def _operand(self, builder: Builder, value: Value, data: Operand) -> Operand:
        found = self._scalar(value)
        if found is None:
            return data
        return builder.parameter(found) if isinstance(found, Value) else found

    # ------------------------------------------------------------------ what becomes a table

    def rewritten(self) -> Program:
        """The program with its tables."""
        needed = self._needed()
        tables: dict[Equation, Equation] = {}
        for eqn in self.program.equations:
            if eqn in self.members and eqn.outputs[0] in needed and not self._stays(eqn):
                table = self._table(eqn, needed)
                if table is not None:
                    tables[eqn] = table
        if not tables:
            return self.program
        equations = [tables.get(eqn, eqn) for eqn in self.program.equations]
        return dataclasses.replace(self.program, equations=tuple(self._alive(equations)))

    def _stays(self, eqn: Equation) -> bool:
        """Whether a needed equation is handled by other operations: linear ones and comparisons."""
        return self.linear[eqn.outputs[0]] or not eqn.outputs[0].is_float

    def _needed(self) -> set[Value]:
        """The values that are read by more than the inside of a table."""
        needed = set(self.program.outputs)
        for eqn in reversed(self.program.equations):
            if eqn not in self.members or (eqn.outputs[0] in needed and self._stays(eqn)):
                needed.update(eqn.inputs)
        return needed

    def _table(self, last: Equation, needed: set[Value]) -> Equation | None:
        root, (output,) = self.roots[last.outputs[0]], last.outputs
        root = self._later(root, self._between(output, root), needed)
        group = self._between(output, root)
        builder = Builder(root.shape)
        operands: dict[Value, Operand] = {root: 0}
        try:
            for eqn in group:
                if eqn in self.members:
                    given = [operands[v] if v in operands else self._operand(builder, v, 0) for v in eqn.inputs]
                    operands.update(zip(eqn.outputs, builder.equation(eqn, given), strict=True))
            expression = builder.done(operands[output])
        except (NotElementwise, ValueError):
            return None
        parameters: list[Value] = builder.parameters
        params = {
            "expression": expression.to_json(),
            "float32": _is_float32(root, group),
            # a backward that the model defines is not changed
            "steep": is_steep(expression) and not any(has_own_backward(eqn.source) for eqn in group),
        }
        return composite("table", group, (root, *parameters), (output,), params)

    def _between(self, output: Value, root: Value) -> list[Equation]:
        """The equations from a root to a value, including those that only repeat or convert numbers for them."""
        found, waiting = set[Equation](), [output]
        while waiting:
            value = waiting.pop()
            eqn = self.made.get(value)
            if value is root or eqn is None or eqn in found:
                continue
            if eqn not in self.members and self._scalar(value) is value:
                continue  # a parameter
            found.add(eqn)
            waiting += eqn.inputs
        return [eqn for eqn in self.program.equations if eqn in found]

    def _later(self, root: Value, group: Sequence[Equation], needed: set[Value]) -> Value:
        """A later root: after clamps and steps with parameters, and at a linear value that is needed anyway.

        After a clamp the same codes cover a smaller range, and a bias belongs to its accumulator. Only a value on which
        the rest of the group depends can be the root.
        """
        best, value = root, root
        while True:
            readers = [eqn for eqn in group if value in eqn.inputs]
            if len(readers) != 1 or not self.linear.get(readers[0].outputs[0]):
                return best
            (eqn,) = readers
            (value,) = eqn.outputs
            clamps = eqn.primitive in _CLAMPS
            if clamps or value in needed or any(isinstance(self._scalar(v), Value) for v in eqn.inputs):
                best = value

    def _alive(self, equations: Sequence[Equation]) -> list[Equation]:
        """The equations without those that only the inside of tables has read."""
        read = set(self.program.outputs)
        kept: list[Equation] = []
        for eqn in reversed(equations):
            if eqn in self.members and not any(value in read for value in eqn.outputs):
                continue
            kept.append(eqn)
            read.update(eqn.inputs)
        return kept[::-1]


def _is_float32(root: Value, group: Sequence[Equation]) -> bool:
    values = [root, *(v for eqn in group for v in (*eqn.inputs, *eqn.outputs))]
    return all(v.dtype == np.float32 for v in values if v.is_float)
