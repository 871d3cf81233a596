"""Rescales the heads and channels of a key-value cache, so that one scale suits all of them as well as its own would.

Dividing keys by a factor and multiplying the queries of the same head by it preserves every score. Dividing values by a
factor and multiplying the rows of the output projection that read them by it preserves the output. The annotated
program shows which factors are possible (`qjax.training.symmetries`):

| between | factors |
| --- | --- |
| values and the output projection | one for each channel of each head of the cache |
| keys and queries | the same; rotary embeddings tie the two channels that they rotate |
| keys and queries after norms | the norms' scales absorb them, so all heads share the factors of their channels |

Query heads that share a head of the cache share its factors. The parameters absorb all factors, so nothing is added at
run time. The cache, an argument and a result, then holds keys and values in other units: divided by the factors.

A factor is r ^ a for the greatest magnitude r of its elements, normalised to a geometric mean of 1. For keys after
rotary embeddings this is SmoothAttention (QServe, Lin et al. 2024, arXiv 2405.04532, section 4.2, there with a = 0.5).
The strength a is searched for each array of the cache by the error at the model's output.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.api.calibrate import calibrate
from qjax.contrib.post_training.labels import Labels
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.symmetries import Leaf, Symmetries, find_symmetries
from qjax.graph import state as states
from qjax.layers.trace import positional
from qjax.model.call import Call
from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.support.progress import track
from qjax.training.weights import parameters, unchanged

STRENGTHS = (0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """The units of a model's state after it was rescaled. factors: of each array of the state, None for 1."""

    where: states.Where
    factors: tuple[Any, ...]

    def state(self, state: Any) -> Any:
        """Convert a state of the float model to the new units."""
        return self._scale(state, inverse=True)

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert arguments of the float model to the new units."""
        at = self.where.argument
        return (*args[:at], self.state(args[at]), *args[at + 1 :])

    def outputs(self, output: Any) -> Any:
        """Convert a result to the units of the float model."""
        leaves, tree = jax.tree.flatten(output)
        own = jax.tree.leaves(self.where.part(jax.tree.unflatten(tree, range(len(leaves)))))
        scaled = jax.tree.leaves(self._scale(self.where.part(output), inverse=False))
        for position, value in zip(own, scaled, strict=True):
            leaves[position] = value
        return jax.tree.unflatten(tree, leaves)

    def rest(self, output: Any) -> Any:
        """Everything that a call returns besides the state."""
        return self.where.split(output)[0]

    def moved(self, group: "Shared", factors: np.ndarray) -> "Units":
        """The units after the arrays of a group have been divided by factors."""
        found = list(self.factors)
        for i, labels in group.members.items():
            found[i] = spread(labels, group.labels, factors)
        return dataclasses.replace(self, factors=tuple(found))

    def _scale(self, state: Any, *, inverse: bool) -> Any:
        leaves, tree = jax.tree.flatten(state)
        found: list[Any] = []
        for leaf, factors in zip(leaves, self.factors, strict=True):
            if factors is None:
                found.append(leaf)
                continue
            wide = np.asarray(leaf, np.float64)
            found.append(jnp.asarray(wide / factors if inverse else wide * factors, leaf.dtype))
        return jax.tree.unflatten(tree, found)


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """Arrays of the state that share factors, or a single array.

    members: number among the state's arrays -> its labels. parameters: path -> labels, where labels that no member has
    must keep the factor 1. labels: those of the members.
    """

    names: tuple[str, ...]
    members: Mapping[int, Labels]
    parameters: Mapping[str, Labels]
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Found:
    """The factors that were applied.

    taken: (parameters divided and arrays, parameters multiplied, formula, noise before, noise after, max / min of the
    factors). tried: how many groups of arrays there were. left: name of an array -> why it has no factors.
    """

    taken: tuple[tuple[tuple[str, ...], tuple[str, ...], str, float, float, float], ...]
    tried: int
    left: Mapping[str, str]
    units: Units


def locate_state(
    qmodel: QuantizedModel, state: states.Asked, args: tuple[Any, ...], what: str = "equalize"
) -> tuple[states.Where, list[Leaf | None], Call]:
    """The place of the state, its arrays, and a call; arrays of integers or that the call does not change are None.

    Raises:
      ValueError: see `qjax.convert`, `state`.
    """
    model = evaluation_copy(qmodel)
    call = model.trace(*args)
    traced = call.traced
    result = jax.tree.unflatten(traced.returned, traced.results.outputs)
    try:
        where = states.locate(state, positional(model.model), args, result)
    except ValueError as error:
        raise ValueError(str(error).replace("convert", what, 1)) from error
    counts = [len([x for x in jax.tree.leaves(x) if isinstance(x, (jax.Array, np.ndarray))]) for x in args]
    begin = len(traced.names) - sum(counts[where.argument :])
    after = jax.tree.leaves(where.part(result))
    at = range(begin, begin + len(after))
    leaves = [
        Leaf(traced.names[i], traced.program.inputs[i], new)
        if new.is_float and new is not traced.program.inputs[i]
        else None
        for i, new in zip(at, after, strict=True)
    ]
    return where, leaves, call


def units_of(qmodel: QuantizedModel, state: states.Asked, args: tuple[Any, ...]) -> Units:
    """The units of a model's state before any rescaling. args: of one call."""
    where, leaves, _ = locate_state(qmodel, state, args, "post_training")
    return Units(where, (None,) * len(leaves))


