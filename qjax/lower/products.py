"""Replaces the products of single steps in a loop over time by one product of all steps before the loop.

    for t:  h = f(x[t] @ W + h @ U)     ->     p = x @ W;  for t:  h = f(p[t] + h @ U)

A recurrent layer multiplies each step's input by a weight, and adds a product of its state. Only the second has to wait
for the step before. Each row of the first depends only on its own step, so all of them form one product before the
loop. Its codes are the same, because the sum is of integers and all steps share a quantizer.

Only the graph is changed. The training forward keeps the product in the loop, whose tensors stay in the cache.
"""

import dataclasses
from collections.abc import Collection

import jax

from qjax.tracing import Annotation, Equation, Program, Value
from qjax.tracing.program import from_jaxpr
from qjax.tracing.rewrites.dataflow import Flow, pruned

_STEPS = frozenset({"add", "sub", "mul", "div", "neg", "max", "min", "clamp", "relu", "relu6"})
"""Operations between a sum and its quantizer that act on single elements."""


def products_before_loops(program: Program, annotation: Annotation) -> tuple[Program, Annotation]:
    """The program with such products before its loops, and the annotation with the new equations and values."""
    own = dataclasses.replace(
        annotation,
        ops=dict(annotation.ops),
        values=dict(annotation.values),
        weights=dict(annotation.weights),
        constants=set(annotation.constants),
        timed=set(annotation.timed),
    )
    return _move_products(program, own), own


def _move_products(program: Program, annotation: Annotation) -> Program:
    if not any(eqn in annotation.timed for eqn in program.walk()):
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.body is not None and (body := _move_products(eqn.body, annotation)) is not eqn.body:
            eqn = _replace_equation(annotation, eqn, body=body)
        equations += _Loop(eqn, annotation).split() if eqn in annotation.timed else [eqn]
    return dataclasses.replace(program, equations=tuple(equations))


def _replace_equation(annotation: Annotation, eqn: Equation, **changes: object) -> Equation:
    """Replace an equation with a body, in the annotation as well."""
    found = dataclasses.replace(eqn, **changes)  # pyright: ignore[reportArgumentType]
    if eqn in annotation.timed:
        annotation.timed.add(found)
    for index in range(len(eqn.inputs)):
        if (eqn, index) in annotation.weights:
            annotation.weights[found, index] = annotation.weights[eqn, index]
    return found


class _Loop:
    """A scan over data.

    rows: values that each step computes from its own data, without a state. same: constants that no step changes, which
    excludes constants that follow from a counter.
    """

    def __init__(self, eqn: Equation, annotation: Annotation) -> None:
        assert eqn.body is not None
        self.eqn, self.body, self.annotation = eqn, eqn.body, annotation
        first = eqn.params["num_consts"]
        self.data: int = first + eqn.params["num_carry"]
        self.rows = {v for v in self.body.inputs[self.data :] if v not in annotation.constants}
        self.same = {v for v in self.body.inputs[:first] if v in annotation.constants}
        self.mapped: dict[Equation, Program] = {}
        """The equations that can leave the loop, in their form for all steps at once."""

    def split(self) -> list[Equation]:
        """The equations before the loop, and the loop."""
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
            # Its quantizer is now before the loop.
            self.annotation.values.pop(value, None)
        body = dataclasses.replace(body, inputs=inputs)
        return [*moved, _replace_equation(self.annotation, self.eqn, inputs=tuple(given[v] for v in inputs), body=body)]

    def _without(self, products: Collection[Equation]) -> list[Equation]:
        leaving = set(products)
        return [eqn for eqn in self.body.equations if eqn not in leaving]

    def _leaving(self) -> list[Equation]:
        """The products of rows and weights, the equations after them up to the codes, and parts of these codes."""
        found = list[Equation]()
        behind = set[Value]()
        for eqn in self.body.equations:
            inputs = {v for v in eqn.inputs if v.constant is None}
            if eqn.body is not None or not inputs <= self.rows | self.same:
                continue
            if inputs <= self.same:
                self.same.update(eqn.outputs)
            elif (self._is_product(eqn) or (self._follows(eqn) and behind & inputs)) and self._is_mapped(eqn):
                found.append(eqn)
                behind.update(eqn.outputs)
                self.rows.update(eqn.outputs)
        while True:
            read = {v for eqn in self._without(found) for v in eqn.inputs} | set(self.body.outputs)
            # A sum that has no quantizer yet stays with its readers.
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
        x, weight = eqn.inputs
        _, batches = eqn.params["dimension_numbers"]
        return not any(batches) and x in self.rows and (weight in self.same or weight.constant is not None)

    def _follows(self, eqn: Equation) -> bool:
        """Whether it treats all rows alike: a step after the sum (a bias, a bound), or a part of the codes."""
        mode = self._mode(eqn)
        return (mode == "chain" and eqn.primitive in _STEPS) or (mode == "grid" and eqn.primitive == "split")

    def _is_mapped(self, eqn: Equation) -> bool:
        """Whether it is one equation for all steps at once; moves of constants may align them with the rows."""
        length = self.eqn.params["length"]
        axes = [0 if v in self.rows else None for v in eqn.inputs]
        shapes = [
            jax.ShapeDtypeStruct(v.shape if axis is None else (length, *v.shape), v.dtype)
            for v, axis in zip(eqn.inputs, axes, strict=True)
        ]
        found = from_jaxpr(jax.make_jaxpr(jax.vmap(eqn.bind, axes, axis_size=length))(*shapes))
        rows = {v for v, axis in zip(found.inputs, axes, strict=True) if axis == 0}
        made = [one for one in found.equations if rows.intersection(one.inputs)]
        self.mapped[eqn] = found
        return [one.primitive for one in made] == [eqn.primitive] and made[0].outputs == found.outputs

    def _of_all_steps(self, eqn: Equation, given: dict[Value, Value]) -> list[Equation]:
        """An equation of the body, moved before the loop; its results are added to `given`."""
        inputs = [v if v.constant is not None else given[v] for v in eqn.inputs]
        if eqn not in self.mapped:
            outputs = tuple(Value(v.shape, v.dtype, fixed=v.fixed) for v in eqn.outputs)
            self.annotation.constants.update(outputs)
            given.update(zip(eqn.outputs, outputs, strict=True))
            return [dataclasses.replace(eqn, inputs=tuple(inputs), outputs=outputs)]
        annotation, found = self.annotation, self.mapped[eqn]
        known = dict(zip(found.inputs, inputs, strict=True))
        equations: list[Equation] = []
        for made in found.equations:
            own = tuple(known.get(v, v) for v in made.inputs)
            made = dataclasses.replace(made, inputs=own, scope=eqn.scope, location=eqn.location)
            equations.append(made)
            if made.outputs != found.outputs:
                annotation.constants.update(made.outputs)
                continue
            annotation.ops[made] = annotation.ops[eqn]
            for index in range(len(eqn.inputs)):
                if (eqn, index) in annotation.weights:
                    annotation.weights[made, index] = annotation.weights[eqn, index]
        for value, result in zip(eqn.outputs, found.outputs, strict=True):
            given[value] = result
            if value in annotation.values:
                annotation.values[result] = annotation.values[value]
        return equations
