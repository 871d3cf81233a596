"""Decides which tensors carry a quantizer, and under which name.

One pass over the program in execution order. A producer (a convolution, a sum, an addition) starts an
accumulator; affine steps and clamps that are its only reader join its chain; whoever needs codes next puts one
quantizer on the tensor at the chain's end. Operations that only move codes share their input's quantizer, and a
concatenation makes its inputs share one. Nothing depends on sizes of the batch or on training mode, so the
same tensors are found in both.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from qjax import ops
from qjax.ops import Op, Role
from qjax.tracing.program import Equation, Program, Value

Mode = Literal["producer", "start", "chain", "permute", "grid"]
"""How an equation is read: "start" is an affine step that begins a rescale of its own; "permute" a transpose of a
matrix product's accumulator."""

_SUMS = {"mean": "sum", "average_pool": "window_sum"}


@dataclasses.dataclass(eq=False)
class Place:
    """One tensor with a quantizer.

    label: of the tensor, unique. name: of the quantizer; places on one grid share it. kind: whose tensor it is.
    module: path of the module that made the tensor; op: the operation that did. axes: of a weight, those along
    which it may keep scales of its own. stack: lengths of the scans around it. location: the user's line.
    """

    label: str
    name: str
    kind: Literal["input", "activation", "weight"]
    module: str
    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    location: str | None = None


@dataclasses.dataclass(eq=False)
class LayerUse:
    """One use of a weight: its place, and the places of what flows in and out."""

    weight: Place
    input: Place | None
    output: Place | None = None


@dataclasses.dataclass(eq=False)
class Annotation:
    """The result. `ops`: how each equation is read; what is absent is computed on reals."""

    ops: dict[Equation, tuple[Op, Mode]] = dataclasses.field(default_factory=dict)
    values: dict[Value, Place] = dataclasses.field(default_factory=dict)
    weights: dict[tuple[Equation, int], Place] = dataclasses.field(default_factory=dict)
    constants: set[Value] = dataclasses.field(default_factory=set)
    layers: list[LayerUse] = dataclasses.field(default_factory=list)
    output_names: set[str] = dataclasses.field(default_factory=set)

    def is_constant(self, eqn: Equation) -> tuple[bool, ...]:
        """Per input: whether it is made from parameters and literals only."""
        return tuple(v.constant is not None or v in self.constants for v in eqn.inputs)

    def places(self) -> dict[str, Place]:
        """One place per quantizer, in order of appearance."""
        found: dict[str, Place] = {}
        for place in (*self.values.values(), *self.weights.values()):
            found.setdefault(place.name, place)
        return found


@dataclasses.dataclass(eq=False)
class _Accumulator:
    """The state of a value in a producer's chain.

    channels: axes along which constants may vary (None: any). source: where a sum shall stay on its input's grid, that
    input; averaged: whether the steps so far are one division by a constant (None: no step yet).
    """

    name: str
    module: str
    op: str
    channels: set[int] | None
    location: str | None
    permutable: bool = False
    clamped: bool = False
    use: LayerUse | None = None
    source: Place | None = None
    averaged: bool | None = None


class _Grid:
    """The state of a value that stands on a grid: the place that it shares, possibly merged with others."""

    def __init__(self, place: Place) -> None:
        self.place = place


def annotate(
    program: Program,
    names: Sequence[str],
    constant: Sequence[bool],
    is_float: Callable[[str], bool] = lambda path: False,
    same_grid: Collection[str] = (),
) -> Annotation:
    """Annotate a program.

    Args:
      names: per input, the path of the parameter or the name of the model's input.
      constant: per input, whether it is a parameter (or other state) rather than data.
      is_float: which module paths the recipe leaves alone.
      same_grid: which averages, "mean" and "average_pool", share the quantizer of their input.
    """
    return _Annotator(is_float, same_grid).run(program, names, constant)