def move_states(
    models: Sequence[QuantizedModel],
    walk: Walk,
    seen: Sequence[tuple[Any, ...]],
    groups: Sequence[Sequence[tuple[Any, ...]]],
    state: states.Asked,
    *,
    least: float,
    progress: bool | None = None,
) -> Found:
    """Rescale the arrays of a state against the parameters, in all `models` alike; the first model is quantized.

    Afterwards the scales of the quantized model fit only `seen`, so calibrate it again.

    Args:
      seen: the batches that determine ranges. groups: the batches that judge; the noise must fall on each of them.
      least: a candidate is accepted only if the noise falls below this fraction of its earlier value.
    """
    qmodel = models[0]
    where, leaves, call = locate_state(qmodel, state, seen[0])
    present = [leaf for leaf in leaves if leaf is not None]
    names = unchanged(call, qmodel.plan).names
    flat = nnx.to_flat_state(nnx.state(qmodel.model, nnx.Param))
    paths = {"/".join(map(str, path)) for path, x in flat if jnp.issubdtype(x[...].dtype, jnp.floating)}
    fixed = [name for name, q in qmodel.plan.quantizers if q.fixed is not None]
    symmetries = find_symmetries(call, present, paths, names, fixed)
    shared = list(groups_of(leaves, symmetries))
    trial = _Trial(
        qmodel, walk, Stream.of(models[-1], quantized=False), seen, groups, Units(where, (None,) * len(leaves))
    )
    taken: list[tuple[tuple[str, ...], tuple[str, ...], str, float, float, float]] = []
    for group in track(shared, "move scales: cache", enabled=progress):
        found = trial.best(group, least)
        if found is None:
            continue
        way, factors, before, after = found
        for model in models[1:]:
            scale_parameters(model, group, factors)
        own = {path: np.any(np.isin(labels, group.labels)) for path, labels in group.parameters.items()}
        divided, multiplied = (tuple(path for path in own if bool(own[path]) == one) for one in (True, False))
        # A layer that computes queries and keys together is divided and multiplied.
        read = multiplied or divided
        taken.append(((*group.names, *divided), read, way, before, after, float(factors.max() / factors.min())))
    return Found(tuple(taken), len(shared), symmetries.left, trial.units)


def groups_of(leaves: Sequence[Leaf | None], found: Symmetries) -> Iterator[Shared]:
    """Group arrays with common labels, in their order. Their own labels are positive, so all of them are divided."""
    own = {i: found.states[leaf] for i, leaf in enumerate(leaves) if leaf is not None and leaf in found.states}
    while own:
        first = next(iter(own))
        members, known, grown = {first: own.pop(first)}, np.zeros(0, np.int64), True
        while grown:
            known = np.setdiff1d(np.concatenate([labels.ravel() for labels in members.values()]), [0])
            new = [i for i, labels in own.items() if np.any(np.isin(np.abs(labels), np.abs(known)))]
            members.update((i, own.pop(i)) for i in new)
            grown = bool(new)
        # No factor helps an array that would be divided where another one would be multiplied.
        known = known[~np.isin(-known, known)]
        inverted = -known[known < 0]

        def invert_labels(labels: Labels, inverted: np.ndarray = inverted) -> Labels:
            return np.where(np.isin(np.abs(labels), inverted), -labels, labels)

        labels = np.unique(np.abs(known))
        touched = {p: invert_labels(own) for p, own in found.parameters.items() if np.any(np.isin(np.abs(own), labels))}
        names = tuple(leaf.name for i, leaf in enumerate(leaves) if i in members and leaf is not None)
        yield Shared(names, {i: invert_labels(one) for i, one in members.items()}, touched, labels)


