"""The state of each value during annotation: accumulator in a chain, quantized (on a grid), float, or constant."""

import dataclasses
from collections.abc import Collection

from qjax.numerics.meshes import PLACEMENTS
from qjax.ops import Op
from qjax.ops.base import Unit
from qjax.tracing.annotation import Annotation, LayerUse, Place
from qjax.tracing.program import Equation, Value


@dataclasses.dataclass(eq=False)
class Accumulator:
    """The state of a value in a producer's chain.

    channels: axes along which constants may vary (None: any). open: whether affine steps may join. unit: the interval
    that its numbers keep to, see `Op.unit`. source: where a sum shall stay on its input's grid, that
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
    open: bool = True
    unit: Unit | None = None


class Grid:
    """The state of a quantized value: the place whose quantizer it shares, possibly merged with others."""

    def __init__(self, place: Place) -> None:
        self.place = place


class States:
    """The state of every value of a program, and the `Annotation` that results.

    state: of data: its accumulator, its grid, or None for float. origin: of constants: the parameter they are made
    from, and how. uses: how many equations read a value. labels: (name, module, line) of values without a producer.
    casts: values that were cast before they had a quantizer. depth: of constants inside scans, the number of enclosing
    scans that change them. timed: the positions, among the enclosing scans, of those over data. stacks: stacked outputs
    of scans whose parts may have different quantization parameters. open_carries: final carries that are accumulators.
    """

    def __init__(self) -> None:
        self.result = Annotation()
        self.state: dict[Value, Accumulator | Grid | None] = {}
        self.origin: dict[Value, tuple[str, tuple[str, ...]]] = {}
        self.uses: dict[Value, int] = {}
        self.labels: dict[Value, tuple[str, str, str | None]] = {}
        self.used_names: dict[str, int] = {}
        self.weight_names: dict[str, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
        self.merged: dict[Place, Place] = {}
        self.unnamed: dict[Value, int] = {}
        self.casts: dict[Value, tuple[Op, Equation]] = {}
        self.depth: dict[Value, int] = {}
        self.timed: tuple[int, ...] = ()
        self.stacks: set[Value] = set()
        self.open_carries: set[Value] = set()

    def set_outputs(self, eqn: Equation, state: "Accumulator | Grid | None") -> None:
        """Give an equation's outputs a state: the first one, and where it is a grid all floats."""
        for index, value in enumerate(eqn.outputs):
            on_grid = isinstance(state, Grid) and value.is_float and eqn.primitive != "dropout"
            self.state[value] = state if index == 0 or on_grid else None
            self.labels.setdefault(value, (join(eqn.scope, eqn.function or eqn.primitive), eqn.scope, eqn.location))

    def put_on_grid(self, value: Value, stack: tuple[int, ...]) -> None:
        """Make sure that a value is quantized: add a quantizer if it has none."""
        state = self.state.get(value)
        if isinstance(state, Grid) or value in self.result.constants or value.constant is not None:
            return
        if value in self.casts:
            # quantize the value before its cast, like an input of the graph
            op, eqn = self.casts[value]
            source = eqn.inputs[0]
            self.put_on_grid(source, stack)
            self.result.ops[eqn] = (op, "grid")
            self.state[value] = self.state[source]
            return
        if isinstance(state, Accumulator):
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
                state.unit,
                self.timed_within(stack),
            )
            if state.use is not None:
                state.use.output = place
            if state.source is not None and state.averaged and state.source.stack == stack:
                self.merge(state.source, place)
                place.on_input_grid = True
        else:
            name, module, location = self.label_of(value, None)
            kind = "input" if module == "input" else "activation"
            module = "" if kind == "input" else module
            op = "input" if kind == "input" else "float"
            label = self.unique(name)
            place = Place(label, label, kind, module, op, value.shape, (), stack, location)
            place.timed = self.timed_within(stack)
        self.result.values[value] = place
        self.state[value] = Grid(place)

    def grid_to_share(self, value: Value, stack: tuple[int, ...]) -> Place | None:
        """The place of a value on a grid that a tensor inside of these scans may share.

        Two grids are not shared but requantized: that of a table of weights, whose rows are read, and one from outside
        of a stack of layers, because each layer has quantization parameters of its own.
        """
        place = self.place_of(value)
        if place is None or not (self.root(place).kind == "weight" or layers(self.root(place)) < self.layers(stack)):
            return place
        self.state[value] = None
        self.put_on_grid(value, stack)
        return self.place_of(value)

    def layers(self, stack: tuple[int, ...]) -> int:
        """How many of these scans are over layers, not over data."""
        return len(stack) - len(self.timed_within(stack))

    def place_of(self, value: Value) -> Place | None:
        """The place of a value on a grid."""
        state = self.state.get(value)
        return state.place if isinstance(state, Grid) else None

    def name_of_weight(self, op: Op, eqn: Equation, index: int, stack: tuple[int, ...]) -> tuple[str, str]:
        """(name, path of the parameter) of a weight; one parameter in other forms or scans has other names."""
        value = eqn.inputs[index]
        path, signature = self.origin_of(value)
        if value not in self.origin:
            # a constant of the program and not a parameter: each is a separate weight
            path = join(eqn.scope, f"{op.read_as or op.name}/{path}")
            signature = (str(self.unnamed.setdefault(value, len(self.unnamed))),)
        # a weight that a scan reads may have scales for each iteration, which nothing outside of the scan has
        signature = (*signature, str(self.weight_stack(value, stack)))
        axes = op.weight_axes(eqn, index)
        seen = self.weight_names.setdefault(path, [])
        # of two products that sum over different axes, each has its own channels
        alike = (i for i, (form, own) in enumerate(seen) if form == signature and (own == axes or not own or not axes))
        position = next(alike, len(seen))
        if position == len(seen):
            seen.append((signature, axes))
        return path if position == 0 else f"{path}#{position + 1}", path

    def weight_stack(self, value: Value, stack: tuple[int, ...]) -> tuple[int, ...]:
        """The scans around a weight, without loops over data that do not change it: it is quantized before them."""
        while len(stack) > self.depth.get(value, 0) and len(stack) - 1 in self.timed:
            stack = stack[:-1]
        return stack

    def weight_place(self, op: Op, eqn: Equation, index: int, stack: tuple[int, ...]) -> Place:
        """The place of an operand that is a weight."""
        value = eqn.inputs[index]
        name, path = self.name_of_weight(op, eqn, index, stack)
        own = self.weight_stack(value, stack)
        if own != stack:
            self.result.invariant.add((eqn, index))
        stack = own
        place = Place(
            name,
            name,
            "weight",
            # a parameter of the model itself belongs to the module that reads it
            parent(path) or eqn.scope,
            op.name,
            value.shape,
            op.weight_axes(eqn, index),
            stack,
            eqn.location,
            timed=self.timed_within(stack),
            integers="integers" in eqn.params,
        )
        self.result.weights[eqn, index] = place
        return place

    def label_of(self, value: Value, eqn: Equation | None) -> tuple[str, str, str | None]:
        """(name, module, line) of a value."""
        if value in self.labels:
            return self.labels[value]
        return ("value", eqn.scope if eqn else "", eqn.location if eqn else None)

    def timed_within(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """The positions of scans over data among those scans."""
        return tuple(position for position in self.timed if position < len(stack))

    def unique(self, name: str) -> str:
        """The name, with a number where it is taken."""
        count = self.used_names.get(name, 0) + 1
        self.used_names[name] = count
        return name if count == 1 else f"{name}#{count}"

    def merge(self, a: Place, b: Place) -> None:
        """Let two places share one quantizer, a's."""
        a, b = self.root(a), self.root(b)
        if a is not b:
            self.merged[b] = a

    def root(self, place: Place) -> Place:
        """The place whose quantizer this one shares."""
        while place in self.merged:
            place = self.merged[place]
        return place

    def hoist(
        self, inner: Value, outer: Value, stack: tuple[int, ...], entering: Collection[Value] = frozenset()
    ) -> None:
        """Move the quantizer that a body put on its input to the value that comes in.

        It stays where it is a layer's own, which it shares with tensors other than those that are `entering` the body.
        """
        place = self.result.values.get(inner)
        if place is None:
            return
        known = self.place_of(outer)
        sharing = [place] if known is not None else self._sharing(place, entering)
        if any(layers(other) > self.layers(stack) for other in sharing):
            return
        del self.result.values[inner]
        if known is None:
            place.stack, place.timed, place.shape = stack, self.timed_within(stack), outer.shape
            self.result.values[outer] = place
            self.state[outer] = Grid(place)
        else:
            self.merge(known, place)

    def _sharing(self, place: Place, entering: Collection[Value]) -> list[Place]:
        """The places that share a quantizer, without those of the values that enter a body."""
        result, root = self.result, self.root(place)
        values = (other for value, other in result.values.items() if value not in entering)
        others = (*values, *result.weights.values(), *(joined.place for joined in result.joined.values()))
        return [other for other in others if self.root(other) is root]

    def origin_of(self, value: Value) -> tuple[str, tuple[str, ...]]:
        """The parameter that a constant is made from, and how."""
        return self.origin.get(value, ("constant", ()))

    def keep_origin(self, eqn: Equation) -> None:
        """The outputs of an equation of constants are made from what its inputs are."""
        depth = max((self.depth.get(v, 0) for v in eqn.inputs), default=0)
        self.depth.update(dict.fromkeys(eqn.outputs, depth))
        known = next((self.origin[v] for v in eqn.inputs if v in self.origin), None)
        if known is not None:
            path, signature = known
            for value in eqn.outputs:
                # where an array lies makes no other array of it: names are the same on every mesh
                own = () if eqn.primitive in PLACEMENTS else (f"{eqn.primitive}{value.shape}",)
                self.origin[value] = (path, (*signature, *own))

    def alias_constant(self, source: Value, target: Value) -> None:
        """One constant under two names, outside of a body and inside."""
        self.result.constants.add(target)
        self.depth[target] = self.depth.get(source, 0)
        if source in self.origin:
            self.origin[target] = self.origin[source]


def parent(path: str) -> str:
    """The path of the module that holds what `path` names."""
    return path.rpartition("/")[0]


def join(scope: str, name: str) -> str:
    """The path of a name within a module."""
    return f"{scope}/{name}" if scope else name


def layers(place: Place) -> int:
    """How many stacks of layers are around a tensor: the axes that its quantization parameters have for them."""
    return len(place.own(place.stack))
