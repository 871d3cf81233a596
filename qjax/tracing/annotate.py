"""Decides which tensors of a program get a quantizer, and how each quantizer is named.

This is one pass over the program in execution order. A producer (a convolution, a sum, an addition) starts an
accumulator. An affine step or a clamp joins the accumulator's chain if it is the only reader of its tensor. The next
operation that needs codes puts a quantizer at the end of the chain:

    y = dot(x, w)       starts an accumulator
    z = y + bias        joins its chain
    r = max(z, 0)       joins its chain
    t = transpose(r)    needs codes, so r gets a quantizer; t only moves codes and shares it

Operations that only move codes share their input's quantizer, and a concatenation makes all its inputs share one. No
decision depends on the batch size or on training mode, so the same tensors are quantized in both modes.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qjax import ops
from qjax.ops import Op, Role
from qjax.ops.facts import AverageFacts, ProductFacts
from qjax.ops.rescale import Rescale
from qjax.targets import Target
from qjax.tracing.annotation import Annotation as Annotation
from qjax.tracing.annotation import Joined
from qjax.tracing.annotation import LayerUse as LayerUse
from qjax.tracing.annotation import Place as Place
from qjax.tracing.annotation_states import Accumulator, Grid, join, parent
from qjax.tracing.joined import hide_ends, may_leave_range
from qjax.tracing.program import Composite, Equation, Program, Value
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.scans import Scans


def annotate(
    program: Program,
    names: Sequence[str],
    constant: Sequence[bool],
    is_float: Callable[[str], bool] = lambda path: False,
    target: Target | None = None,
    by_row: Collection[str] = (),
) -> Annotation:
    """Decide for every equation how it is read, and for every tensor whether it has a quantizer.

    Args:
      names: per input, the path of the parameter or the name of the model's input.
      constant: per input, whether it is a parameter (or other state) rather than data.
      is_float: which module paths the recipe keeps in float.
      target: the runtime, which decides which averages share their input's quantizer, and how they round.
      by_row: the tables with one scale per row, by the names of their quantizers.
    """
    return _Annotator(is_float, target, by_row).run(program, names, constant)


class _Annotator(Scans):
    def __init__(self, is_float: Callable[[str], bool], target: Target | None, by_row: Collection[str]) -> None:
        super().__init__()
        self.is_float, self.by_row = is_float, by_row
        self.same_grid = frozenset[str]() if target is None else target.same_grid
        self.multiplied: list[Place] = []
        self.number: Callable[[Value], Any] = lambda value: None
        self.result.target = target

    def run(self, program: Program, names: Sequence[str], constant: Sequence[bool]) -> Annotation:
        for value, name, is_constant in zip(program.inputs, names, constant, strict=True):
            if is_constant:
                self.result.constants.add(value)
                self.origin[value] = (name, ())
            else:
                self.state[value] = None
                self.labels[value] = (name, "input", None)
        self.walk(program, ())
        for value in program.outputs:
            if isinstance(self.state.get(value), Accumulator) or value in self.stacks or value in self.open_carries:
                self.put_on_grid(value, ())
        result = self.result
        hide_ends(result, program)
        for place in (
            *(joined.place for joined in result.joined.values()),
            *result.values.values(),
            *result.weights.values(),
            *result.grids.values(),
        ):
            place.name = self.root(place).name
        self._units()
        self.result.output_names = {p.name for p in map(self.place_of, program.outputs) if p is not None}
        result.origins = {value: path for value, (path, _) in self.origin.items()}
        result.operands = {self.root(place).name for place in self.multiplied}
        for layer in self.result.layers:
            layer.input = layer.input and self.root(layer.input)
        return self.result

    def _units(self) -> None:
        """Drop the declared interval of a quantizer unless all tensors that share it have the same one."""
        places = [p for p in (*self.result.values.values(), *self.result.weights.values()) if p.kind != "weight"]
        units: dict[str, set[str | None]] = {}
        for place in places:
            units.setdefault(place.name, set()).add(place.unit)
        for place in places:
            if len(units[place.name]) > 1:
                place.unit = None

    # ------------------------------------------------------------------ one program

    def walk(self, program: Program, stack: tuple[int, ...]) -> None:
        for eqn in program.equations:
            for value in eqn.inputs:
                self.uses[value] = self.uses.get(value, 0) + 1
        for value in program.outputs:
            self.uses[value] = self.uses.get(value, 0) + 1
        around, self.number = self.number, numbers(program)
        for eqn in program.equations:
            self._equation(eqn, stack)
        self.number = around

    def _equation(self, eqn: Equation, stack: tuple[int, ...]) -> None:
        constant = self.result.is_constant(eqn)
        if all(constant):
            self.result.constants.update(eqn.outputs)
            self.keep_origin(eqn)
            return
        if eqn.body is not None:
            (self.scan if eqn.is_scan else self._remat)(eqn, eqn.body, constant, stack)
            return
        op = None if eqn.function or self.is_float(eqn.scope) else ops.read(eqn, constant)
        if op is not None and not self._applies(op, eqn, constant):
            op = None
        if op is None and self._left_in_reals(eqn):
            self.result.floats.add(eqn)
        if op is None:
            for value, is_constant in zip(eqn.inputs, constant, strict=True):
                if not is_constant and isinstance(self.state.get(value), Accumulator):
                    self.put_on_grid(value, stack)
            self.set_outputs(eqn, None)
            return
        if op.moves and not eqn.outputs[0].is_float:
            self._integer(op, eqn, constant, stack)
            return
        if op.by_row is not None:
            name, _ = self.name_of_weight(op, eqn, op.data(eqn, constant)[0], stack)
            op = ops.get(op.by_row) if name in self.by_row else op
        handler = {
            Role.PRODUCER: self._producer,
            Role.CHAIN: self._chain,
            Role.GRID: self._grid,
            Role.INTEGER: self._integer,
        }[op.role]
        handler(op, eqn, constant, stack)

    def _left_in_reals(self, eqn: Equation) -> bool:
        """Whether the recipe keeps the equation's module, or that of a parameter that it reads, in float."""
        owners = [parent(self.origin_of(value)[0]) for value in eqn.inputs if value in self.origin]
        # a group is in float if any of its equations is
        parts = eqn.source.equations if isinstance(eqn.source, Composite) else (eqn,)
        return any(self.is_float(path) for path in (eqn.scope, *(part.scope for part in parts), *owners))

    def _applies(self, op: Op, eqn: Equation, constant: Sequence[bool]) -> bool:
        data = op.data(eqn, constant)
        if op.role is Role.INTEGER:
            return not eqn.outputs[0].is_float
        if op.moves and not eqn.outputs[0].is_float:
            return True
        if not all(eqn.inputs[i].is_float for i in data) or not eqn.outputs[0].is_float:
            return False
        if op.role is Role.CHAIN and eqn.in_shapes[data[0]] != eqn.out_shapes[0]:
            return False
        weight = op.weight(eqn, constant)
        return weight is None or not self.is_float(parent(self.origin_of(eqn.inputs[weight])[0]))

    # ------------------------------------------------------------------ roles

    def _producer(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        weight = op.weight(eqn, constant)
        module, use, label = eqn.scope, None, join(eqn.scope, op.name)
        for index in op.data(eqn, constant):
            if index == weight:
                continue
            self.put_on_grid(eqn.inputs[index], stack)
            read = self.place_of(eqn.inputs[index])
            if read is not None and isinstance(op, ProductFacts):
                self.multiplied.append(read)
        if weight is not None:
            place = self.weight_place(op, eqn, weight, stack)
            module, label = place.module, place.module or op.name
            others = [i for i in op.data(eqn, constant) if i != weight]
            use = LayerUse(place, self.place_of(eqn.inputs[others[0]]) if others else None)
            self.result.layers.append(use)
        averages = isinstance(op, AverageFacts)
        channels = None if weight is None else {pair[0] for pair in op.channels(eqn, weight)}
        acc = Accumulator(
            self.unique(label),
            module,
            op.name,
            channels,
            eqn.location,
            permutable=isinstance(op, ProductFacts) and op.permutable,
            use=use,
            open=op.takes_steps,
            unit=op.unit(eqn),
            source=self.place_of(eqn.inputs[0]) if averages and op.average in self.same_grid else None,
        )
        self.result.ops[eqn] = (op, "producer")
        source = self.place_of(eqn.inputs[0]) if op.tabulates else None
        if source is not None:
            self.result.tables[eqn] = source
        self.set_outputs(eqn, acc)

    def _integer(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        for index in op.data(eqn, constant):
            if not constant[index] and eqn.inputs[index].is_float:
                self.put_on_grid(eqn.inputs[index], stack)
        places = [self.place_of(eqn.inputs[i]) for i in op.data(eqn, constant) if not constant[i]]
        if len(places) > 1:
            places = [self.grid_to_share(eqn.inputs[i], stack) for i in op.data(eqn, constant) if not constant[i]]
        for place in places[1:]:
            # Codes can be compared instead of numbers only if both operands have the same quantization parameters.
            if place is not None and places[0] is not None:
                self.merge(places[0], place)
        self.result.ops[eqn] = (op, "integer")
        self.set_outputs(eqn, None)

    def _chain(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        value = eqn.inputs[op.data(eqn, constant)[0]]
        state = self.state.get(value)
        if isinstance(state, Accumulator) and self.uses[value] == 1:
            axes = op.chain_axes(eqn, constant)
            fits = state.channels is None or axes <= state.channels
            if op.on_grid or (fits and state.open and not state.clamped):
                self.result.ops[eqn] = (op, "chain")
                steps = not op.on_grid
                self.set_outputs(
                    eqn,
                    dataclasses.replace(
                        state,
                        clamped=state.clamped or op.clamps,
                        permutable=state.permutable and not steps,
                        averaged=self._averages(state, op, eqn, constant) if steps else state.averaged,
                    ),
                )
                return
        if op.on_grid and state is None and not op.clamps:
            # A cast or dropout of a tensor without a quantizer: the next reader decides whether it gets one.
            self.set_outputs(eqn, None)
            self.labels[eqn.outputs[0]] = self.label_of(value, eqn)
            # In evaluation nothing is dropped, so what a loop over time carries has its own quantizer.
            if op.vanishes or self.timed:
                self.casts[eqn.outputs[0]] = op, eqn
            return
        self.put_on_grid(value, stack)
        if op.on_grid:
            self.result.ops[eqn] = (op, "grid")
            self.set_outputs(eqn, self._join_grid(op, eqn, constant, value, stack))
            return
        self.result.ops[eqn] = (op, "start")
        name = self.unique(join(eqn.scope, op.label or op.name))
        self.set_outputs(eqn, Accumulator(name, eqn.scope, Rescale.name, None, eqn.location))

    def _averages(self, state: Accumulator, op: Op, eqn: Equation, constant: Sequence[bool]) -> bool:
        """Whether this is the first step after a sum, and divides it by a number that is no parameter."""
        roles = op.chain_constants(eqn, constant)
        if state.averaged is not None or eqn.primitive not in ("div", "mul") or "value" not in roles:
            return False
        return eqn.inputs[roles["value"]] not in self.origin

    def _grid(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        value = eqn.inputs[op.data(eqn, constant)[0]]
        state = self.state.get(value)
        weight = op.weight(eqn, constant)
        if weight is not None:
            place = self.weight_place(op, eqn, weight, stack)
            self.result.ops[eqn] = (op, "grid")
            self.set_outputs(eqn, Grid(place))
            if not place.integers:
                self.result.layers.append(LayerUse(place, None))
            return
        joins = isinstance(state, Accumulator) and state.permutable and self.uses[value] == 1
        permutation = op.permutation(op.attributes(eqn)) if joins else None
        if permutation is not None:
            assert isinstance(state, Accumulator)
            channels = state.channels and {permutation.index(axis) for axis in state.channels}
            self.result.ops[eqn] = (op, "permute")
            self.set_outputs(eqn, dataclasses.replace(state, channels=channels))
            return
        data = op.data(eqn, constant)
        for index in data:
            if not constant[index]:
                self.put_on_grid(eqn.inputs[index], stack)
        if len(data) > 1:
            for index in data:
                self.grid_to_share(eqn.inputs[index], stack)
        first = next(self.place_of(eqn.inputs[i]) for i in data if not constant[i])
        assert first is not None
        for index in data:
            if constant[index]:
                # A parameter that is joined to codes (concatenated, selected) gets their quantization parameters.
                name = join(first.label, self.origin_of(eqn.inputs[index])[0])
                self.result.weights[eqn, index] = self.beside(first, name, eqn.inputs[index], stack)
            else:
                other = self.place_of(eqn.inputs[index])
                assert other is not None
                self.merge(first, other)
        self.result.ops[eqn] = (op, "grid")
        source = next(eqn.inputs[i] for i in data if not constant[i])
        self.set_outputs(eqn, self._join_grid(op, eqn, constant, source, stack))

    def _join_grid(
        self, op: Op, eqn: Equation, constant: Sequence[bool], source: Value, stack: tuple[int, ...]
    ) -> Grid:
        """The grid of a result that shares the quantizer of `source`.

        A result that may hold numbers outside of that quantizer's range is noted for the calibration.
        """
        if may_leave_range(op, eqn, constant, self.number):
            place = self.grid_to_share(source, stack)
            assert place is not None
            own = dataclasses.replace(
                place,
                label=self.unique(join(place.label, op.name)),
                kind="activation",
                module=eqn.scope,
                op=op.name,
                shape=eqn.out_shapes[0],
                stack=stack,
                timed=self.timed_within(stack),
                location=eqn.location,
            )
            self.result.joined[eqn.outputs[0]] = Joined(own)
            self.merge(place, own)
        found = self.state[source]
        assert isinstance(found, Grid)
        return found

    # ------------------------------------------------------------------ bodies

    def _remat(self, eqn: Equation, body: Program, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        for outer, inner, is_constant in zip(eqn.inputs, body.inputs, constant, strict=True):
            if is_constant:
                self.alias_constant(outer, inner)
                continue
            if self.uses[outer] > 1 and isinstance(self.state.get(outer), Accumulator):
                self.put_on_grid(outer, stack)
            self.state[inner] = self.state.get(outer)
            self.labels[inner] = self.label_of(outer, eqn)
        self.walk(body, stack)
        for outer, inner in zip(eqn.inputs, body.inputs, strict=True):
            self.hoist(inner, outer, stack)
        for outer, inner in zip(eqn.outputs, body.outputs, strict=True):
            if inner in self.result.constants or inner.constant is not None:
                self.alias_constant(inner, outer)
            else:
                if self.uses.get(inner, 0) > 1 and isinstance(self.state.get(inner), Accumulator):
                    self.put_on_grid(inner, stack)
                self.state[outer] = self.state.get(inner)
                self.labels[outer] = self.label_of(inner, eqn)