def spread(labels: Labels, of: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The factors of labels [..], inverse for negative ones. of: the labels with a factor, ascending; others get 1."""
    positive = np.abs(labels)
    index = np.minimum(np.searchsorted(of, positive), len(of) - 1)
    own = np.where(of[index] == positive, factors[index], 1.0)
    return np.where(labels < 0, 1 / own, own)


def scale_parameters(qmodel: QuantizedModel, group: Shared, factors: np.ndarray) -> None:
    """Divide the arrays of a group by `factors`, by changing the parameters around them."""
    for path, labels in group.parameters.items():
        (variable,) = parameters(qmodel, [path]).values()
        old = np.asarray(variable[...], np.float64)
        variable[...] = jnp.asarray(old / spread(labels, group.labels, factors), variable[...].dtype)


class _Trial:
    """Rescales one group after the other, and measures the noise at the model's output including earlier groups."""

    def __init__(
        self,
        qmodel: QuantizedModel,
        walk: Walk,
        reals: Stream,
        seen: Sequence[tuple[Any, ...]],
        groups: Sequence[Sequence[tuple[Any, ...]]],
        units: Units,
    ) -> None:
        self._qmodel, self._walk, self._seen, self._groups = qmodel, walk, seen, groups
        self.units = units
        truth = [walk.outputs(reals, group) for group in groups]
        self._truth = [[units.rest(y) for y in outputs] for outputs in truth]
        self._ranges = self._greatest([y for outputs in truth for y in outputs])
        self._noise = np.full(len(groups), np.inf)

    def best(self, group: Shared, least: float) -> tuple[str, np.ndarray, float, float] | None:
        """(formula, factors, noise before and after) of the best candidate; None, and no change, if none is good."""
        if not np.isfinite(self._noise).all():
            self._noise = self._measure(self.units)
        first, start, before = _snapshot(self._qmodel), self.units, self._noise
        found: tuple[str, np.ndarray, Any, Units, np.ndarray] | None = None
        for way, factors in self._candidates(group):
            scale_parameters(self._qmodel, group, factors)
            units = start.moved(group, factors)
            noise = self._measure(units)
            if np.all(noise < (least * before if found is None else found[4])):
                found = way, factors, _snapshot(self._qmodel), units, noise
            nnx.update(self._qmodel, first)
        if found is None:
            return None
        way, factors, state, self.units, self._noise = found
        nnx.update(self._qmodel, state)
        return way, factors, float(before.max()), float(self._noise.max())

    def _candidates(self, group: Shared) -> Iterator[tuple[str, np.ndarray]]:
        of = group.labels
        greatest = np.zeros(len(of))
        for i, labels in group.members.items():
            greatest = np.maximum(greatest, greatest_of(self._ranges[i], labels, of))
        good = np.isfinite(greatest) & (greatest > 0)
        if len(of) < 2 or good.sum() < 2:
            return
        logs = np.log(np.where(good, greatest, 1.0))
        logs = np.where(good, np.clip(logs - logs[good].mean(), -9.0, 9.0), 0.0)
        for strength in STRENGTHS:
            yield f"greatest {strength:g}", np.exp(strength * logs)

    def _greatest(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """The greatest magnitudes of each array of the state over its first axis."""
        rows = [jax.tree.leaves(self.units.where.part(y)) for y in outputs]
        columns = zip(*rows, strict=True)
        return [np.max([np.abs(np.asarray(x, np.float64)).max(0, keepdims=True) for x in each], 0) for each in columns]

    def _measure(self, units: Units) -> np.ndarray:
        """The noise of each group of batches after a calibration."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about noisy tensors, because the last calibration warns of them
            calibrate(self._qmodel, [units.arguments(args) for args in self._seen], progress=False)
        stream = Stream.of(self._qmodel)
        found: list[float] = []
        for truth, group in zip(self._truth, self._groups, strict=True):
            outputs = self._walk.outputs(stream, [units.arguments(args) for args in group])
            found.append(noise_of(truth, [units.rest(y) for y in outputs]))
        return np.asarray(found)


def greatest_of(magnitudes: np.ndarray, labels: Labels, of: np.ndarray) -> np.ndarray:
    """[labels]: the greatest magnitude of each label's elements."""
    wide = np.broadcast_to(labels, magnitudes.shape).ravel()
    known = np.isin(wide, of)
    found = np.zeros(len(of))
    np.maximum.at(found, np.searchsorted(of, wide[known]), magnitudes.ravel()[known])
    return found


def _snapshot(qmodel: QuantizedModel) -> Any:
    return jax.tree.map(lambda x: x, nnx.state(qmodel))
