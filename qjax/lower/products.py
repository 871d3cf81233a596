"""One product of all steps of a loop over time, in the place of one in each step.

A recurrent layer multiplies each step's input by a weight, and adds a product of its state. Only the second has to wait
for the step before. The rows of the first depend each on its own step, so all of them are one product in front of the
loop. Its codes are the same: a sum of integers, and a quantizer that all steps share.

This is done for the graph alone. The training forward keeps the product in the loop, whose tensors stay in the cache.
"""

import dataclasses
from collections.abc import Callable, Collection

import jax

from qjax.tracing import Annotation, Equation, Program, Value
from qjax.tracing.program import from_jaxpr
from qjax.tracing.rewrites.flow import Flow, pruned

_STEPS = frozenset({"add", "sub", "mul", "div", "neg", "max", "min", "clamp", "relu", "relu6"})
"""Of what stands between a sum and its quantizer: the steps of single elements."""


def products_before_loops(program: Program, annotation: Annotation) -> tuple[Program, Annotation]:
    """The program with such products in front of its loops, and the annotation with the new equations and values."""
    own = dataclasses.replace(
        annotation,
        ops=dict(annotation.ops),
        values=dict(annotation.values),
        weights=dict(annotation.weights),
        constants=set(annotation.constants),
        timed=set(annotation.timed),
    )
    return _changed(program, own), own


def _changed(program: Program, annotation: Annotation) -> Program:
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.body is None:
            equations.append(eqn)
            continue
        eqn = _renewed(annotation, eqn, body=_changed(eqn.body, annotation))
        equations += _Loop(eqn, annotation).split() if eqn in annotation.timed else [eqn]
    return dataclasses.replace(program, equations=tuple(equations))


def _renewed(annotation: Annotation, eqn: Equation, **changes: object) -> Equation:
    """A changed equation with a body, which the annotation knows as well."""
    found = dataclasses.replace(eqn, **changes)  # pyright: ignore[reportArgumentType]
    if eqn in annotation.timed:
        annotation.timed.add(found)
    for index in range(len(eqn.inputs)):
        if (eqn, index) in annotation.weights:
            annotation.weights[found, index] = annotation.weights[eqn, index]
    return found


class _Loop:
    """A scan over data."""

    def __init__(self, eqn: Equation, annotation: Annotation) -> None:
        assert eqn.body is not None
        self.eqn, self.body, self.annotation = eqn, eqn.body, annotation
        self.first: int = eqn.params["num_consts"]
        self.data: int = self.first + eqn.params["num_carry"]
        self.rows = {v for v in self.body.inputs[self.data :] if v not in annotation.constants}
        """What each step has of its own, as far as no state is needed for it."""

    def split(self) -> list[Equation]:
        """The equations in front of the loop, and the loop."""
        products = self._leaving()
        rest = self._without(products)
        read = {v for eqn in rest for v in eqn.inputs} | set(self.body.outputs)
        exits = [v for eqn in products for v in eqn.outputs if v in read]
        if not exits:
            return [self.eqn]
        given = dict(zip(self.body.inputs, self.eqn.inputs, strict=True))
        moved: list[Equation] = []
        for eqn in Flow(self.body).between(exits, given):
            moved += self._of_all_steps(eqn, given)
        body = pruned(dataclasses.replace(self.body, equations=tuple(rest)), set(rest))
        used = {v for eqn in body.equations for v in eqn.inputs} | set(body.outputs)
        kept = [v for v in body.inputs[self.data :] if v in used]
        inputs = (*body.inputs[: self.data], *kept, *exits)
        for value in exits:
            # its quantizer is in front of the loop
            self.annotation.values.pop(value, None)
        body = dataclasses.replace(body, inputs=inputs)
        return [*moved, _renewed(self.annotation, self.eqn, inputs=tuple(given[v] for v in inputs), body=body)]

    def _without(self, products: Collection[Equation]) -> list[Equation]:
        leaving = set(products)
        return [eqn for eqn in self.body.equations if eqn not in leaving]

    def _leaving(self) -> list[Equation]:
        """The products of rows and weights, what follows up to the codes, and parts of these codes."""
        found = list[Equation]()
        behind = set[Value]()
        for eqn in self.body.equations:
            if eqn.body is None and (self._is_product(eqn) or (self._follows(eqn) and behind.intersection(eqn.inputs))):
                found.append(eqn)
                behind.update(eqn.outputs)
                self.rows.update(eqn.outputs)
        while True:
            read = {v for eqn in self._without(found) for v in eqn.inputs} | set(self.body.outputs)
            # a sum that has no quantizer yet stays with its readers
            kept = [eqn for eqn in found if all(self._is_code(v, eqn) for v in eqn.outputs if v in read)]
            if len(kept) == len(found):
                return found
            found = kept

    def _mode(self, eqn: Equation) -> str | None:
        reading = self.annotation.ops.get(eqn)
        return None if reading is None else reading[1]

    def _is_code(self, value: Value, eqn: Equation) -> bool:
        return value in self.annotation.values or self._mode(eqn) == "grid"

    def _is_product(self, eqn: Equation) -> bool:
        if eqn.primitive != "dot_general" or self._mode(eqn) != "producer":
            return False
        _, batches = eqn.params["dimension_numbers"]
        return not any(batches) and eqn.inputs[0] in self.rows and self.annotation.is_constant(eqn)[1]

    def _follows(self, eqn: Equation) -> bool:
        """Whether it treats all rows alike: a step behind the sum (a bias, a bound), or a part of the codes."""
        constant = self.annotation.is_constant(eqn)
        alike = all(is_constant or v in self.rows for v, is_constant in zip(eqn.inputs, constant, strict=True))
        mode = self._mode(eqn)
        return alike and (
            (mode == "chain" and eqn.primitive in _STEPS) or (mode == "grid" and eqn.primitive == "split")
        )

    def _of_all_steps(self, eqn: Equation, given: dict[Value, Value]) -> list[Equation]:
        """An equation of the body for all steps at once; `given` gets its results."""
        annotation = self.annotation
        inputs = [v if v.constant is not None else given[v] for v in eqn.inputs]
        axes = [0 if v in self.rows else None for v in eqn.inputs]
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
        function: Callable[..., object] = eqn.bind
        if 0 in axes:
            function = jax.vmap(eqn.bind, axes, axis_size=self.eqn.params["length"])
        found = from_jaxpr(jax.make_jaxpr(function)(*shapes))
        known = dict(zip(found.inputs, inputs, strict=True))
        equations = [
            dataclasses.replace(
                made, inputs=tuple(known.get(v, v) for v in made.inputs), scope=eqn.scope, location=eqn.location
            )
            for made in found.equations
        ]
        for made in equations:
            if all(annotation.is_constant(made)):
                annotation.constants.update(made.outputs)
            else:
                # the moves that align a bias with the rows are constants, so this is the equation itself
                assert made.primitive == eqn.primitive, (made.primitive, eqn.primitive)
                if eqn in annotation.ops:
                    annotation.ops[made] = annotation.ops[eqn]
                for index in range(len(eqn.inputs)):
                    if (eqn, index) in annotation.weights:
                        annotation.weights[made, index] = annotation.weights[eqn, index]
        for value, result in zip(eqn.outputs, found.outputs, strict=True):
            given[value] = known.get(result, result)
            if value in annotation.values:
                annotation.values[given[value]] = annotation.values[value]
            if value in annotation.constants:
                annotation.constants.add(given[value])
        return equations
