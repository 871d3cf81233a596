"""Masks that become floats and booleans again: rewritten as boolean logic.

Flax makes attention masks as `(a & b).astype(float32)`, combines them, and compares them with zero before use. Each
step is boolean logic: a product or a minimum of masks is "and", a maximum is "or", `1 - mask` is "not", and a
comparison with zero is the mask itself. So 0.0 and 1.0 are not quantized in between.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.flow import Flow, pruned
from qjax.tracing.rewrites.inline import inlined

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "copy"})
_JOINED: dict[str, Callable[..., jax.Array]] = {
    "mul": lax.bitwise_and,
    "min": lax.bitwise_and,
    "max": lax.bitwise_or,
}
_COMPARED = {
    ("ne", 0.0): True,
    ("gt", 0.0): True,
    ("ge", 1.0): True,
    ("eq", 1.0): True,
    ("eq", 0.0): False,
    ("ne", 1.0): False,
    ("lt", 1.0): False,
    ("le", 0.0): False,
}
"""(comparison, number on its right) -> whether it says what the mask says (True) or the opposite."""


def keep_truth(program: Program) -> Program:
    """The program with logic on truth values in the place of arithmetic on the numbers 0 and 1."""
    if not any(eqn.primitive == "convert_element_type" and _is_truth(eqn.inputs[0]) for eqn in program.equations):
        return program
    return _Masks(program).rewritten()


class _Masks:
    """truth: of values that hold only 0 and 1, the truth value that they were made from."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.truth: dict[Value, Value] = {}
        self.renamed: dict[Value, Value] = {}
        self.equations: list[Equation] = []
        self.unneeded: set[Equation] = set()

    def rewritten(self) -> Program:
        for original in self.program.equations:
            inputs = tuple(self.renamed.get(value, value) for value in original.inputs)
            same = all(a is b for a, b in zip(inputs, original.inputs, strict=True))
            eqn = original if same else dataclasses.replace(original, inputs=inputs)
            if eqn.body is not None or len(eqn.outputs) != 1 or not self._read(eqn):
                self.equations.append(eqn)
        outputs = tuple(self.renamed.get(value, value) for value in self.program.outputs)
        program = dataclasses.replace(self.program, outputs=outputs, equations=tuple(self.equations))
        return pruned(program, self.unneeded)

    def _read(self, eqn: Equation) -> bool:
        """Whether the equation's result was expressed in truth values."""
        (output,) = eqn.outputs
        if eqn.primitive == "convert_element_type" and _is_truth(eqn.inputs[0]) and not _is_truth(output):
            self.truth[output] = eqn.inputs[0]
            self.unneeded.add(eqn)
            return False
        known = [self.truth.get(value) for value in eqn.inputs]
        if eqn.primitive == "convert_element_type" and known[0] is not None:
            if _is_truth(output):
                self.renamed[output] = known[0]
            else:
                self._define(eqn, lambda t: t, [known[0]])
            return True
        if not any(known):
            return False
        if (eqn.primitive in _MOVES or eqn.primitive in IDENTITIES) and len(eqn.inputs) == 1:
            return self._define(eqn, lambda t: eqn.bind(t)[0], [known[0]])
        if eqn.primitive in _JOINED and known[0] is not None and known[1] is not None:
            return self._define(eqn, _JOINED[eqn.primitive], [known[0], known[1]])
        if eqn.primitive == "sub" and known[1] is not None and self._number(eqn.inputs[0]) == 1.0:
            return self._define(eqn, lax.bitwise_not, [known[1]])
        if known[0] is not None and len(eqn.inputs) == 2:
            number = self._number(eqn.inputs[1])
            says = None if number is None else _COMPARED.get((eqn.primitive, number))
            if says is not None:
                self._renamed_to(eqn, known[0], says)
                return True
        return False

    def _number(self, value: Value) -> float | None:
        return self.flow.number(value)

    def _renamed_to(self, eqn: Equation, truth: Value, says: bool) -> None:
        (output,) = eqn.outputs
        if says:
            self.renamed[output] = truth
            return
        self.equations += inlined(lax.bitwise_not, [truth], [output], eqn)[0]

    def _define(self, eqn: Equation, function: Callable[..., jax.Array], truths: list[Value | None]) -> bool:
        """The result as a truth value, and as the number that it was for whoever still reads that."""
        (output,) = eqn.outputs
        given = [truth for truth in truths if truth is not None]
        found, (truth,) = inlined(function, given, None, eqn)
        back, _ = inlined(lambda t: t.astype(output.dtype), [truth], [output], eqn)
        self.equations += [*found, *back]
        self.unneeded.update((*found, *back))
        self.truth[output] = truth
        return True


def _is_truth(value: Value) -> bool:
    return bool(value.dtype == np.bool_)
