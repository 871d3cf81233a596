"""Calibration: one pass over data that gives every quantizer its first parameters."""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax import calibration
from qjax.batches import Batches, Inputs
from qjax.calibration import noise
from qjax.calibration.learned import Quantizer
from qjax.callers import users_level
from qjax.finite import parameter_faults
from qjax.graph.structure import join_arguments, split_arguments
from qjax.layers import trace
from qjax.numerics.affine import QParams
from qjax.numerics.meshes import in_automatic, whole
from qjax.ops import Quantized
from qjax.qmodel import Plan, QuantizedModel, check_quantized, evaluation_copy, widened
from qjax.tracing import Annotation, Evaluation, Place, Program, observed, uses_of_parameter


def calibrate(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    observer: Any = None,
    progress: bool | None = None,
) -> None:
    """Find scales and zero points from data: one pass in constant memory. Post-training quantization ends here.

    The model runs on reals, in evaluation mode; its own state does not move.

    Args:
      qmodel: the quantized model; its scales and zero points are set.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything.
      inputs: what of a batch the model is called with: `lambda batch: batch[0]` for pairs of images and labels.
      observer: instead of the recipe's, for all activations: a name of `calibration.names()` or an `Observer`.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).
    """
    check_quantized(qmodel, "calibrate")
    plan = qmodel.plan
    quantizers, kinds = dict(plan.quantizers), {name: detail[0] for name, detail in plan.details}
    observers = dict(plan.observers)
    activations = [name for name, kind in kinds.items() if kind != "weight"]
    if observer is not None:
        observers.update(dict.fromkeys(activations, calibration.get(observer)))
    graphdef, state = nnx.split(evaluation_copy(qmodel.model))
    watched = _Watched(graphdef, plan, tuple(observers.items()))
    step, weights_of = _compiled(watched)
    places: dict[str, Place] = {}
    exponents: set[str] = set()
    inputs_of: dict[str, int] = {}
    ranges = {known.name: known for known in plan.integers}
    seen: dict[str, Any] = {}
    samples: dict[str, list[jax.Array]] = {}
    arrays, rest = None, None
    for _, args in calibration.track(Batches(batches, inputs, "calibrate"), "calibrate: batch", enabled=progress):
        first = arrays is None
        arrays, rest = split_arguments(args)
        if first:
            taps = functools.partial(
                watched.taps, rest=rest, kind="activation", places=places, direct=inputs_of, exponents=exponents
            )
            for name, records in jax.eval_shape(taps, state, arrays)[0].items():
                seen[name] = _initial(observers[name], quantizers[name], next(iter(records.values())).shape)
        seen, samples, integers = step(state, seen, arrays, rest)
        for name, bounds in integers.items():
            known = ranges.get(name)
            if known is None or not known.declared:
                ranges[name] = widened(known, name, np.asarray(bounds))
    if ranges != {known.name: known for known in plan.integers}:
        qmodel.plan = dataclasses.replace(plan, integers=tuple(ranges.values()))
        # A table over integers is a weight: with the new ranges it has all of its rows.
        weights_of = _compiled(dataclasses.replace(watched, plan=qmodel.plan))[1]
    parameters = jax.tree.leaves(state)
    made = frozenset(name for name, kind in kinds.items() if kind == "weight" and name not in inputs_of)
    weights = weights_of(state, arrays, rest, made) if made else {}
    found: dict[str, dict[str, Any]] = {}
    shapes = {name: shape for name, (*_, shape) in plan.details}
    for name, q in plan.quantizers:
        try:
            if kinds[name] == "weight":
                # a parameter itself: a copy of all of them would take as much memory as the model
                known = name in inputs_of
                w = parameters[inputs_of[name]] if known else next(iter(weights.pop(name).values()))
                _check_shape(q, shapes[name], tuple(w.shape))
                qparams, powers = _searched(name, q, w, observers[name])
            else:
                qparams = _finish(observers[name], jax.tree.map(np.asarray, seen[name]), q)
                powers = [noise.of_activation(np.asarray(x), qparams) for x in samples[name]]
            found[name] = q.init(qparams)
        except ValueError as error:
            faults = parameter_faults(qmodel)
            cause = f" Parameters that are not finite: {'; '.join(faults)}." if faults else ""
            line = places[name].location if name in places else None
            where = "" if line is None else f"{line}: "
            raise ValueError(f"{where}Quantizer {name!r}: {error}{cause}") from error
        if name not in exponents or not _warned_of_steps(places[name], q, qparams):
            _warn_of_noise(places[name], q, powers)
    qmodel.quantizers.write(found)


