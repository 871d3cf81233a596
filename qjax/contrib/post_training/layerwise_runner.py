"""Runs a quantized model and its float model side by side, once over all batches, and stops before every layer.

Methods that correct a layer need its inputs as the corrected layers before it compute them. Running the whole model
again for each layer would cost the square of its depth. A walk keeps all tensors that are alive between two layers, for
all batches, and continues from there, so one pass is enough. At each stop a visitor sees the layer's inputs, quantized
and float, and may change the layer's weights, scales and bias.

Memory: the tensors that are alive between two layers, for every batch and both models. A stream can drop parameters
that no later layer reads, so a model in which every layer is replaced needs its weights once, not twice.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.calibration import track
from qjax.contrib.post_training.noise import distance, power, ratio
from qjax.contrib.post_training.products import Product, find_products
from qjax.contrib.post_training.simulated import Grid, Simulated, grids_of, inputs_of, switched
from qjax.contrib.post_training.unrolled import unrolled
from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.support.batches import arguments_of
from qjax.tracing import Equation, Place, Value
from qjax.training.scan_layers import Part, Quantizers, Stacks, split, stacked
from qjax.training.weights import unchanged

Arguments = tuple[Any, ...]


@dataclasses.dataclass
class Stream:
    """One of the models of a walk: its parameters by path, and the numbers of its quantizers."""

    parameters: dict[str, Any]
    grids: dict[str, Grid]
    passing: bool = False
    """Whether a walk drops its parameters after the last layer that reads them; it can then walk only once."""

    def __post_init__(self) -> None:
        self.parameters, self.grids = Stacks(self.parameters), Stacks(self.grids)

    @classmethod
    def of(cls, qmodel: QuantizedModel, *, quantized: bool = True, passing: bool = False) -> "Stream":
        """A stream of a model's present numbers; without `quantized` all of its quantizers are off."""
        flat = nnx.to_flat_state(nnx.state(qmodel.model))
        grids = grids_of(qmodel)
        parameters = {"/".join(map(str, path)): variable[...] for path, variable in flat}
        return cls(parameters, grids if quantized else switched(grids, ()), passing)

    def take(self, path: str, variable: "nnx.Variable[Any] | Part") -> None:
        """Read a parameter again, or the stack that contains it."""
        if isinstance(variable, Part):
            self.parameters[split(path, ())[0]] = variable.stack[...]
        else:
            self.parameters[path] = variable[...]


@dataclasses.dataclass(frozen=True, eq=False)
class Stop:
    """What a visitor sees at a stop. data: the layer's input, for every stream and batch.

    product: with the first batch's shapes; another batch may have a product of its own, in `products`.
    """

    product: Product
    products: Sequence[Product]
    data: Sequence[Sequence[jax.Array]]


Visitor = Callable[[Stop], None]


