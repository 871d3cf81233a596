"""Recognises dropout without a layer: a tensor times a random mask, divided by the probability of keeping an element.

    x * (bernoulli(key, 0.9, x.shape) / 0.9)               ->    dropout(x, mask, keep=0.9)
    where(bernoulli(key, keep, x.shape), x / keep, 0)      ->    dropout(x, mask, keep=keep)

Attention drops its weights in this way. As plain arithmetic this would be a rescale with its own quantizer, which
exists only in training. As one dropout operation it needs no quantizer, so training and evaluation quantize the same
tensors.
"""

from collections.abc import Sequence

from qjax.tracing.composite import composite, replaced
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow

_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"})
_PRODUCTS = frozenset({"mul", "div"})
_MOST = 16
"""Equations between a draw of random bits and the mask, at most: `bernoulli` needs 10."""


def find_dropout(program: Program) -> Program:
    """Replace each dropout by one equation "dropout" with the operands x and mask, and the parameter keep."""
    if not any(eqn.primitive in _RANDOM for eqn in program.equations):
        return program
    return _Dropouts(program).rewritten()


class _Dropouts:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.taken: set[Equation] = set()

    def rewritten(self) -> Program:
        groups = [group for eqn in self.program.equations if (group := self._group(eqn)) is not None]
        return replaced(self.program, groups) if groups else self.program

    def _group(self, eqn: Equation) -> Equation | None:
        """The dropout that ends in this equation, if there is one."""
        if eqn in self.taken or len(eqn.outputs) != 1 or not eqn.outputs[0].is_float:
            return None
        for masked in (self._selected(eqn), *self._multiplied(eqn)):
            if masked is not None:
                x, mask, factor = masked
                break
        else:
            return None
        keep = self._probability(mask)
        x, factor = self._skip_division_before(x, eqn.outputs[0], factor, keep)
        output, factor = self._skip_division_after(eqn.outputs[0], factor, keep)
        if x.constant is not None or x.shape != output.shape or not x.is_float:
            return None
        equations = self.flow.between([output], [x, mask])
        if self.flow.leaves(equations, [x, mask]) or self.taken & set(equations):
            return None
        self.taken.update(equations)
        return composite("dropout", equations, [x, mask], [output], {"factor": factor})

    def _selected(self, eqn: Equation) -> tuple[Value, Value, float] | None:
        """where(mask, x, 0), or the reverse: x, the mask, 1."""
        if eqn.primitive != "select_n" or len(eqn.inputs) != 3 or str(eqn.in_dtypes[0]) != "bool":
            return None
        mask = self.flow.behind(eqn.inputs[0]).value
        for x, other in (eqn.inputs[1:], eqn.inputs[:0:-1]):
            if self.flow.number(other) == 0 and self._is_random(mask):
                return x, mask, 1.0
        return None

    def _multiplied(self, eqn: Equation) -> Sequence[tuple[Value, Value, float] | None]:
        """x * mask, where the mask as numbers may be divided already: x, the mask, the factor of the mask."""
        if eqn.primitive != "mul":
            return ()
        found: list[tuple[Value, Value, float] | None] = []
        for x, other in (eqn.inputs, eqn.inputs[::-1]):
            factor, value = 1.0, self.flow.behind(other)
            if value.equation is not None and (step := self._step(value.equation)) is not None:
                factor, value = step[1], self.flow.behind(step[0])
            cast = value.equation
            if cast is not None and cast.primitive == "convert_element_type" and str(cast.in_dtypes[0]) == "bool":
                mask = self.flow.behind(cast.inputs[0]).value
                if self._is_random(mask):
                    found.append((x, mask, factor))
        return found

    def _step(self, eqn: Equation) -> tuple[Value, float] | None:
        """x * number or x / number: x, and the factor."""
        if eqn.primitive not in _PRODUCTS:
            return None
        for x, other in (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive == "mul" else (eqn.inputs,):
            number = self.flow.number(other)
            if number and self.flow.number(x) is None:
                return x, number if eqn.primitive == "mul" else 1.0 / number
        return None

    def _skip_division_before(self, x: Value, output: Value, factor: float, keep: float | None) -> tuple[Value, float]:
        """x before a division by the probability of keeping it, if nothing else reads the quotient."""
        eqn = self.flow.made.get(x)
        step = None if eqn is None or len(self.flow.readers[x]) > 1 or x in self.program.outputs else self._step(eqn)
        if step is None or step[0].shape != output.shape or not _undoes(factor * step[1], keep):
            return x, factor
        return step[0], factor * step[1]

    def _skip_division_after(self, output: Value, factor: float, keep: float | None) -> tuple[Value, float]:
        """The output after a division by that probability."""
        readers = self.flow.readers.get(output, [])
        step = self._step(readers[0]) if len(readers) == 1 and output not in self.program.outputs else None
        if step is None or step[0] is not output or not _undoes(factor * step[1], keep):
            return output, factor
        return readers[0].outputs[0], factor * step[1]

    def _is_random(self, mask: Value) -> bool:
        """Whether a boolean is drawn at random, and depends only on literals and keys."""
        if str(mask.dtype) != "bool" or mask.constant is not None:
            return False
        waiting, seen, drawn = [mask], set[Value](), False
        while waiting:
            value = waiting.pop()
            eqn = self.flow.made.get(value)
            if value in seen or value.constant is not None:
                continue
            seen.add(value)
            if eqn is None or eqn.body is not None or len(seen) > _MOST:
                return False
            if eqn.primitive in _RANDOM:
                drawn = True
                continue
            waiting += eqn.inputs
        return drawn

    def _probability(self, mask: Value) -> float | None:
        """The share of elements kept, or dropped (a mask can mean either); None if it is not `random < number`."""
        eqn = self.flow.made.get(mask)
        while eqn is not None and eqn.primitive == "not":
            eqn = self.flow.made.get(self.flow.behind(eqn.inputs[0]).value)
        if eqn is None or eqn.primitive not in ("lt", "le", "gt", "ge"):
            return None
        numbers = [n for n in map(self.flow.number, eqn.inputs) if n is not None]
        return numbers[0] if len(numbers) == 1 else None


def _undoes(factor: float, probability: float | None) -> bool:
    """Whether a factor compensates for a mask of that probability, or of its complement."""
    if probability is None:
        return False
    return any(abs(factor * keep - 1.0) < 1e-3 for keep in (probability, 1.0 - probability))