def _check_shape(q: Quantizer, sample: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise where a weight has other scales for this batch than for the sample's.

    A parameter of a scan has one more axis than its place, for the steps. It is a parameter, so it holds no batch.
    """
    if len(shape) == len(sample) and q.spec.param_shape(shape) != q.spec.param_shape(sample):
        before, now = ("x".join(map(str, sizes)) for sizes in (sample, shape))
        raise ValueError(
            f"the weight is {before} for the sample and {now} for this batch. It is made of parameters and holds the "
            "batch: compute it for one example, and repeat the result with jnp.broadcast_to. Or take batches of the "
            "sample's size."
        )


def calibrate_weights(qmodel: QuantizedModel, args: tuple[Any, ...], chosen: Callable[[str], bool]) -> None:
    """New scales for the quantizers of weights that `chosen` names, from the weights as they are.

    args: those of one call.
    """
    plan, observers = qmodel.plan, dict(qmodel.plan.observers)
    names = [name for name, detail in plan.details if detail[0] == "weight" and chosen(name)]
    if not names:
        return
    graphdef, state = nnx.split(evaluation_copy(qmodel.model))
    weights = _compiled(_Watched(graphdef, plan, tuple(observers.items())))[1](
        state, *split_arguments(args), frozenset(names)
    )
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        q = plan.by_name[name]
        found[name] = q.init(_of_weight(q, np.asarray(next(iter(weights[name].values()))), observers[name]))
    qmodel.quantizers.write(found)


_Searched = tuple[QParams, list[tuple[float, float]]]
"""Parameters of a weight, and the powers of signal and noise."""


_WIDEST_STEP = 1.0
"""Of the input of a softmax: a factor of e between neighbouring codes."""
_WIDEST_RANGE = 255.0
"""Of the input of a softmax. Scores reach less far."""


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A model without its arrays, and who observes its tensors. Equal ones share what is compiled for them."""

    graphdef: Any
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
        places: dict[str, Place] | None = None,
        direct: dict[str, int] | None = None,
        exponents: set[str] | None = None,
    ) -> tuple[dict[str, dict[str, jax.Array]], Any]:
        """Name of the quantizer -> label of the tensor -> its real values; and the integers that tables are of.

        only: the quantizers, if not all. places: gets the places of the quantizers by name. direct: gets the quantizers
        of weights that are parameters as they are, and which leaf of the state each is. exponents: gets the names of
        the quantizers in front of a softmax.
        """
        plan, kinds = self.plan, {name: detail[0] for name, detail in self.plan.details}
        traced = trace(nnx.merge(self.graphdef, state), join_arguments(arrays, rest), {}, plan.expected)
        integers = observed(traced.program, traced.args, traced.names)
        traced, annotation = plan.read(traced)
        plan.check_known(annotation)
        if places is not None:
            places.update(annotation.places())
        if exponents is not None:
            exponents |= annotation.exponents()
        if direct is not None:
            direct.update(_direct(traced.program, annotation, len(jax.tree.leaves(state))))

        def record(place: Place, x: jax.Array, _: Quantized | None) -> jax.Array | None:
            asked = only is None or place.name in only
            return x if asked and (kinds.get(place.name) == "weight") == (kind == "weight") else None

        evaluation = Evaluation(annotation, None, record, plan.shared)
        taps = evaluation.run(traced.program, traced.args, _nothing(plan))[1]
        found: dict[str, dict[str, jax.Array]] = {}
        for place in (*annotation.values.values(), *annotation.weights.values()):
            if place.label in taps:
                # Iterations that share a quantizer are further data: move their axes behind those of the other
                # iterations.
                x, others = taps[place.label], len(place.stack) - len(place.timed)
                x = jnp.moveaxis(x, place.timed, range(others, len(place.stack)))
                found.setdefault(place.name, {})[place.label] = x
        return found, integers


def _step(
    watched: _Watched, state: Any, seen: Any, arrays: Any, rest: Any
) -> tuple[Any, dict[str, list[jax.Array]], Any]:
    """The observers after a batch, a sample of each tensor, and the integers that tables are of."""
    quantizers, observers = watched.plan.by_name, dict(watched.observers)
    found, integers = watched.taps(state, arrays, rest=rest, kind="activation")

    def observe(seen: Any, found: dict[str, dict[str, jax.Array]]) -> tuple[Any, dict[str, list[jax.Array]]]:
        seen, samples = dict(seen), dict[str, list[jax.Array]]()
        for name, records in found.items():
            q = quantizers[name]
            for x in records.values():
                seen[name] = _update(observers[name], seen[name], x, q)
            samples[name] = [noise.thinned(x, len(q.stack)) for x in records.values()]
        return seen, samples

    return *in_automatic(observe, (seen, found), whole), integers


def _weights(
    watched: _Watched, state: Any, arrays: Any, rest: Any, names: frozenset[str]
) -> dict[str, dict[str, jax.Array]]:
    return watched.taps(state, arrays, rest=rest, kind="weight", only=names)[0]