class Walk:
    """A model compiled in pieces, for any numbers of its parameters and quantizers.

    items: the layers that have a stop, with the first batch's shapes; the layers of a scan have one each, named
    "blocks/up/kernel[2]". left: name of a quantized weight -> why it has no stop.
    """

    def __init__(self, qmodel: QuantizedModel, batches: Sequence[Arguments]) -> None:
        self._qmodel = without_floats(evaluation_copy(qmodel))
        self._pieces: dict[object, Pieces] = {}
        first = self.pieces(batches[0])
        self.items, self.left = first.items, first.left

    def pieces(self, args: Arguments) -> "Pieces":
        """The compiled pieces for batches of these shapes."""
        leaves, tree = jax.tree.flatten(args)
        arrays = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        key = (tree, tuple((x.shape, str(x.dtype)) if a else x for x, a in zip(leaves, arrays, strict=True)))
        if key not in self._pieces:
            self._pieces[key] = Pieces(self._qmodel, args)
        return self._pieces[key]

    def outputs(self, stream: Stream, batches: Sequence[Arguments]) -> list[Any]:
        """The model's output for every batch."""
        return self.run([stream], batches)[0]

    def ranges(self, stream: Stream, batches: Sequence[Arguments]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name of a quantizer of activations -> the least and the greatest number that reaches it."""
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for args in batches:
            piece = self.pieces(args)
            live = piece.start(args)
            for index in range(len(self.items) + 1):
                live, seen = piece.observe(index, stream, live)
                for place, (low, high) in seen:
                    low, high = (np.moveaxis(np.asarray(a), place.timed, range(len(place.timed))) for a in (low, high))
                    axes = tuple(range(len(place.timed)))
                    low, high = low.min(axes), high.max(axes)
                    known = found.get(place.name, (low, high))
                    found[place.name] = np.minimum(known[0], low), np.maximum(known[1], high)
        return stacked(found, self._qmodel.plan.by_name)

    def alone(
        self,
        stream: Stream,
        grids: Mapping[str, Grid] | Sequence[Mapping[str, Grid]],
        names: Iterable[str],
        batches: Sequence[Arguments],
        *,
        rounded: Mapping[str, Mapping[str, Any]] | None = None,
        what: str = "",
        progress: bool | None = False,
    ) -> dict[str, float]:
        """The noise at the model's output when one of these quantizers alone is on: `ratio` of noise and signal.

        Args:
          stream: the float model. grids: the numbers of the quantizers, or those for each batch. names: the quantizers
            to try.
          rounded: name -> other parameters that apply while this quantizer is on.
        """
        wanted = list(names)
        noise: dict[str, np.ndarray] = dict.fromkeys(wanted, np.zeros(()))
        signal = np.zeros(())
        truth = self.outputs(stream, batches)
        each = [grids] * len(batches) if isinstance(grids, Mapping) else grids
        for args, y, own_grids in track(list(zip(batches, truth, each, strict=True)), what, enabled=progress):
            piece = self.pieces(args)
            signal = signal + power(y)
            live = piece.start(args)
            for index in range(len(self.items) + 1):
                for name in piece.begins(index):
                    if name in noise:
                        parameters = {**stream.parameters, **(rounded or {}).get(name, {})}
                        own = Stream(parameters, switched({**stream.grids, name: own_grids[name]}, (name,)))
                        noise[name] = noise[name] + distance(y, piece.rest(index, own, live))
                live = piece.step(index, stream, live)
        return {name: ratio(np.broadcast_to(value, signal.shape), signal) for name, value in noise.items()}

    def run(
        self,
        streams: Sequence[Stream],
        batches: Sequence[Arguments],
        visit: Visitor | None = None,
        *,
        what: str = "",
        progress: bool | None = False,
    ) -> list[list[Any]]:
        """Walk through the model; returns the outputs, for every stream and batch.

        Args:
          visit: called before every layer of `items`; it may change the numbers of the streams.
        """
        pieces = [self.pieces(args) for args in batches]
        lives = [[piece.start(args) for piece, args in zip(pieces, batches, strict=True)] for _ in streams]
        stops: Iterable[int] = range(len(self.items) + 1)
        if visit is not None:
            stops = track(range(len(self.items) + 1), what, enabled=progress)
        for index in stops:
            if index and visit is not None:
                products = [piece.items[index - 1] for piece in pieces]
                data = [
                    [piece.data(index - 1, stream, live) for piece, live in zip(pieces, own, strict=True)]
                    for stream, own in zip(streams, lives, strict=True)
                ]
                visit(Stop(products[0], products, data))
            for stream, own in zip(streams, lives, strict=True):
                for position, piece in enumerate(pieces):
                    own[position] = piece.step(index, stream, own[position])
                if stream.passing:
                    for path in set(stream.parameters).difference(*(piece.reads_after(index) for piece in pieces)):
                        del stream.parameters[path]
        return [
            [piece.finish(stream, live) for piece, live in zip(pieces, own, strict=True)]
            for stream, own in zip(streams, lives, strict=True)
        ]


Live = dict[Value, Any]


class Pieces:
    """The program for batches of one shape, cut before every layer."""

    def __init__(self, qmodel: QuantizedModel, args: Arguments) -> None:
        call = unrolled(qmodel.trace(*args), qmodel.plan.by_name)
        traced, annotation = call.traced, call.annotation
        self._returned, self._annotation = traced.returned, annotation
        names = unchanged(call, qmodel.plan)
        items, reasons = find_products(call, names.names)
        self.left = {**dict(names.left), **reasons}
        self.program = program = traced.results
        order = {eqn: index for index, eqn in enumerate(program.equations)}
        self.items = sorted(items, key=lambda product: order[product.equation])
        self.path = dict(zip(program.inputs, traced.names, strict=True))
        self.state = {v for v, c in zip(program.inputs, traced.constant, strict=True) if c}
        self._made = {value: eqn for eqn in program.equations for value in eqn.outputs}
        # A scan may return constants next to results that depend on data. Do not count them as depending on parameters
        # only.
        self._fixed = set(self.state)
        for eqn in program.equations:
            if all(map(self.fixed, eqn.inputs)):
                self._fixed.update(eqn.outputs)
        self._order = order
        quantizers = Quantizers(qmodel.plan.by_name)
        self.evaluation = Simulated(annotation, None, shared=qmodel.plan.shared, quantizers=quantizers)
        ends = [order[product.equation] for product in self.items]
        cuts = [0, *ends, len(program.equations)]
        self._steps = [
            _Piece(self, program.equations[a:b], self._needed_after(b), first=i == 0)
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]

    def fixed(self, value: Value) -> bool:
        """Whether a value is computed from parameters and literals only."""
        return value in self._fixed or value.constant is not None

    def _needed_after(self, position: int) -> set[Value]:
        later = {value for eqn in self.program.equations[position:] for value in eqn.inputs}
        read = {value for value in (*later, *self.program.outputs) if not self.fixed(value)}
        return {value for value in read if value not in self._made or self._order[self._made[value]] < position}

    def makers(self, values: Iterable[Value]) -> tuple[list[Equation], list[Value]]:
        """The equations that compute fixed values from parameters, in order, and those parameters."""
        found: dict[Equation, None] = {}
        roots: dict[Value, None] = {}
        todo = list(values)
        while todo:
            value = todo.pop()
            if value.constant is not None:
                continue
            if value in self._made:
                if self._made[value] not in found:
                    found[self._made[value]] = None
                    todo += self._made[value].inputs
            else:
                roots[value] = None
        return sorted(found, key=self._order.__getitem__), list(roots)

    def start(self, args: Arguments) -> Live:
        """The inputs of the model."""
        leaves = [x for x in jax.tree.leaves(arguments_of(args)) if isinstance(x, (jax.Array, np.ndarray))]
        inputs = [value for value in self.program.inputs if value not in self.state]
        return dict(zip(inputs, leaves, strict=True))

    def step(self, index: int, stream: Stream, live: Live) -> Live:
        """The tensors that are alive after a piece."""
        return self._steps[index](stream, live)

    def entering(self, index: int) -> list[Value]:
        """The values alive before a piece; those after the last piece have the index `len(items) + 1`."""
        return list(self._steps[index - 1].leave if index else self._steps[0].enter)

    def reads(self, index: int) -> tuple[list[str], list[str]]:
        """The paths of the parameters and the names of the quantizers that a piece reads."""
        return self._steps[index].paths, self._steps[index].names

    def reads_after(self, index: int) -> set[str]:
        """The paths of the parameters that anything after a piece reads, and of the stacks that contain them."""
        roots = self.makers(value for value in self.program.outputs if self.fixed(value))[1]
        paths = {self.path[value] for value in roots}.union(*(step.paths for step in self._steps[index + 1 :]))
        return paths | {split(path, ())[0] for path in paths}

    def single(self, index: int) -> bool:
        """Whether exactly one tensor that the model computed is alive before a piece."""
        return sum(value in self._made for value in self.entering(index)) == 1

    def observe(self, index: int, stream: Stream, live: Live) -> tuple[Live, list[tuple[Place, Any]]]:
        """The same as `step`, with the range of every quantized activation in the piece."""
        left, seen = self._steps[index].observe(stream, live)
        places = {place.label: place for place in self._annotation.values.values()}
        return left, [(places[label], ends) for label, ends in seen.items() if label in places]

    def rest(self, index: int, stream: Stream, live: Live) -> Any:
        """The model's output, computed from the start of a piece."""
        for later in range(index, len(self._steps)):
            live = self.step(later, stream, live)
        return self.finish(stream, live)

    def begins(self, index: int) -> list[str]:
        """The quantizers that first occur in a piece; one of a scan occurs with the scan's first layer."""
        whole = self.evaluation.quantizers

        def of(step: "_Piece") -> dict[str, None]:
            return dict.fromkeys(split(name, whole)[0] for name in step.names)

        earlier = {name for step in self._steps[:index] for name in of(step)}
        return [name for name in of(self._steps[index]) if name not in earlier]

    def data(self, index: int, stream: Stream, live: Live) -> jax.Array:
        """The input of a layer."""
        product = self.items[index]
        value = product.equation.inputs[1 - product.weight]
        return live[value] if value in live else jnp.asarray(value.constant)

    def finish(self, stream: Stream, live: Live) -> Any:
        """The model's output."""
        program = self.program
        equations, roots = self.makers(value for value in program.outputs if self.fixed(value))
        env: dict[Value, Any] = {**live, **{value: stream.parameters[self.path[value]] for value in roots}}
        for eqn in equations:
            env.update(zip(eqn.outputs, eqn.bind(*inputs_of(eqn, env)), strict=True))
        leaves = [v.constant if v.constant is not None else env[v] for v in program.outputs]
        return jax.tree.unflatten(self._returned, leaves)


class _Piece:
    """Equations from one layer to the next, compiled: maps the live values before it to those after it."""

    def __init__(self, whole: Pieces, equations: Sequence[Equation], needed: set[Value], *, first: bool) -> None:
        own = [eqn for eqn in equations if not all(map(whole.fixed, eqn.inputs))]
        made = {value for eqn in own for value in eqn.outputs}
        read = {value for eqn in own for value in eqn.inputs}
        self._constants, roots = whole.makers(value for value in read if whole.fixed(value))
        self._roots = [(value, whole.path[value]) for value in roots]
        start = [v for v in whole.program.inputs if v not in whole.state]
        arguments = dict.fromkeys(start if first else ())
        entered = {value for value in (*read, *needed) if not whole.fixed(value) and value not in made}
        self.enter = [*arguments, *(value for value in entered if value not in arguments)]
        self.leave = [value for value in (*made, *self.enter) if value in needed]
        self.paths = [path for _, path in self._roots]
        self._own, self._first = own, set(start) if first else set[Value]()
        self._evaluation = whole.evaluation
        self.names = whole.evaluation.names(start if first else (), own)
        self._run, self._observe = jax.jit(self._forward), jax.jit(self._observed)

    def __call__(self, stream: Stream, live: Mapping[Value, Any]) -> Live:
        return dict(zip(self.leave, self._run(*self._arguments(stream, live)), strict=True))

    def observe(self, stream: Stream, live: Mapping[Value, Any]) -> tuple[Live, dict[str, Any]]:
        """The same as a call, with label of a tensor -> its least and its greatest number."""
        left, seen = self._observe(*self._arguments(stream, live))
        return dict(zip(self.leave, left, strict=True)), seen

    def _arguments(self, stream: Stream, live: Mapping[Value, Any]) -> tuple[list[Any], list[Any], dict[str, Grid]]:
        parameters = [stream.parameters[path] for _, path in self._roots]
        return parameters, [live[value] for value in self.enter], {name: stream.grids[name] for name in self.names}

    def _forward(self, parameters: list[Any], entered: list[Any], grids: dict[str, Grid]) -> list[Any]:
        return self._computed(self._evaluation, parameters, entered, grids)[0]

    def _observed(
        self, parameters: list[Any], entered: list[Any], grids: dict[str, Grid]
    ) -> tuple[list[Any], dict[str, Any]]:
        def ends(place: Place, x: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
            return jnp.min(x), jnp.max(x)

        return self._computed(dataclasses.replace(self._evaluation, record=ends), parameters, entered, grids)

    def _computed(
        self, evaluation: Simulated, parameters: list[Any], entered: list[Any], grids: dict[str, Grid]
    ) -> tuple[list[Any], dict[str, Any]]:
        taps: dict[str, Any] = {}
        env: dict[Value, Any] = dict(zip((value for value, _ in self._roots), parameters, strict=True))
        for value, x in zip(self.enter, entered, strict=True):
            env[value] = evaluation.entered(value, x, grids, taps) if value in self._first else x
        for eqn in self._constants:
            env.update(zip(eqn.outputs, eqn.bind(*inputs_of(eqn, env)), strict=True))
        evaluation.advance(self._own, env, grids, taps)
        return [env[value] for value in self.leave], taps


def without_floats(qmodel: QuantizedModel) -> QuantizedModel:
    """The model with shapes instead of float arrays, which is enough to trace it and needs no memory."""

    def shape_of(leaf: Any) -> Any:
        floats = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, np.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if floats else leaf

    graphdef, state = nnx.split(qmodel)
    return nnx.merge(graphdef, jax.tree.map(shape_of, state))
