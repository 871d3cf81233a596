"""Turns arithmetic on float masks back into boolean logic.

Flax makes attention masks as `(a & b).astype(float32)`, combines them, and compares them with zero before use. Each
step is boolean logic: a product or a minimum of masks is "and", a maximum is "or", `1 - mask` is "not", and a
comparison with zero is the mask itself. As logic they need no quantizer, which 0.0 and 1.0 would need.

The same holds for a mask of two other numbers, such as 0 and -2e38, that a comparison reads:

    where(where(m, 0.0, -2e38) >= -1e38, scores, -2e38)   ->   where(m, scores, -2e38)
"""

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, pruned
from qjax.tracing.rewrites.inline import inlined

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "copy"})
_JOINED: dict[str, Callable[..., jax.Array]] = {
    "mul": lax.bitwise_and,
    "min": lax.bitwise_and,
    "max": lax.bitwise_or,
}
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
}
_FLAG = (0.0, 1.0)
"""The numbers that a cast mask has for False and for True."""


def keep_truth(program: Program) -> Program:
    """Replace arithmetic on 0 and 1 by logic on truth values."""
    if not any(_starts(eqn) for eqn in program.equations):
        return program
    return _Masks(program).rewritten()


def _starts(eqn: Equation) -> bool:
    """Whether the equation makes numbers from a truth value."""
    if eqn.primitive == "select_n":
        return _is_truth(eqn.inputs[0]) and len(eqn.inputs) == 3 and not _is_truth(eqn.outputs[0])
    return eqn.primitive == "convert_element_type" and _is_truth(eqn.inputs[0])


class _Masks:
    """What is known about the program's values.

    truth: of values that hold only 0 and 1, the truth value from which they were made. chosen: of values that hold only
    two other numbers, the truth value and the numbers for False and for True.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.truth: dict[Value, Value] = {}
        self.chosen: dict[Value, tuple[Value, tuple[float, float]]] = {}
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
        if self._two_numbers(eqn):
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
            found = self.chosen.get(eqn.inputs[0]) if eqn.inputs else None
            return found is not None and self._compared(eqn, *found)
        if (eqn.primitive in _MOVES or eqn.primitive in IDENTITIES) and len(eqn.inputs) == 1:
            return self._define(eqn, lambda t: eqn.bind(t)[0], [known[0]])
        if eqn.primitive in _JOINED and known[0] is not None and known[1] is not None:
            return self._define(eqn, _JOINED[eqn.primitive], [known[0], known[1]])
        if eqn.primitive == "sub" and known[1] is not None and self._number(eqn.inputs[0]) == 1.0:
            return self._define(eqn, lax.bitwise_not, [known[1]])
        return known[0] is not None and self._compared(eqn, known[0], _FLAG)

    def _two_numbers(self, eqn: Equation) -> bool:
        """Whether the result is one of two numbers. The equation stays if something else reads the numbers."""
        (output,) = eqn.outputs
        if _starts(eqn) and eqn.primitive == "select_n":
            numbers = [self._constant(value) for value in eqn.inputs[1:]]
            if numbers[0] is None or numbers[1] is None or eqn.inputs[0].shape != output.shape:
                return False
            self.chosen[output] = (eqn.inputs[0], (numbers[0], numbers[1]))
            return True
        if not eqn.inputs or (found := self.chosen.get(eqn.inputs[0])) is None:
            return False
        truth, numbers = found
        if len(eqn.inputs) == 1 and (eqn.primitive in _MOVES or eqn.primitive in IDENTITIES):
            moved, (truth,) = inlined(lambda t: eqn.bind(t)[0], [truth], None, eqn)
            self.equations += moved
            self.unneeded.update(moved)
            self.chosen[output] = (truth, numbers)
            return True
        return False

    def _compared(self, eqn: Equation, truth: Value, numbers: tuple[float, float]) -> bool:
        """Whether comparing a mask with a number reveals which of its two numbers each element holds."""
        compare = _COMPARED.get(eqn.primitive)
        if compare is None or len(eqn.inputs) != 2:
            return False
        number = self._constant(eqn.inputs[1])
        if number is None and self._number(eqn.inputs[1]) in _FLAG:
            # a computed number may be rounded, except for these
            number = self._number(eqn.inputs[1])
        if number is None:
            return False
        no, yes = (compare(each, number) for each in numbers)
        if no != yes:
            self._renamed_to(eqn, truth, yes)
        return no != yes

    def _number(self, value: Value) -> float | None:
        return self.flow.number(value)

    def _constant(self, value: Value) -> float | None:
        """The number, if the program contains it as a literal."""
        return self.flow.number(value) if self.flow.behind(value).value.constant is not None else None

    def _renamed_to(self, eqn: Equation, truth: Value, says: bool) -> None:
        (output,) = eqn.outputs
        if says and truth.shape == output.shape:
            self.renamed[output] = truth
            return

        def spread(t: jax.Array) -> jax.Array:
            t = t if says else lax.bitwise_not(t)
            return t if t.shape == output.shape else jnp.broadcast_to(t, output.shape)

        self.equations += inlined(spread, [truth], [output], eqn)[0]

    def _define(self, eqn: Equation, function: Callable[..., jax.Array], truths: list[Value | None]) -> bool:
        """Define the result as a truth value, and also as numbers for equations that still read those."""
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
