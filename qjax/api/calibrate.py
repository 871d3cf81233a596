"""Calibration: one pass over data that gives every quantizer its first scale and zero point."""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax import calibration, ops
from qjax.calibration import noise
from qjax.calibration.cautions import (
    blind_message,
    warn_of_clipped_constant,
    warn_of_lost,
    warn_of_noise,
    warned_of_steps,
)
from qjax.calibration.learned import Quantizer
from qjax.calibration.seen import (
    Blind,
    Extremes,
    beyond,
    extremes,
    flat_values,
    lost_tensors,
    merge_extremes,
    nothing_seen,
    single_number,
    without_hidden,
)
from qjax.graph.structure import join_arguments, split_arguments
from qjax.layers import Definition, trace
from qjax.model.finite import parameter_faults
from qjax.model.quantized_model import Plan, QuantizedModel, check_quantized, evaluation_copy, widened
from qjax.numerics.affine import QParams
from qjax.numerics.meshes import in_automatic, whole
from qjax.ops import Quantized
from qjax.ops.facts import End
from qjax.support.batches import Batches, Inputs
from qjax.support.transfers import with_transfers
from qjax.support.user_frames import users_level
from qjax.tracing import Annotation, Evaluation, Place, Program, observed, uses_of_parameter


@with_transfers
def calibrate(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    observer: Any = None,
    progress: bool | None = None,
) -> None:
    """Find scales and zero points from data, in one pass and constant memory; post-training quantization needs no more.

    The model runs in float and in evaluation mode, and its own state does not change.

    Args:
      qmodel: the quantized model, whose scales and zero points are set in place.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      observer: replaces the recipe's observer for all activations: a name of `calibration.names()` or an `Observer`.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Examples:
      ```python
      qjax.calibrate(qmodel, batches)
      # batches with labels
      qjax.calibrate(qmodel, [(x, labels)], inputs=lambda batch: batch[0])
      qjax.calibrate(qmodel, batches, observer="mse")  # clips outliers
      ```
    """
    blind = measure_ranges(qmodel, batches, inputs, observer=observer, progress=progress)
    if blind:
        warnings.warn(f"calibrate: {blind_message(blind)}", stacklevel=users_level())


def measure_ranges(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    inputs: Inputs | None = None,
    *,
    observer: Any = None,
    progress: bool | None = None,
) -> tuple[Blind, ...]:
    """Calibrate, and return the quantizers that saw only a single number, which the model's plan records as well."""
    check_quantized(qmodel, "calibrate")
    plan = qmodel.plan
    kinds = {name: detail[0] for name, detail in plan.details}
    observers = dict(plan.observers)
    activations = [name for name, kind in kinds.items() if kind != "weight"]
    if observer is not None:
        observers.update(dict.fromkeys(activations, calibration.get(observer)))
    graphdef, state = nnx.split(evaluation_copy(qmodel.model))
    watched = _Watched(Definition.of(graphdef), plan, tuple(observers.items()))
    step, weights_of = _compile_steps(watched)
    known = _Known()
    ranges = {own.name: own for own in plan.integers}
    seen = _Seen({}, {}, {})
    samples: dict[str, list[jax.Array]] = {}
    arrays, rest, count = None, None, 0
    for _, args in calibration.track(
        Batches(batches, inputs, "calibrate"), "calibrate: batch", enabled=progress, compiles=True
    ):
        first = arrays is None
        arrays, rest = split_arguments(args)
        if first:
            shapes = functools.partial(_shapes, watched, rest=rest, known=known)
            seen = _initial_observations(watched, *jax.eval_shape(shapes, state, arrays))
        seen, samples, integers = step(state, seen, arrays, rest)
        count += 1
        for name, bounds in integers.items():
            own = ranges.get(name)
            if own is None or not own.declared:
                ranges[name] = widened(own, name, np.asarray(bounds))
    if ranges != {own.name: own for own in plan.integers}:
        qmodel.plan = dataclasses.replace(plan, integers=tuple(ranges.values()))
        # A table over integers is a weight, and it has all of its rows only under the new ranges.
        weights_of = _compile_steps(dataclasses.replace(watched, plan=qmodel.plan))[1]
    parameters = jax.tree.leaves(state)
    seen = jax.tree.map(np.asarray, seen)
    blind: list[Blind] = []
    made = frozenset(name for name, kind in kinds.items() if kind == "weight" and name not in known.direct)
    weights = weights_of(state, arrays, rest, made) if made else {}
    found: dict[str, dict[str, Any]] = {}
    shapes = {name: shape for name, (*_, shape) in plan.details}
    for name, q in plan.quantizers:
        try:
            if kinds[name] == "weight":
                # Read a plain parameter directly, because copying all of them would take as much memory as the model.
                direct = known.direct.get(name)
                w = next(iter(weights.pop(name).values())) if direct is None else parameters[direct]
                _check_shape(q, shapes[name], tuple(w.shape))
                qparams, powers = _search_weight(name, q, w, observers[name])
            else:
                qparams = _of_activation(name, q, observers[name], seen, known)
                powers = [noise.of_activation(np.asarray(x), qparams) for x in samples[name]]
            found[name] = q.init(qparams)
            if kinds[name] != "weight":
                blind += _blind(q, seen.of(name, known), found[name], known.places[name])
        except ValueError as error:
            faults = parameter_faults(qmodel)
            cause = f" Parameters that are not finite: {'; '.join(faults)}." if faults else ""
            line = known.places[name].location if name in known.places else None
            where = "" if line is None else f"{line}: "
            raise ValueError(f"{where}Quantizer {name!r}: {error}{cause}") from error
        if name not in known.exponents or not warned_of_steps(known.places[name], q, qparams):
            warn_of_noise(known.places[name], q, powers)
        ends = {} if kinds[name] == "weight" else seen.of(name, known)
        if len(ends) == 1 and all(_are_probabilities(known.labels[label], each) for label, each in ends.items()):
            ends = {}
        counts = {label: known.sizes[label] * count for label in ends}
        for label, lost in lost_tensors(ends, qparams, counts).items():
            warn_of_lost(known.labels[label], lost, output=name in known.outputs)
    qmodel.quantizers.write(found)
    if qmodel.plan.blind != tuple(blind):
        qmodel.plan = dataclasses.replace(qmodel.plan, blind=tuple(blind))
    return qmodel.plan.blind


