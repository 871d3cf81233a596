"""The annotator's result: how each equation is read, which tensors have a quantizer, and what it is called."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from qjax.ops import Op
from qjax.ops.base import Unit
from qjax.ops.facts import End
from qjax.targets import Target
from qjax.tracing.program import Equation, Value

Mode = Literal["producer", "start", "chain", "permute", "grid", "integer"]
"""How an equation is read.

"start" is an affine step that begins a rescale of its own; "permute" transposes a matrix product's accumulator.
"""


@dataclasses.dataclass(eq=False)
class Place:
    """One tensor that has a quantizer.

    label: the tensor's unique name. name: the quantizer's; tensors with the same one share their quantizer. kind:
    whether it is a weight, an activation or an input. module: path of the module that made the tensor; op: the
    operation that did. axes: of a weight, those along which it can have scales. stack: lengths of the scans around it.
    location: the user's line. unit: the interval within which its numbers lie, see `Op.unit`. timed: the positions in
    `stack` of scans over data, whose iterations share one quantizer. on_input_grid: an average that has its input's
    quantization parameters. integers: whether it is a table of a function of integers.
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
    unit: Unit | None = None
    timed: tuple[int, ...] = ()
    on_input_grid: bool = False
    integers: bool = False

    def own(self, stack: Sequence[Any]) -> tuple[Any, ...]:
        """Selects from one entry per scan (a length, an iteration) those of scans with a quantizer per iteration."""
        return tuple(item for position, item in enumerate(stack) if position not in self.timed)


@dataclasses.dataclass(eq=False)
class LayerUse:
    """One use of a weight: its place, and the places of the layer's input and output."""

    weight: Place
    input: Place | None
    output: Place | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """A result that may contain numbers outside of its operand's range, see `tracing.joined`.

    place: its label names the result, its name the operand's quantizer. hidden: the ends of the range beyond which all
    readers ignore numbers. extremum: whether a maximum or minimum made it, whose infinities come from padding.
    """

    place: Place
    hidden: frozenset[End] = frozenset()
    extremum: bool = False


@dataclasses.dataclass(eq=False)
class Annotation:
    """What `annotate` decided about a program.

    ops: how each equation is read; equations that are not listed are computed in float. values: the tensors that are
    quantized. weights: the operands that are quantized where they are read: weights, constants combined with codes, the
    initial carry of a scan. grids: stacked outputs of a scan with the quantization parameters of a place inside. timed:
    the scans over data. invariant: those operands of `weights` inside of such scans that no iteration changes. target:
    the runtime whose formulas compute averages; None rounds them to the nearest code. tables: functions of codes, and
    the place of their input. operands: the quantizers of activations that a sum of products reads, by name. joined: the
    results that the calibration observes beside the operand whose quantizer they share. origins: of constants, the path
    of the parameter from which they are made.
    """

    ops: dict[Equation, tuple[Op, Mode]] = dataclasses.field(default_factory=dict)
    values: dict[Value, Place] = dataclasses.field(default_factory=dict)
    weights: dict[tuple[Equation, int], Place] = dataclasses.field(default_factory=dict)
    grids: dict[Value, Place] = dataclasses.field(default_factory=dict)
    timed: set[Equation] = dataclasses.field(default_factory=set)
    invariant: set[tuple[Equation, int]] = dataclasses.field(default_factory=set)
    constants: set[Value] = dataclasses.field(default_factory=set)
    layers: list[LayerUse] = dataclasses.field(default_factory=list)
    floats: set[Equation] = dataclasses.field(default_factory=set)
    tables: dict[Equation, Place] = dataclasses.field(default_factory=dict)
    output_names: set[str] = dataclasses.field(default_factory=set)
    operands: set[str] = dataclasses.field(default_factory=set)
    joined: dict[Value, Joined] = dataclasses.field(default_factory=dict)
    origins: dict[Value, str] = dataclasses.field(default_factory=dict)
    target: Target | None = None

    def is_constant(self, eqn: Equation) -> tuple[bool, ...]:
        """Per input: whether it is made from parameters and literals only."""
        return tuple(v.constant is not None or v in self.constants for v in eqn.inputs)

    def exponents(self) -> frozenset[str]:
        """The names of the quantizers of tensors that a softmax exponentiates."""
        made = {value: eqn for eqn in self.ops for value in eqn.outputs}
        found: set[str] = set()
        for eqn, (op, _) in self.ops.items():
            if not op.exponential:
                continue
            value = eqn.inputs[0]
            while value not in self.values and value in made and self.ops[made[value]][0].moves:
                value = made[value].inputs[0]
            if value in self.values:
                found.add(self.values[value].name)
        return frozenset(found)

    def compared(self) -> dict[str, tuple[int, ...]]:
        """The axes of channels whose ranges are compared, by label: of inputs, outputs, and the operands of norms.

        These are the last axis, and for inputs and outputs also the first one after the batch, where some layouts have
        channels.
        """
        normed = {eqn.inputs[0] for eqn, (op, _) in self.ops.items() if op.rescales}
        found: dict[str, tuple[int, ...]] = {}
        for value, place in self.values.items():
            if place.kind == "input" or place.name in self.output_names:
                found[place.label] = (1, -1)
            elif value in normed:
                found[place.label] = (-1,)
        return found

    def places(self) -> dict[str, Place]:
        """One place per quantizer, in order of appearance."""
        found: dict[str, Place] = {}
        for place in (*self.values.values(), *self.weights.values()):
            found.setdefault(place.name, place)
        return found
