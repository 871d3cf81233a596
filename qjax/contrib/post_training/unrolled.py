"""Unrolls the scans over layers, and the rematerialised parts, of a traced program.

    scan(layer, kernels)   ->   h1 = layer(h0, kernels[0]); h2 = layer(h1, kernels[1]); ...

A walk stops before every layer, so each layer of a scan has to be an equation of its own. Its parameters, entries of
the scan's stacks, become inputs of the program ("blocks/up/kernel[2]"), and so do the numbers of its quantizers. Loops
over time are not unrolled, because they repeat one layer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from qjax.calibration.learned import Quantizer
from qjax.model.call import Call
from qjax.tracing import Annotation, Composite, Equation, Place, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.training.scan_layers import Index, part_name

Known = dict[Value, Value]
"""The values of a body -> the values in the iteration that is being unrolled."""


def unrolled(call: Call, quantizers: Mapping[str, Quantizer]) -> Call:
    """The same call without scans over layers and without `remat`; the call itself if it has neither."""
    program = call.traced.program
    if all(eqn.body is None or eqn in call.annotation.timed for eqn in program.equations):
        return call
    return _Writer(call, quantizers).result


class _Writer:
    def __init__(self, call: Call, quantizers: Mapping[str, Quantizer]) -> None:
        traced, old = call.traced, call.annotation
        self._old, self._quantizers = old, quantizers
        self._paths = dict(zip(traced.program.inputs, traced.names, strict=True))
        self._state = {value for value, c in zip(traced.program.inputs, traced.constant, strict=True) if c}
        self._parts: dict[tuple[Value, int], Value] = {}
        self._new = Annotation(output_names=old.output_names, target=old.target)
        self._new.values.update((value, old.values[value]) for value in traced.program.inputs if value in old.values)
        self._new.constants.update(value for value in traced.program.inputs if value in old.constants)
        known: Known = {value: value for value in traced.program.inputs}
        equations = self._write_iteration(traced.program.equations, known, ())
        read = {value for eqn in equations for value in eqn.inputs}
        added = [value for value in self._parts.values() if value in read]
        program = Program((*traced.program.inputs, *added), self._outputs(traced.program, known), tuple(equations))
        names, constant = (self._paths[value] for value in added), (True for _ in added)
        self.result = dataclasses.replace(
            call,
            traced=dataclasses.replace(
                traced, program=program, names=(*traced.names, *names), constant=(*traced.constant, *constant)
            ),
            annotation=self._new,
        )

    def _outputs(self, program: Program, known: Known) -> tuple[Value, ...]:
        return tuple(known.get(value, value) for value in program.outputs)

    def _write_iteration(self, equations: Sequence[Equation], known: Known, index: Index) -> list[Equation]:
        """The equations of one iteration. index: the iterations of the scans around it."""
        found: list[Equation] = []
        for eqn in equations:
            if eqn.body is None or eqn in self._old.timed:
                found.append(self._copy_equation(eqn, known, index))
            elif eqn.is_scan:
                found += self._scan(eqn, eqn.body, known, index)
            else:
                found += self._inline(eqn, eqn.body, known, index)
        return found

    def _inline(self, eqn: Equation, body: Program, known: Known, index: Index) -> list[Equation]:
        """The equations of a rematerialised part, inlined."""
        found, inner = list[Equation](), Known()
        for outer, value in zip(eqn.inputs, body.inputs, strict=True):
            found += self._enter(value, known.get(outer, outer), inner, index, eqn)
        found += self._write_iteration(body.equations, inner, index)
        for outer, value in zip(eqn.outputs, self._outputs(body, inner), strict=True):
            found += self._enter(outer, value, known, index, eqn)
        return found

    def _scan(self, eqn: Equation, body: Program, known: Known, index: Index) -> list[Equation]:
        fixed, carried, length = eqn.params["num_consts"], eqn.params["num_carry"], eqn.params["length"]
        outer = [known.get(value, value) for value in eqn.inputs]
        carry, found = outer[fixed : fixed + carried], list[Equation]()
        rows: list[list[Value]] = [[] for _ in eqn.outputs[carried:]]
        for step in reversed(range(length)) if eqn.params["reverse"] else range(length):
            inner = Known()
            given = [*outer[:fixed], *carry]
            for value in outer[fixed + carried :]:
                equations, part = self._part(value, step, eqn)
                found += equations
                given.append(part)
            for value, entering in zip(body.inputs, given, strict=True):
                found += self._enter(value, entering, inner, (*index, step), eqn)
            found += self._write_iteration(body.equations, inner, (*index, step))
            outputs = self._outputs(body, inner)
            carry = list(outputs[:carried])
            for row, value in zip(rows, outputs[carried:], strict=True):
                row.insert(0, value) if eqn.params["reverse"] else row.append(value)
        for value, leaving in zip(eqn.outputs, carry, strict=False):
            found += self._enter(value, leaving, known, index, eqn)
        for value, row in zip(eqn.outputs[carried:], rows, strict=True):
            new = self._value(value, index)
            found += _inlined_as(lambda *parts: jnp.stack(parts), row, new, eqn)
            known[value] = new
        return found

    def _part(self, stack: Value, step: int, eqn: Equation) -> tuple[list[Equation], Value]:
        """Entry `step` of an array that a scan iterates over; for a parameter, it is an input of the program."""
        if stack.constant is not None:
            return [], Value(stack.shape[1:], stack.dtype, stack.constant[step])
        if stack not in self._state:
            equations, (part,) = inlined(lambda x: lax.index_in_dim(x, step, 0, keepdims=False), [stack], None, eqn)
            return equations, part
        if (stack, step) not in self._parts:
            part = Value(stack.shape[1:], stack.dtype, fixed=True)
            self._parts[stack, step] = part
            self._paths[part] = part_name(self._paths[stack], (step,))
            self._state.add(part)
        return [], self._parts[stack, step]

    def _enter(self, value: Value, source: Value, known: Known, index: Index, eqn: Equation) -> list[Equation]:
        """Let `value` be `source`; if `value` has its own quantizer, through an equation that does nothing."""
        if value not in self._old.values:
            known[value] = source
            return []
        new = known[value] = self._value(value, index)
        inner = Value(source.shape, source.dtype)
        nothing = Composite((), (inner,), (inner,))
        return [Equation("copy", (source,), (new,), {}, eqn.scope, eqn.location, nothing)]

    # ------------------------------------------------------------------ copies

    def _copy_equation(self, eqn: Equation, known: Known, index: Index) -> Equation:
        """A copy of an equation with the values of an iteration and the annotation of the original."""
        if not index and all(known.get(value, value) is value for value in eqn.inputs):
            new = eqn
            known.update((value, self._value(value, index, keep=True)) for value in eqn.outputs)
        else:
            inputs = tuple(known.get(value, value) for value in eqn.inputs)
            for value in eqn.outputs:
                known[value] = self._value(value, index)
            outputs = tuple(known[value] for value in eqn.outputs)
            body = eqn.body and self._body(eqn.body, index)
            new = dataclasses.replace(eqn, inputs=inputs, outputs=outputs, body=body)
        self._copy_notes(eqn, new, index)
        return new

    def _body(self, body: Program, index: Index) -> Program:
        """The body of a loop over time, copied for each iteration of the scans around it."""
        known: Known = {value: self._value(value, index) for value in body.inputs}
        equations = tuple(self._copy_equation(eqn, known, index) for eqn in body.equations)
        return Program(tuple(known[value] for value in body.inputs), self._outputs(body, known), equations)

    def _copy_notes(self, eqn: Equation, new: Equation, index: Index) -> None:
        old, found = self._old, self._new
        if eqn in old.ops:
            found.ops[new] = old.ops[eqn]
        for name in ("timed", "floats"):
            if eqn in getattr(old, name):
                getattr(found, name).add(new)
        if eqn in old.tables:
            found.tables[new] = self._place(old.tables[eqn], index)
        for position in range(len(eqn.inputs)):
            if (eqn, position) in old.weights:
                found.weights[new, position] = self._place(old.weights[eqn, position], index)
            if (eqn, position) in old.invariant:
                found.invariant.add((new, position))
        if new is eqn and eqn.body is not None:
            self._keep_loop(eqn.body)

    def _keep_loop(self, body: Program) -> None:
        """Copy the annotation of a loop over time that is not unrolled."""
        for value in body.inputs:
            self._value(value, (), keep=True)
        for eqn in body.equations:
            for value in eqn.outputs:
                self._value(value, (), keep=True)
            self._copy_notes(eqn, eqn, ())

    def _value(self, value: Value, index: Index, *, keep: bool = False) -> Value:
        """A value of an iteration, with the annotation of the original."""
        new = value if keep else dataclasses.replace(value)
        for name in ("values", "grids"):
            if value in getattr(self._old, name):
                getattr(self._new, name)[new] = self._place(getattr(self._old, name)[value], index)
        if value in self._old.constants:
            self._new.constants.add(new)
        return new

    def _place(self, place: Place, index: Index) -> Place:
        """The place in one iteration. Its quantizer is an entry of a stack unless all iterations share it."""
        if not index:
            return place
        own = index[: len(self._quantizers[place.name].stack)]
        return dataclasses.replace(
            place,
            label=part_name(place.label, index),
            name=part_name(place.name, own),
            stack=place.stack[len(index) :],
            timed=tuple(position - len(index) for position in place.timed if position >= len(index)),
        )


def _inlined_as(
    function: Callable[..., jax.Array], inputs: Sequence[Value], output: Value, eqn: Equation
) -> list[Equation]:
    return inlined(function, inputs, [output], eqn)[0]