class _Annotator:
    def __init__(self, is_float: Callable[[str], bool], same_grid: Collection[str]) -> None:
        self.result = Annotation()
        self.is_float = is_float
        self.same_grid = {_SUMS[name] for name in same_grid}
        self.state: dict[Value, _Accumulator | _Grid | None] = {}
        self.origin: dict[Value, tuple[str, tuple[str, ...]]] = {}
        self.uses: dict[Value, int] = {}
        self.labels: dict[Value, tuple[str, str, str | None]] = {}
        self.used_names: dict[str, int] = {}
        self.weight_names: dict[str, list[tuple[str, ...]]] = {}
        self.merged: dict[Place, Place] = {}
        self.casts: dict[Value, tuple[Op, Equation]] = {}

    def run(self, program: Program, names: Sequence[str], constant: Sequence[bool]) -> Annotation:
        for value, name, is_constant in zip(program.inputs, names, constant, strict=True):
            if is_constant:
                self.result.constants.add(value)
                self.origin[value] = (name, ())
            else:
                self.state[value] = None
                self.labels[value] = (name, "input", None)
        self._program(program, ())
        for value in program.outputs:
            if isinstance(self.state.get(value), _Accumulator):
                self._codes(value, ())
        for place in (*self.result.values.values(), *self.result.weights.values()):
            place.name = self._root(place).name
        self.result.output_names = {p.name for p in map(self._place, program.outputs) if p is not None}
        for layer in self.result.layers:
            layer.input = layer.input and self._root(layer.input)
        return self.result

    # ------------------------------------------------------------------ one program

    def _program(self, program: Program, stack: tuple[int, ...]) -> None:
        for eqn in program.equations:
            for value in eqn.inputs:
                self.uses[value] = self.uses.get(value, 0) + 1
        for value in program.outputs:
            self.uses[value] = self.uses.get(value, 0) + 1
        for eqn in program.equations:
            self._equation(eqn, stack)

    def _equation(self, eqn: Equation, stack: tuple[int, ...]) -> None:
        constant = self.result.is_constant(eqn)
        if all(constant):
            self.result.constants.update(eqn.outputs)
            self._constant_origin(eqn)
            return
        if eqn.body is not None:
            (self._scan if eqn.primitive == "scan" else self._remat)(eqn, eqn.body, constant, stack)
            return
        op = None if eqn.function or self.is_float(eqn.scope) else ops.read(eqn, constant)
        if op is not None and not self._applies(op, eqn, constant):
            op = None
        if op is None:
            for value, is_constant in zip(eqn.inputs, constant, strict=True):
                if not is_constant and isinstance(self.state.get(value), _Accumulator):
                    self._codes(value, stack)
            self._outputs(eqn, None)
            return
        handler = {Role.PRODUCER: self._producer, Role.CHAIN: self._chain, Role.GRID: self._grid}[op.role]
        handler(op, eqn, constant, stack)

    def _applies(self, op: Op, eqn: Equation, constant: Sequence[bool]) -> bool:
        data = op.data(eqn, constant)
        if not all(eqn.inputs[i].is_float for i in data) or not eqn.outputs[0].is_float:
            return False
        if op.role is Role.CHAIN and eqn.in_shapes[data[0]] != eqn.out_shapes[0]:
            return False
        weight = op.weight(eqn, constant)
        return weight is None or not self.is_float(_parent(self._origin(eqn.inputs[weight])[0]))

    # ------------------------------------------------------------------ roles

    def _producer(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        weight = op.weight(eqn, constant)
        module, use, label = eqn.scope, None, _join(eqn.scope, op.name)
        for index in op.data(eqn, constant):
            if index == weight:
                continue
            self._codes(eqn.inputs[index], stack)
        if weight is not None:
            place = self._weight(op, eqn, weight, stack)
            module, label = place.module, place.module or op.name
            others = [i for i in op.data(eqn, constant) if i != weight]
            use = LayerUse(place, self._place(eqn.inputs[others[0]]))
            self.result.layers.append(use)
        channels = None if weight is None else {pair[0] for pair in op.channels(eqn, weight)}
        acc = _Accumulator(
            self._unique(label),
            module,
            op.name,
            channels,
            eqn.location,
            permutable=op.name == "dot",
            use=use,
            source=self._place(eqn.inputs[0]) if op.name in self.same_grid else None,
        )
        self.result.ops[eqn] = (op, "producer")
        self._outputs(eqn, acc)

    def _chain(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        value = eqn.inputs[op.data(eqn, constant)[0]]
        state = self.state.get(value)
        clamps = op.name == "clamp"
        if isinstance(state, _Accumulator) and self.uses[value] == 1:
            axes = op.chain_axes(eqn, constant)
            fits = state.channels is None or axes <= state.channels
            if op.on_grid or (fits and not state.clamped):
                self.result.ops[eqn] = (op, "chain")
                steps = not op.on_grid
                self._outputs(
                    eqn,
                    dataclasses.replace(
                        state,
                        clamped=state.clamped or clamps,
                        permutable=state.permutable and not steps,
                        averaged=self._averages(state, op, eqn, constant) if steps else state.averaged,
                    ),
                )
                return
        if op.on_grid and state is None and not clamps:
            # a cast or dropout of something that is not quantized yet: the next reader decides
            self._outputs(eqn, None)
            self.labels[eqn.outputs[0]] = self._label(value, eqn)
            if op.name == "cast":
                self.casts[eqn.outputs[0]] = op, eqn
            return
        self._codes(value, stack)
        if op.on_grid:
            self.result.ops[eqn] = (op, "grid")
            self._outputs(eqn, self.state[value])
            return
        self.result.ops[eqn] = (op, "start")
        name = self._unique(_join(eqn.scope, op.name if op.name != "affine_step" else "rescale"))
        self._outputs(eqn, _Accumulator(name, eqn.scope, "rescale", None, eqn.location))

    def _averages(self, state: _Accumulator, op: Op, eqn: Equation, constant: Sequence[bool]) -> bool:
        """Whether a step, the first one, divides by a number that is no parameter."""
        roles = op.chain_constants(eqn, constant)
        if state.averaged is not None or eqn.primitive not in ("div", "mul") or "value" not in roles:
            return False
        return eqn.inputs[roles["value"]] not in self.origin

    def _grid(self, op: Op, eqn: Equation, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        value = eqn.inputs[op.data(eqn, constant)[0]]
        state = self.state.get(value)
        weight = op.weight(eqn, constant)
        if weight is not None:
            place = self._weight(op, eqn, weight, stack)
            self.result.ops[eqn] = (op, "grid")
            self._outputs(eqn, _Grid(place))
            self.result.layers.append(LayerUse(place, None))
            return
        if op.name == "transpose" and isinstance(state, _Accumulator) and state.permutable and self.uses[value] == 1:
            permutation = list(eqn.params["permutation"])
            channels = state.channels and {permutation.index(axis) for axis in state.channels}
            self.result.ops[eqn] = (op, "permute")
            self._outputs(eqn, dataclasses.replace(state, channels=channels))
            return
        data = op.data(eqn, constant)
        for index in data:
            if not constant[index]:
                self._codes(eqn.inputs[index], stack)
        first = next(self._place(eqn.inputs[i]) for i in data if not constant[i])
        assert first is not None
        for index in data:
            if constant[index]:
                # a parameter put beside codes takes their quantizer
                self.result.weights[eqn, index] = first
            else:
                other = self._place(eqn.inputs[index])
                assert other is not None
                self._merge(first, other)
        self.result.ops[eqn] = (op, "grid")
        self._outputs(eqn, _Grid(first))

    # ------------------------------------------------------------------ bodies

    def _remat(self, eqn: Equation, body: Program, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        for outer, inner, is_constant in zip(eqn.inputs, body.inputs, constant, strict=True):
            if is_constant:
                self._alias_constant(outer, inner)
                continue
            if self.uses[outer] > 1 and isinstance(self.state.get(outer), _Accumulator):
                self._codes(outer, stack)
            self.state[inner] = self.state.get(outer)
            self.labels[inner] = self._label(outer, eqn)
        self._program(body, stack)
        for outer, inner in zip(eqn.inputs, body.inputs, strict=True):
            self._hoist(inner, outer, stack)
        for outer, inner in zip(eqn.outputs, body.outputs, strict=True):
            if inner in self.result.constants or inner.constant is not None:
                self._alias_constant(inner, outer)
            else:
                self.state[outer] = self.state.get(inner)
                self.labels[outer] = self._label(inner, eqn)

    def _scan(self, eqn: Equation, body: Program, constant: Sequence[bool], stack: tuple[int, ...]) -> None:
        fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        for index, (outer, inner) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
            carry = fixed <= index < fixed + carried
            if constant[index] and not carry:
                self._alias_constant(outer, inner)
                continue
            # what enters an iteration is real: every iteration may bring another grid
            self.state[inner] = None
            self.labels[inner] = (_join(eqn.scope, "scan_input"), eqn.scope, eqn.location)
            if index < fixed and not constant[index]:
                self._codes_if_accumulator(outer, stack)
                self.state[inner] = self.state.get(outer)
                self.labels[inner] = self._label(outer, eqn)
        self._program(body, (*stack, eqn.params["length"]))
        for index, (outer, inner) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
            if index < fixed:
                # the same tensor in every iteration: one grid
                self._hoist(inner, outer, stack)
            elif inner in self.result.values and self.state.get(outer) is None and not constant[index]:
                # reals have to stand on a grid before the first iteration can put them on its own
                self._codes(outer, stack)
        for outer in eqn.outputs:
            self.state[outer] = None
            self.labels[outer] = (_join(eqn.scope, "scan_output"), eqn.scope, eqn.location)

    def _hoist(self, inner: Value, outer: Value, stack: tuple[int, ...]) -> None:
        """Move the quantizer that a body put on its input to the value that comes in."""
        place = self.result.values.pop(inner, None)
        if place is None:
            return
        known = self._place(outer)
        if known is None:
            place.stack = stack
            self.result.values[outer] = place
            self.state[outer] = _Grid(place)
        else:
            self._merge(known, place)

    def _codes_if_accumulator(self, value: Value, stack: tuple[int, ...]) -> None:
        if isinstance(self.state.get(value), _Accumulator):
            self._codes(value, stack)

    # ------------------------------------------------------------------ values

    def _outputs(self, eqn: Equation, state: "_Accumulator | _Grid | None") -> None:
        for index, value in enumerate(eqn.outputs):
            on_grid = isinstance(state, _Grid) and value.is_float and eqn.primitive != "dropout"
            self.state[value] = state if index == 0 or on_grid else None
            self.labels.setdefault(value, (_join(eqn.scope, eqn.function or eqn.primitive), eqn.scope, eqn.location))

    def _codes(self, value: Value, stack: tuple[int, ...]) -> None:
        """Make sure that a value stands on a grid, by putting a quantizer on it if it does not."""
        state = self.state.get(value)
        if isinstance(state, _Grid) or value in self.result.constants or value.constant is not None:
            return
        if value in self.casts:
            # codes are made from the number before its cast, as the graph's input is
            op, eqn = self.casts[value]
            (source,) = eqn.inputs
            self._codes(source, stack)
            self.result.ops[eqn] = (op, "grid")
            self.state[value] = self.state[source]
            return
        if isinstance(state, _Accumulator):
            place = Place(
                state.name,
                state.name,
                "activation",
                state.module,
                state.op,
                value.shape,
                (),
                stack,
                state.location,
            )
            if state.use is not None:
                state.use.output = place
            if state.source is not None and state.averaged and state.source.stack == stack:
                self._merge(state.source, place)
        else:
            name, module, location = self._label(value, None)
            kind = "input" if module == "input" else "activation"
            module = "" if kind == "input" else module
            op = "input" if kind == "input" else "float"
            label = self._unique(name)
            place = Place(label, label, kind, module, op, value.shape, (), stack, location)
        self.result.values[value] = place
        self.state[value] = _Grid(place)

    def _place(self, value: Value) -> Place | None:
        state = self.state.get(value)
        return state.place if isinstance(state, _Grid) else None

    def _weight(self, op: Op, eqn: Equation, index: int, stack: tuple[int, ...]) -> Place:
        value = eqn.inputs[index]
        path, signature = self._origin(value)
        seen = self.weight_names.setdefault(path, [])
        if signature not in seen:
            seen.append(signature)
        position = seen.index(signature)
        name = path if position == 0 else f"{path}#{position + 1}"
        place = Place(
            name,
            name,
            "weight",
            _parent(path),
            op.name,
            value.shape,
            op.weight_axes(eqn, index),
            stack,
            eqn.location,
        )
        self.result.weights[eqn, index] = place
        return place

    def _label(self, value: Value, eqn: Equation | None) -> tuple[str, str, str | None]:
        if value in self.labels:
            return self.labels[value]
        return ("value", eqn.scope if eqn else "", eqn.location if eqn else None)

    def _unique(self, name: str) -> str:
        count = self.used_names.get(name, 0) + 1
        self.used_names[name] = count
        return name if count == 1 else f"{name}#{count}"

    def _merge(self, a: Place, b: Place) -> None:
        a, b = self._root(a), self._root(b)
        if a is not b:
            self.merged[b] = a

    def _root(self, place: Place) -> Place:
        while place in self.merged:
            place = self.merged[place]
        return place

    # ------------------------------------------------------------------ constants

    def _origin(self, value: Value) -> tuple[str, tuple[str, ...]]:
        return self.origin.get(value, ("constant", ()))

    def _constant_origin(self, eqn: Equation) -> None:
        known = next((self.origin[v] for v in eqn.inputs if v in self.origin), None)
        if known is not None:
            path, signature = known
            for value in eqn.outputs:
                self.origin[value] = (path, (*signature, f"{eqn.primitive}{value.shape}"))

    def _alias_constant(self, source: Value, target: Value) -> None:
        self.result.constants.add(target)
        if source in self.origin:
            self.origin[target] = self.origin[source]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _join(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope else name