def _are_probabilities(place: Place, ends: Mapping[str, Any]) -> bool:
    """Whether a tensor comes from a softmax or a sigmoid, where a class that is absent from the data stays near 0."""
    # Inputs and the parts that stay float carry names that are no operations.
    can_be = place.op in ops.names() and ops.get(place.op).may_be_probabilities
    return can_be and bool(np.min(ends["low"]) >= 0 and np.max(ends["high"]) <= 1)


def _check_shape(q: Quantizer, sample: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise where a weight would need scales of another shape for this batch than for the sample.

    A parameter inside a scan has one more axis than its place, for the iterations. No parameter depends on the batch.
    """
    if len(shape) == len(sample) and q.spec.param_shape(shape) != q.spec.param_shape(sample):
        before, now = ("x".join(map(str, sizes)) for sizes in (sample, shape))
        raise ValueError(
            f"the weight is {before} for the sample and {now} for this batch. It is computed from parameters, but its "
            "shape depends on the batch: compute it for one example, and repeat it with jnp.broadcast_to. Or use "
            "batches of the sample's size."
        )


def calibrate_weights(qmodel: QuantizedModel, args: tuple[Any, ...], chosen: Callable[[str], bool]) -> None:
    """Calibrate only the quantizers of weights that `chosen` selects by name, from the present weights.

    args: the arguments of one call.
    """
    plan, observers = qmodel.plan, dict(qmodel.plan.observers)
    names = [name for name, detail in plan.details if detail[0] == "weight" and chosen(name)]
    if not names:
        return
    graphdef, state = nnx.split(evaluation_copy(qmodel.model))
    weights = _compile_steps(_Watched(Definition.of(graphdef), plan, tuple(observers.items())))[1](
        state, *split_arguments(args), frozenset(names)
    )
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        q = plan.by_name[name]
        found[name] = q.init(_of_weight(q, np.asarray(next(iter(weights[name].values()))), observers[name]))
    qmodel.quantizers.write(found)


_FEWEST_CODES = 16
"""How many codes the data must keep when a range is widened to hold a constant."""

_Searched = tuple[QParams, list[tuple[float, float]]]
"""The parameters of a weight, and the powers of its signal and of its quantization noise."""


class _Taps(NamedTuple):
    """The tensors of one batch.

    values: quantizer -> label of a tensor -> its float values. joined: the labels of results without a quantizer of
    their own, and the ends of the range that their readers ignore. compared: by label, the axes of the channels whose
    ranges are compared. integers: the integer inputs of lookup tables.
    """

    values: dict[str, dict[str, jax.Array]]
    joined: Mapping[str, Collection[End]]
    compared: Mapping[str, Sequence[int]]
    integers: Any
    extrema: Collection[str] = ()

    def extremes(self, quantizers: Mapping[str, Quantizer]) -> dict[str, Extremes]:
        """The extremes of every tensor, by label."""
        found: dict[str, Extremes] = {}
        for name, records in self.values.items():
            leading = len(quantizers[name].stack)
            operand = [label for label in records if label not in self.joined]
            for label in operand:
                found[label] = extremes(records[label], leading, channels=self.compared.get(label, ()))
            for label in records.keys() - found.keys():
                found[label] = extremes(records[label], leading, finite=label in self.extrema)
                ends = [found[each] for each in operand]
                if "low" in self.joined[label]:
                    found[label]["low"] = functools.reduce(jnp.minimum, (end["low"] for end in ends))
                if "high" in self.joined[label]:
                    found[label]["high"] = functools.reduce(jnp.maximum, (end["high"] for end in ends))
        return found


class _Seen(NamedTuple):
    """What the batches have shown so far.

    observers: quantizer -> state of its observer. wide: the same, including the results that share the quantizer,
    where there are any. extremes: those of each tensor, by label.
    """

    observers: dict[str, Any]
    wide: dict[str, Any]
    extremes: dict[str, Extremes]

    def of(self, name: str, known: "_Known", *, results: bool = False) -> dict[str, Any]:
        """The extremes of the tensors that have this quantizer, or of the results that share it, by label."""
        return {
            label: found
            for label, found in self.extremes.items()
            if known.labels[label].name == name and (label in known.results) == results
        }


@dataclasses.dataclass
class _Known:
    """What a trace tells about the quantizers.

    places: by the quantizer's name. labels: the place of every tensor. results: the labels of `Annotation.joined`.
    direct: the quantizers whose weight is a plain parameter, with the index of its leaf in the state. exponents,
    outputs: the quantizers in front of a softmax, and those of outputs. sizes: how many numbers a batch has, by label.
    """

    places: dict[str, Place] = dataclasses.field(default_factory=dict)
    labels: dict[str, Place] = dataclasses.field(default_factory=dict)
    results: set[str] = dataclasses.field(default_factory=set)
    direct: dict[str, int] = dataclasses.field(default_factory=dict)
    exponents: set[str] = dataclasses.field(default_factory=set)
    outputs: set[str] = dataclasses.field(default_factory=set)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A model without its arrays, and the observers of its tensors; equal ones share what is compiled for them."""

    definition: Definition
    plan: Plan
    observers: tuple[tuple[str, Any], ...]

    def taps(
        self,
        state: Any,
        arrays: Any,
        *,
        rest: Any,
        kind: str,
        only: frozenset[str] | None = None,
        known: "_Known | None" = None,
    ) -> _Taps:
        """The float values of all tensors of a kind.

        only: the quantizers to look at, None for all. known: is filled with what the trace tells about them.
        """
        plan, kinds = self.plan, {name: detail[0] for name, detail in self.plan.details}
        traced = trace(nnx.merge(self.definition.graphdef, state), join_arguments(arrays, rest), {}, plan.expected)
        integers = observed(traced.program, traced.args, traced.names)
        traced, annotation = plan.read(traced)
        plan.check_known(annotation)
        joined = {each.place.label: each for each in annotation.joined.values()}
        results = [each.place for each in joined.values()]
        tensors = (*annotation.values.values(), *annotation.weights.values(), *results)
        if known is not None:
            known.places.update(annotation.places())
            known.labels.update({place.label: place for place in tensors})
            known.results.update(joined)
            known.exponents |= annotation.exponents()
            known.outputs |= annotation.output_names
            known.direct.update(_direct(traced.program, annotation, len(jax.tree.leaves(state))))

        def record(place: Place, x: jax.Array, _: Quantized | None) -> jax.Array | None:
            asked = only is None or place.name in only
            return x if asked and (kinds.get(place.name) == "weight") == (kind == "weight") else None

        evaluation = Evaluation(annotation, None, record, plan.shared, joined=kind == "activation")
        taps = evaluation.run(traced.program, traced.args, _nothing(plan))[1]
        found: dict[str, dict[str, jax.Array]] = {}
        for place in tensors:
            if place.label in taps:
                # Iterations that share a quantizer are further data for it, so move their axes behind those of the
                # other iterations.
                x, others = taps[place.label], len(place.stack) - len(place.timed)
                x = jnp.moveaxis(x, place.timed, range(others, len(place.stack)))
                found.setdefault(place.name, {})[place.label] = x
        if known is not None:
            known.sizes.update({label: x.size for records in found.values() for label, x in records.items()})
        hidden = {label: each.hidden for label, each in joined.items()}
        extrema = frozenset(label for label, each in joined.items() if each.extremum)
        return _Taps(found, hidden, annotation.compared(), integers, extrema)


def _step(
    watched: _Watched, state: Any, seen: _Seen, arrays: Any, rest: Any
) -> tuple[_Seen, dict[str, list[jax.Array]], Any]:
    """The observations including this batch, a sample of each tensor, and the integer inputs of tables."""
    taps = watched.taps(state, arrays, rest=rest, kind="activation")
    quantizers, observers = watched.plan.by_name, dict(watched.observers)

    def observe(seen: _Seen, values: dict[str, dict[str, jax.Array]]) -> tuple[_Seen, dict[str, list[jax.Array]]]:
        samples: dict[str, list[jax.Array]] = {}
        narrow, wide, ends = dict(seen.observers), dict(seen.wide), dict(seen.extremes)
        now = taps._replace(values=values).extremes(quantizers)
        for name, records in values.items():
            q = quantizers[name]
            plain = [label for label in records if label not in taps.joined]
            samples[name] = [noise.thinned(records[label], len(q.stack)) for label in plain]
            for label, x in records.items():
                hidden = taps.joined.get(label)
                if hidden is None:
                    narrow[name] = _update(observers[name], narrow[name], x, q)
                else:
                    x = without_hidden(x, [now[each] for each in plain], hidden)
                if name in wide:
                    wide[name] = _update(observers[name], wide[name], x, q)
        for label, found in now.items():
            ends[label] = merge_extremes(ends[label], found)
        return _Seen(narrow, wide, ends), samples

    return *in_automatic(observe, (seen, taps.values), whole), taps.integers


def _weights(
    watched: _Watched, state: Any, arrays: Any, rest: Any, names: frozenset[str]
) -> dict[str, dict[str, jax.Array]]:
    return watched.taps(state, arrays, rest=rest, kind="weight", only=names).values


def _direct(program: Program, annotation: Annotation, count: int) -> Iterator[tuple[str, int]]:
    """The quantizers whose weight is a plain parameter, each with its index among the first inputs."""
    for index, value in enumerate(program.inputs[:count]):
        for eqn, operand, moves, depth in uses_of_parameter(program, value, through=False):
            place = annotation.weights.get((eqn, operand))
            same = not moves and eqn.in_dtypes[operand] == value.dtype
            if place is not None and place.kind == "weight" and same and depth == len(place.stack) and not place.timed:
                yield place.name, index


_compiled_step = jax.jit(_step, static_argnums=(0, 4))
_compiled_weights = jax.jit(_weights, static_argnums=(0, 3, 4))
"""Compiled once per model and batch shape, so `calibrate` reuses what `quantize` compiled for its sample."""


def _compile_steps(watched: _Watched) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_step` and `_weights`, compiled."""
    try:
        hash(watched)
    except TypeError:
        # A module with a dict or a list as an attribute, or with an observer of the user's, cannot be hashed, so no
        # cache can hold it.
        own = functools.partial(_step, watched), functools.partial(_weights, watched)
        return jax.jit(own[0], static_argnums=3), jax.jit(own[1], static_argnums=(2, 3))
    return functools.partial(_compiled_step, watched), functools.partial(_compiled_weights, watched)


def _nothing(plan: Plan) -> dict[str, Any]:
    return {name: jnp.zeros(q.stack) for name, q in plan.quantizers}


def _update(observer: Any, state: Any, x: jax.Array, q: Quantizer) -> Any:
    update: Callable[[Any, Any], Any] = lambda s, x: observer.update(s, x, q.spec)  # noqa: E731
    for _ in q.stack:
        update = jax.vmap(update)
    return update(state, x)


def _shapes(watched: _Watched, state: Any, arrays: Any, *, rest: Any, known: _Known) -> tuple[Any, ...]:
    """What `_initial_observations` needs: one tensor per quantizer, those shared with results, and all extremes."""
    taps = watched.taps(state, arrays, rest=rest, kind="activation", known=known)
    wide = {name: () for name, records in taps.values.items() if records.keys() & taps.joined.keys()}
    plain = {name: next(iter(records.values())) for name, records in taps.values.items()}

    def ends(values: dict[str, dict[str, jax.Array]]) -> dict[str, Extremes]:
        return taps._replace(values=values).extremes(watched.plan.by_name)

    return plain, wide, in_automatic(ends, (taps.values,), whole)


def _initial_observations(watched: _Watched, plain: Any, wide: Any, ends: Any) -> _Seen:
    quantizers, observers = watched.plan.by_name, dict(watched.observers)
    states = {name: _initial(observers[name], quantizers[name], x.shape) for name, x in plain.items()}
    return _Seen(
        states, {name: states[name] for name in wide}, {label: nothing_seen(found) for label, found in ends.items()}
    )


def _of_activation(name: str, q: Quantizer, observer: Any, seen: _Seen, known: _Known) -> QParams:
    """The parameters of an activation, with a range wider than its data where it shares its codes with a constant."""
    narrow = _finish(observer, seen.observers[name], q)
    operand, results = list(seen.of(name, known).values()), seen.of(name, known, results=True)
    outside = [label for label, ends in results.items() if beyond(ends, operand, narrow)]
    if not outside:
        return narrow
    found = _finish(observer, seen.wide[name], q)
    growth = float(np.max(np.asarray(found.scale) / np.asarray(narrow.scale)))
    if q.fixed is not None or q.follows_tensor or growth > max(2.0, q.spec.levels / _FEWEST_CODES):
        found = narrow
    for label in outside:
        if beyond(results[label], operand, found):
            ends = float(np.min(results[label]["low"])), float(np.max(results[label]["high"]))
            warn_of_clipped_constant(known.labels[label], name, *ends, found)
    return found


def _blind(q: Quantizer, seen: Mapping[str, Any], values: Mapping[str, Any], place: Place) -> list[Blind]:
    """The quantizer in a list if all of its data were a single number, which defines no range; else an empty list."""
    number = None if q.fixed is not None or q.follows_tensor else single_number(list(seen.values()))
    if number is None:
        return []
    return [Blind(place.name, number, flat_values(values), place.location)]


def _initial(observer: Any, q: Quantizer, shape: tuple[int, ...]) -> Any:
    state = observer.init(q.spec, shape[len(q.stack) :])
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a), (*q.stack, *np.shape(a))), state)


def _finish(observer: Any, state: Any, q: Quantizer) -> QParams:
    if not q.stack:
        return observer.qparams(state, q.spec)
    parts = [observer.qparams(jax.tree.map(lambda a, i=index: a[i], state), q.spec) for index in np.ndindex(*q.stack)]
    return _stack(parts, q)


_SEARCHED: dict[tuple[int, str], tuple[weakref.ref[jax.Array], Quantizer, Any, _Searched]] = {}
"""Scales of arrays that are still alive, because `quantize` has searched those of every weight before `calibrate`."""


def _search_weight(name: str, q: Quantizer, w: Any, way: Any) -> _Searched:
    """The parameters of a weight and its noise; each array is searched once, because arrays of JAX never change."""
    key = id(w), name
    array, *asked, found = _SEARCHED.get(key, (lambda: None, None, None, None))
    if found is not None and array() is w and asked == [q, way]:
        return found
    values = np.asarray(w)
    qparams = _of_weight(q, values, way)
    found = qparams, [noise.of_weight(values, qparams, values.shape[values.ndim - len(q.shape) :])]
    if isinstance(w, jax.Array):
        _SEARCHED[key] = weakref.ref(w, lambda _: _SEARCHED.pop(key, None)), q, way, found
    return found


def _of_weight(q: Quantizer, w: np.ndarray, way: Any) -> QParams:
    if w.ndim > len(q.stack) + len(q.shape) and q.stack:
        parts = [_of_weight(dataclasses.replace(q, stack=()), w[index], way) for index in np.ndindex(*q.stack)]
        return _stack(parts, q)
    if w.ndim > len(q.stack) + len(q.shape):
        # All iterations share one grid, so it must be as wide as the widest of them needs.
        parts = [calibration.weight_qparams(part, q.spec, way) for part in w.reshape((-1, *q.shape))]
        widest = np.max([np.asarray(p.scale) for p in parts], axis=0)
        return parts[0].replace(scale=widest)
    if not q.stack:
        return calibration.weight_qparams(w, q.spec, way)
    return _stack([calibration.weight_qparams(w[index], q.spec, way) for index in np.ndindex(*q.stack)], q)


def _stack(parts: list[QParams], q: Quantizer) -> QParams:
    scale = np.stack([np.asarray(p.scale) for p in parts])
    zero_point = np.stack([np.asarray(p.zero_point) for p in parts])
    return stacked_qparams(
        scale.reshape((*q.stack, *scale.shape[1:])), zero_point.reshape((*q.stack, *zero_point.shape[1:])), q
    )


def stacked_qparams(scale: Any, zero_point: Any, q: Quantizer) -> QParams:
    """Parameters with the leading axes of a scan restored."""
    return QParams(scale, np.clip(zero_point, q.spec.qmin, q.spec.qmax), q.spec)