def _direct(program: Program, annotation: Annotation, count: int) -> Iterator[tuple[str, int]]:
    """The quantizers of weights that are parameters as they are, and the place of each among the first inputs."""
    for index, value in enumerate(program.inputs[:count]):
        for eqn, operand, moves, depth in uses_of_parameter(program, value, through=False):
            place = annotation.weights.get((eqn, operand))
            same = not moves and eqn.in_dtypes[operand] == value.dtype
            if place is not None and place.kind == "weight" and same and depth == len(place.stack) and not place.timed:
                yield place.name, index


_compiled_step = jax.jit(_step, static_argnums=(0, 4))
_compiled_weights = jax.jit(_weights, static_argnums=(0, 3, 4))
"""Compiled once for a model and the shape of its batches: `quantize` has calibrated already, with its sample."""


def _compiled(watched: _Watched) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_step` and `_weights`, compiled."""
    try:
        hash(watched)
    except TypeError:
        # A module that has a dict or a list as an attribute, or an own observer, cannot be hashed, so no cache can hold
        # it.
        own = functools.partial(_step, watched), functools.partial(_weights, watched)
        return jax.jit(own[0], static_argnums=3), jax.jit(own[1], static_argnums=(2, 3))
    return functools.partial(_compiled_step, watched), functools.partial(_compiled_weights, watched)


def _warn_of_noise(place: Place, q: Quantizer, powers: list[tuple[float, float]]) -> None:
    """Warn of a quantizer that leaves too little of what reaches it; powers: signal and noise of its tensors."""
    if q.fixed is not None or q.follows_tensor:
        return
    kept = noise.decibels(sum(signal for signal, _ in powers), sum(lost for _, lost in powers))
    if kept < noise.least(q.spec):
        where = f" ({place.location})" if place.location else ""
        warnings.warn(
            f"Quantizer {place.name!r}{where} keeps {kept:.1f} dB of its tensor's last batch; expected at least "
            f"{noise.least(q.spec):.0f} dB of {q.spec.bits} bits. Its range is too wide for most numbers: give it more "
            'bits, an observer that clips ("percentile", "mse"), or qjax.FLOAT. qjax.statistics shows its range.',
            stacklevel=users_level(),
        )


def _warned_of_steps(place: Place, q: Quantizer, qparams: QParams) -> bool:
    """Warn of a softmax whose input has steps as wide as differences that decide: it is a mask's range, as a rule."""
    step = float(np.max(np.asarray(qparams.scale)))
    # few bits make wide steps, too, but no such range
    if q.fixed is not None or step <= _WIDEST_STEP or step * (2**q.spec.bits - 1) <= _WIDEST_RANGE:
        return False
    where = f" ({place.location})" if place.location else ""
    warnings.warn(
        f"Quantizer {place.name!r}{where} has steps of {step:.3g}, and a softmax reads it: one step is a factor of "
        f"exp({step:.3g}). Numbers of a mask, such as -1e4 or -1e9, have widened its range. Give the mask to the model "
        "as booleans or as 0 and 1, and hide by jnp.where(mask, scores, -1e9) or scores + (1 - mask) * -1e9. Without a "
        'mask: more bits, or an observer that clips ("percentile", "mse").',
        stacklevel=users_level(),
    )
    return True


def _nothing(plan: Plan) -> dict[str, Any]:
    return {name: jnp.zeros(q.stack) for name, q in plan.quantizers}


def _update(observer: Any, state: Any, x: jax.Array, q: Quantizer) -> Any:
    update: Callable[[Any, Any], Any] = lambda s, x: observer.update(s, x, q.spec)  # noqa: E731
    for _ in q.stack:
        update = jax.vmap(update)
    return update(state, x)


def _initial(observer: Any, q: Quantizer, shape: tuple[int, ...]) -> Any:
    state = observer.init(q.spec, shape[len(q.stack) :])
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a), (*q.stack, *np.shape(a))), state)


def _finish(observer: Any, state: Any, q: Quantizer) -> QParams:
    if not q.stack:
        return observer.qparams(state, q.spec)
    parts = [observer.qparams(jax.tree.map(lambda a, i=index: a[i], state), q.spec) for index in np.ndindex(*q.stack)]
    return _stack(parts, q)


_SEARCHED: dict[tuple[int, str], tuple[weakref.ref[jax.Array], Quantizer, Any, _Searched]] = {}
"""Of arrays that are alive: `quantize` has searched the scales of every weight when `calibrate` begins."""


def _searched(name: str, q: Quantizer, w: Any, way: Any) -> _Searched:
    """The parameters of a weight and its noise. An array of JAX never changes, so each is searched once."""
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
        # One grid for all iterations: the widest that any of them needs.
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
    """Parameters with the leading axes of a scan."""
    return QParams(scale, np.clip(zero_point, q.spec.qmin, q.spec.qmax), q.spec)
