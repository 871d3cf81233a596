"""Calibration: one pass over data that gives every quantizer its first parameters."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax import calibration
from qjax.batches import Batches, Inputs
from qjax.calibration.learned import Quantizer
from qjax.export.structure import join_arguments, split_arguments
from qjax.layers import trace
from qjax.numerics.affine import QParams
from qjax.ops import Quantized
from qjax.qmodel import Plan, QuantizedModel, check_quantized, evaluation_copy
from qjax.tracing import Evaluation, Place


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
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything.
      inputs: what of a batch the model is called with: `lambda batch: batch[0]` for pairs of images and labels.
      observer: instead of the recipe's, for all activations: a name of `calibration.names()` or an `Observer`.
      progress: show a progress bar on stderr; None shows one on a terminal.
    """
    check_quantized(qmodel, "calibrate")
    plan = qmodel.plan
    quantizers, kinds = dict(plan.quantizers), {name: detail[0] for name, detail in plan.details}
    observers = dict(plan.observers)
    activations = [name for name, kind in kinds.items() if kind != "weight"]
    if observer is not None:
        observers.update(dict.fromkeys(activations, calibration.get(observer)))
    graphdef, state = nnx.split(evaluation_copy(qmodel.model))

    def taps_of(state: Any, args: Any, kind: str) -> dict[str, dict[str, jax.Array]]:
        """name of the quantizer -> label of the tensor -> its real values."""
        traced, annotation = plan.read(trace(nnx.merge(graphdef, state), args, {}, plan.expected))

        def record(place: Place, x: jax.Array, _: Quantized | None) -> jax.Array | None:
            return x if (kinds.get(place.name) == "weight") == (kind == "weight") else None

        evaluation = Evaluation(annotation, None, record, plan.shared)
        taps = evaluation.run(traced.program, traced.args, _nothing(plan))[1]
        found: dict[str, dict[str, jax.Array]] = {}
        for place in (*annotation.values.values(), *annotation.weights.values()):
            if place.label in taps:
                # iterations that share a quantizer are more data: their axes behind those of the others
                x, others = taps[place.label], len(place.stack) - len(place.timed)
                x = jnp.moveaxis(x, place.timed, range(others, len(place.stack)))
                found.setdefault(place.name, {})[place.label] = x
        return found

    def taps(kind: str, rest: Any) -> Callable[[Any, Any], Any]:
        return lambda state, arrays: taps_of(state, join_arguments(arrays, rest), kind)

    @functools.partial(jax.jit, static_argnums=3)
    def step(state: Any, seen: Any, arrays: Any, rest: Any) -> Any:
        for name, records in taps_of(state, join_arguments(arrays, rest), "activation").items():
            q = quantizers[name]
            for x in records.values():
                seen[name] = _update(observers[name], seen[name], x, q)
        return seen

    seen: dict[str, Any] = {}
    weights: dict[str, dict[str, jax.Array]] = {}
    for _, args in calibration.track(Batches(batches, inputs, "calibrate"), "calibrating", enabled=progress):
        arrays, rest = split_arguments(args)
        if not seen and not weights:
            shapes = jax.eval_shape(taps("activation", rest), state, arrays)
            for name, records in shapes.items():
                seen[name] = _initial(observers[name], quantizers[name], next(iter(records.values())).shape)
            weights = jax.jit(taps("weight", rest))(state, arrays)
        seen = step(state, seen, arrays, rest)
    for name, q in plan.quantizers:
        try:
            if kinds[name] == "weight":
                qparams = _of_weight(q, np.asarray(next(iter(weights[name].values()))), observers[name])
            else:
                qparams = _finish(observers[name], jax.tree.map(np.asarray, seen[name]), q)
            values = q.init(qparams)
        except ValueError as error:
            raise ValueError(f"Quantizer {name!r}: {error}") from error
        module = qmodel.quantizers[name]
        for key, value in values.items():
            variable = getattr(module, key)
            variable[...] = jnp.asarray(value, variable[...].dtype)


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


def _of_weight(q: Quantizer, w: np.ndarray, way: Any) -> QParams:
    if w.ndim > len(q.stack) + len(q.shape) and q.stack:
        parts = [_of_weight(dataclasses.replace(q, stack=()), w[index], way) for index in np.ndindex(*q.stack)]
        return _stack(parts, q)
    if w.ndim > len(q.stack) + len(q.shape):
        # one grid for all iterations: the widest that any of them needs
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
