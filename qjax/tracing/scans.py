"""Which tensors of a scan have a quantizer, and which of its values are constants.

A scan over parameters is a stack of layers. Each iteration can have its own quantization parameters, and the carry is
float in between. A scan over data is a loop over time. It repeats one layer, so all iterations share their quantizers.
Slices of the data keep the data's quantization parameters, the incoming carry has those of the outgoing one, and
stacked outputs keep those of their parts. So no tensor is quantized twice.
"""

from collections.abc import Sequence

from qjax.tracing.annotation import Place
from qjax.tracing.annotation_states import Accumulator, Grid, States, join
from qjax.tracing.program import Equation, Program, Value


def constant_outputs(program: Program, constant: Sequence[bool]) -> list[bool]:
    """Per output, whether it is made from constants only, when the inputs are constant as given."""
    known = {value for value, flag in zip(program.inputs, constant, strict=True) if flag}
    for eqn in program.equations:
        flags = [value.constant is not None or value in known for value in eqn.inputs]
        if all(flags):
            known.update(eqn.outputs)
        elif eqn.body is not None:
            inner = steady(eqn, eqn.body, flags) if eqn.is_scan else flags
            found = constant_outputs(eqn.body, inner)
            known.update(value for value, flag in zip(eqn.outputs, found, strict=True) if flag)
    return [value.constant is not None or value in known for value in program.outputs]


def steady(eqn: Equation, body: Program, constant: Sequence[bool]) -> list[bool]:
    """Per input of a scan's body, whether it is constant in every iteration.

    A carry is (a counter, a random key) if it starts from a constant and follows from constants.
    """
    fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    flags = list(constant)
    while True:
        outputs = constant_outputs(body, flags)
        found = [
            flag and (not fixed <= index < fixed + carried or outputs[index - fixed])
            for index, flag in enumerate(flags)
        ]
        if found == flags:
            return flags
        flags = found


class Scans(States):
    """The part of the annotator that enters scans."""

    def walk(self, program: Program, stack: tuple[int, ...]) -> None:
        """Annotate the equations of a program that lies in scans of these lengths."""
        raise NotImplementedError

    def scan(self, eqn: Equation, body: Program, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        """Annotate a scan."""
        fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        inside = (*stack, eqn.params["length"])
        flags = steady(eqn, body, constant)
        data = [i for i in range(fixed + carried, len(constant)) if not constant[i]]
        fresh = {i for i in range(len(constant)) if isinstance(self.state.get(eqn.inputs[i]), Accumulator)}
        for index, (outer, inner) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
            carry = fixed <= index < fixed + carried
            if flags[index]:
                self.alias_constant(outer, inner)
                self.depth[inner] = self.depth.get(outer, 0) if index < fixed else len(inside)
                continue
            if index in fresh and (not carry or data):
                self.put_on_grid(outer, stack)
            if carry:
                # in a stack of layers each iteration can have other quantization parameters, so the carry is float
                self.state[inner] = None
                name = "carry" if data else "scan_input"
                self.labels[inner] = (join(eqn.scope, name), eqn.scope, eqn.location)
            else:
                self.state[inner] = self.state.get(outer)
                self.labels[inner] = self.label_of(outer, eqn)
        if data:
            self.result.timed.add(eqn)
            self.timed = (*self.timed, len(stack))
        self.walk(body, inside)
        entering = {*body.inputs[:fixed], *body.inputs[fixed + carried :]}
        for index, (outer, inner) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
            if not flags[index] and not fixed <= index < fixed + carried:
                # the same tensor in every iteration, or slices of one tensor: one quantizer
                self.hoist(inner, outer, stack, entering)
        carries = range(fixed, fixed + carried)
        for index, value, outer in zip(carries, body.outputs, eqn.outputs, strict=False):
            self.labels[outer] = (join(eqn.scope, "scan_output"), eqn.scope, eqn.location)
            if flags[index]:
                self._constant(value, outer, len(stack))
            elif not (data and self._carry(eqn, index, body.inputs[index], value, outer, stack, index in fresh)):
                if isinstance(self.state.get(value), Accumulator):
                    self.open_carries.add(outer)
                self.state[outer] = None
                source = eqn.inputs[index]
                if body.inputs[index] in self.result.values and self.state.get(source) is None and not constant[index]:
                    # quantize float inputs before the loop; the first iteration requantizes them
                    self.put_on_grid(source, stack)
        for value, outer in zip(body.outputs[carried:], eqn.outputs[carried:], strict=True):
            self.labels[outer] = (join(eqn.scope, "scan_output"), eqn.scope, eqn.location)
            self._stacked(value, outer, inside, bool(data))
        self.timed = self.timed_within(stack)

    def _constant(self, inner: Value, outer: Value, depth: int) -> None:
        self.alias_constant(inner, outer)
        self.depth[outer] = depth

    def _carry(
        self, eqn: Equation, index: int, inner: Value, value: Value, outer: Value, stack: tuple[int, ...], fresh: bool
    ) -> bool:
        """Quantize a carry of a scan over data; False if it remains float."""
        asked, state = self.place_of(inner), self.state.get(value)
        if value in self.result.constants or value.constant is not None:
            return False
        if asked is None and state is None:
            return False
        self.put_on_grid(value, (*stack, eqn.params["length"]))
        place = self.place_of(value)
        assert place is not None
        if asked is not None:
            self.merge(place, asked)
            self.result.values.pop(inner, None)
        source = eqn.inputs[index]
        start = self.place_of(source)
        if start is None and source not in self.result.constants and source.constant is None:
            self.put_on_grid(source, stack)
            start, fresh = self.place_of(source), True
        if start is not None and fresh:
            self.merge(place, start)
        elif start is None or self.root(start) is not self.root(place):
            # a constant, or a tensor that other operations read too
            free = start is None and source not in self.origin
            entry = self.beside(place, join(eqn.scope, "start"), source, stack)
            entry.unit = place.unit if free else None
            self.result.weights[eqn, index] = entry
        self.result.grids[inner] = place
        self.state[outer] = Grid(place)
        return True

    def _stacked(self, value: Value, outer: Value, stack: tuple[int, ...], timed: bool) -> None:
        if value in self.result.constants or value.constant is not None:
            self._constant(value, outer, len(stack) - 1)
            return
        open_ended = isinstance(self.state.get(value), Accumulator) or value in self.stacks
        if open_ended and self.uses.get(outer):
            self.put_on_grid(value, stack)
        place = self.place_of(value)
        self.state[outer] = None
        if place is not None and timed:
            self.state[outer] = Grid(place)
            self.result.grids[outer] = place
        elif place is not None:
            self.stacks.add(outer)

    def beside(self, place: Place, name: str, value: Value, stack: tuple[int, ...]) -> Place:
        """A place with its own label and another place's quantizer."""
        label = self.unique(name)
        found = Place(label, label, "activation", place.module, place.op, value.shape, (), stack, place.location)
        found.timed = self.timed_within(stack)
        self.merge(place, found)
        return found
