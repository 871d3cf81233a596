"""Where layers and export meet: quantize, calibrate, convert, exact."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax import calibration, targets
from qjax.calibration.learned import Quantizer, with_scales
from qjax.export.convert import convert as convert_program
from qjax.export.integer_graph import IntegerGraph, dequantize_outputs, quantize_inputs
from qjax.export.interpreter import prepare
from qjax.export.interpreter import run as run_graph
from qjax.export.ir import Graph
from qjax.export.lower import ConversionError
from qjax.export.structure import describe
from qjax.export.verify import Report
from qjax.export.verify import verify as compare_nodes
from qjax.layers import FLOAT_LAYERS, Traced, instrument, module_types, trace, write_state
from qjax.numerics.affine import QParams
from qjax.ops import Quantized
from qjax.recipe import Recipe, ancestors
from qjax.tracing import Annotation, Evaluation, Place, annotate

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


class QuantParam(nnx.Param):
    """A number of a quantizer that training moves: the logarithm of a scale, a zero point, a threshold."""


class QuantStat(nnx.Variable):
    """A number of a quantizer that only calibration moves."""


class QuantizerState(nnx.Module):
    """The numbers of one quantizer."""

    def __init__(self, quantizer: Quantizer, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            kind = QuantParam if name in quantizer.learned else QuantStat
            setattr(self, name, kind(jnp.asarray(value)))

    def values(self) -> dict[str, Any]:
        """The arrays by name."""
        return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Variable)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `quantize` decided, fixed for the life of the model; hashable.

    quantizers: name -> quantizer. float_paths: modules left in reals. details: name -> (kind, module, op, shape).
    """

    quantizers: tuple[tuple[str, Quantizer], ...]
    float_paths: frozenset[str]
    details: tuple[tuple[str, tuple[Any, ...]], ...]
    target: Any
    observers: tuple[tuple[str, Any], ...]
    shared: frozenset[str] = frozenset()

    def is_float(self, path: str) -> bool:
        """Whether the inside of a module stays in reals."""
        return "" in self.float_paths or any(path in self.float_paths for path in ancestors(path))


class QuantizedModel(nnx.Module):
    """The user's model with fake quantization on the tensors of its plan.

    An ordinary `nnx.Module`: `train()`, `eval()`, `nnx.split`, optimizers and transforms apply. Calling it calls the
    user's `__call__`; the user's own parameters are under `model`, the quantizers' under `quantizers`.
    """

    def __init__(self, model: nnx.Module, plan: Plan, quantizers: Mapping[str, QuantizerState]) -> None:
        self.model = model
        self.plan = plan
        self.quantizers = nnx.Dict(dict(quantizers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced, annotation = self._read(args, kwargs)
        evaluation = Evaluation(annotation, self._quantize, shared=self.plan.shared)
        values, _ = evaluation.run(traced.program, traced.args, self.quantizer_values())
        self._write(traced, values)
        return traced.outputs(values)

    def codes(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The output, and the int32 codes of every quantized tensor by its label (in scans "label[iteration]").

        Moves no statistics.
        """
        traced, annotation = self._read(args, kwargs)

        def record(place: Place, x: jax.Array, quantized: Quantized | None) -> jax.Array | None:
            if place.kind == "weight" or quantized is None:
                return None
            zero_point = quantized.qparams.integer_zero_point()
            return jnp.nan_to_num(quantized.codes).astype(jnp.int32) + zero_point

        evaluation = Evaluation(annotation, self._quantize, record, self.plan.shared)
        values, taps = evaluation.run(traced.program, traced.args, self.quantizer_values())
        codes: dict[str, jax.Array] = {}
        for place in annotation.values.values():
            for index in np.ndindex(*place.stack):
                label = place.label + "".join(f"[{i}]" for i in index)
                codes[label] = taps[place.label][index] if index else taps[place.label]
        return traced.outputs(values), codes

    def quantizer_values(self) -> dict[str, dict[str, Any]]:
        """name -> the arrays that a quantizer works with, learned scales as scales."""
        own = {name: self.quantizers[name].values() for name, _ in self.plan.quantizers}
        return with_scales(dict(self.plan.quantizers), own)

    def qparams(self) -> dict[str, QParams]:
        """name -> scale, zero point and spec as they stand; quantizers that follow their tensor are left out."""
        values = self.quantizer_values()
        return {name: q.qparams(values[name]) for name, q in self.plan.quantizers if q.method != "dynamic"}

    def summary(self) -> str:
        """A table of every quantizer: name, place, codes and parameters."""
        from qjax.summary import quantizer_table

        return quantizer_table(self.plan, self.qparams())

    def _read(self, args: Any, kwargs: Any) -> tuple[Traced, Annotation]:
        traced = trace(self.model, args, kwargs)
        annotation = annotate(traced.program, traced.names, traced.constant, self.plan.is_float)
        known = dict(self.plan.quantizers)
        for name, place in annotation.places().items():
            if name not in known:
                where = f" ({place.location})" if place.location else ""
                raise ValueError(
                    f"This call has a tensor {name!r}{where} that was not there when the model was quantized. "
                    f"Known quantizers: {', '.join(known)}. The model's structure must not depend on the call; "
                    "call qjax.quantize with a sample that takes this path."
                )
        return traced, annotation

    def _quantize(self, place: Place, params: Any, x: jax.Array) -> Quantized:
        return dict(self.plan.quantizers)[place.name](params, x)

    def _write(self, traced: Traced, values: list[Any]) -> None:
        changed = traced.new_state(values)
        if changed is not None:
            write_state(self.model, changed)


def quantize(model: nnx.Module, recipe: Recipe, sample: Any, *, progress: bool | None = False) -> QuantizedModel:
    """A copy of `model` that trains with fake quantization; the model itself is not changed.

    Args:
      model: any `nnx.Module` with a `__call__`.
      recipe: bits, methods, overrides.
      sample: one batch: an array, or a tuple of the call's arguments. It finds the tensors and gives every scale a
        first value; `calibrate` with more data makes a better one.

    Raises:
      ValueError: an override that matches nothing, or a spec that a tensor cannot take.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize: expected a flax nnx.Module, got {type(model).__name__}. A linen module can be wrapped with "
            "flax.nnx.bridge.ToNNX."
        )
    instrumented = instrument(model)
    types = module_types(instrumented)
    float_paths = recipe.float_paths(types, FLOAT_LAYERS)
    probe = QuantizedModel(instrumented, Plan((), float_paths, (), recipe.target, ()), {})
    view = _evaluation_copy(probe.model)
    args = _arguments(sample)
    traced = trace(view, args, {})
    annotation = annotate(traced.program, traced.names, traced.constant, probe.plan.is_float)
    places = annotation.places()
    recipe.check_matched(places, types)
    edges, outputs = _edges(annotation), annotation.output_names
    quantizers = {
        name: recipe.quantizer(place, types, edge=name in edges, output=name in outputs)
        for name, place in places.items()
    }
    details = tuple((n, (p.kind, p.module, p.op, p.shape)) for n, p in places.items())
    observers = tuple(
        (n, recipe.weight_observer_of(q.spec) if places[n].kind == "weight" else recipe.observer_of(q.spec))
        for n, q in quantizers.items()
    )
    shared = (
        frozenset(name for name, place in places.items() if place.stack) if recipe.scan == "shared" else frozenset()
    )
    plan = Plan(tuple(quantizers.items()), float_paths, details, recipe.target, observers, shared)
    states = {name: QuantizerState(q, _placeholder(q)) for name, q in quantizers.items()}
    qmodel = QuantizedModel(instrumented, plan, states)
    calibrate(qmodel, [sample], progress=progress)
    return qmodel


def calibrate(
    qmodel: QuantizedModel, batches: Iterable[Any], *, observer: Any = None, progress: bool | None = None
) -> None:
    """Find scales and zero points from data: one pass in constant memory. Post-training quantization ends here.

    The model runs on reals, in evaluation mode; its own state does not move.

    Args:
      batches: arrays, or tuples of the call's arguments.
      observer: instead of the recipe's, for all activations: a name of `calibration.names()` or an `Observer`.
      progress: show a progress bar on stderr; None shows one on a terminal.
    """
    plan = qmodel.plan
    quantizers, kinds = dict(plan.quantizers), {name: detail[0] for name, detail in plan.details}
    observers = dict(plan.observers)
    activations = [name for name, kind in kinds.items() if kind != "weight"]
    if observer is not None:
        observers.update(dict.fromkeys(activations, calibration.get(observer)))
    graphdef, state = nnx.split(_evaluation_copy(qmodel.model))

    def taps_of(state: Any, args: Any, kind: str) -> dict[str, dict[str, jax.Array]]:
        """name of the quantizer -> label of the tensor -> its real values."""
        traced = trace(nnx.merge(graphdef, state), args, {})
        annotation = annotate(traced.program, traced.names, traced.constant, plan.is_float)

        def record(place: Place, x: jax.Array, _: Quantized | None) -> jax.Array | None:
            return x if (kinds.get(place.name) == "weight") == (kind == "weight") else None

        evaluation = Evaluation(annotation, None, record, plan.shared)
        taps = evaluation.run(traced.program, traced.args, _nothing(plan))[1]
        found: dict[str, dict[str, jax.Array]] = {}
        for place in (*annotation.values.values(), *annotation.weights.values()):
            if place.label in taps:
                found.setdefault(place.name, {})[place.label] = taps[place.label]
        return found

    @jax.jit
    def step(state: Any, seen: Any, args: Any) -> Any:
        for name, records in taps_of(state, args, "activation").items():
            q = quantizers[name]
            for x in records.values():
                seen[name] = _update(observers[name], seen[name], x, q)
        return seen

    count = 0
    seen: dict[str, Any] = {}
    weights: dict[str, dict[str, jax.Array]] = {}
    for batch in calibration.track(batches, "calibrating", enabled=progress):
        args = _arguments(batch)
        if count == 0:
            shapes = jax.eval_shape(lambda s, a: taps_of(s, a, "activation"), state, args)
            for name, records in shapes.items():
                seen[name] = _initial(observers[name], quantizers[name], next(iter(records.values())).shape)
            weights = jax.jit(lambda s, a: taps_of(s, a, "weight"))(state, args)
        seen = step(state, seen, args)
        count += 1
    if count == 0:
        raise ValueError("calibrate: expected at least one batch, got none.")
    for name, q in plan.quantizers:
        if kinds[name] == "weight":
            way = observers[name]
            qparams = _of_weight(q, np.asarray(next(iter(weights[name].values()))), way, shared=name in plan.shared)
        else:
            host = jax.tree.map(np.asarray, seen[name])
            qparams = _finish(observers[name], host, q, name)
        values = q.init(qparams)
        module = qmodel.quantizers[name]
        for key, value in values.items():
            variable = getattr(module, key)
            variable[...] = jnp.asarray(value, variable[...].dtype)


def convert(qmodel: QuantizedModel, sample: Any, *, target: Any = None) -> IntegerGraph:
    """The model as a graph that holds integers only, in evaluation mode.

    Args:
      sample: one batch, an array or a tuple of the call's arguments; only its shapes matter. The first axis of every
        array is the batch, and the graph takes any size of it.
      target: the runtime whose rounding the graph obeys; None takes the recipe's.

    Raises:
      ConversionError: something has no integer form; the message names the primitive, your line, and a cure.
    """
    return IntegerGraph(_convert(qmodel, _arguments(sample), targets.get(target or qmodel.plan.target)))


def verify(graph: IntegerGraph, qmodel: QuantizedModel, batches: Iterable[Any]) -> Report:
    """Compare the graph with the fake-quantized forward (evaluation mode) on every batch, node by node.

    `batches`: arrays, or tuples of the call's arguments. `str()` of the result is a table.
    """
    view = _evaluation_copy(qmodel)

    def reference(*inputs: Any) -> tuple[Any, dict[str, Any]]:
        return view.codes(*inputs)

    return compare_nodes(graph, reference, (_arguments(batch) for batch in batches))


Forward = Callable[..., Any]


def exact(qmodel: QuantizedModel, sample: Any, *, target: Any = None) -> Forward:
    """A forward whose value is the integer graph's and whose gradient is the fake-quantized model's.

    Returns `forward(qmodel, *inputs)`: the output of the graph that `convert` would make from the parameters that
    `qmodel` holds at that call, computed by the interpreter's kernels, also inside jit and grad; float32,
    whatever the model's own dtype. Evaluation mode: batch statistics are read, not moved. Use it for the last epochs,
    so that training sees the deployed rounding:

        forward = qjax.exact(qmodel, sample)

        @nnx.jit
        def step(qmodel, optimizer, x, y):
            loss, grads = nnx.value_and_grad(lambda m: criterion(forward(m, x), y))(qmodel)
            optimizer.update(qmodel, grads)
    """
    args = _arguments(sample)
    chosen = targets.get(target or qmodel.plan.target)
    _convert(qmodel, args, chosen)  # raises here, with concrete numbers, what cannot be converted

    def forward(qmodel: QuantizedModel, *inputs: Any) -> Any:
        view = _evaluation_copy(qmodel)
        ir = _convert(view, args, chosen)
        arrays = [x for x in inputs if isinstance(x, (jax.Array, np.ndarray))]
        # without the fence XLA may compute a constant anew for every output that reads it
        constants = jax.lax.optimization_barrier(prepare(ir))
        env = run_graph(ir, constants, quantize_inputs(ir, arrays))
        value = dequantize_outputs(ir, [env[name] for name in ir.outputs])
        surrogate = jax.tree.map(lambda y, v: y.astype(v.dtype), view(*inputs), value)
        return jax.tree.map(_with_gradient_of, surrogate, value)

    return forward


@jax.custom_jvp
def _with_gradient_of(surrogate: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, with the derivative of `surrogate`."""
    return value


@_with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _with_gradient_of(*primals), tangents[0]


def _convert(qmodel: QuantizedModel, args: tuple[Any, ...], target: targets.Target) -> Graph:
    plan, quantizers = qmodel.plan, dict(qmodel.plan.quantizers)
    values = qmodel.quantizer_values()
    model = _evaluation_copy(qmodel.model)

    def params_of(place: Place, step: tuple[int, ...], x: Any) -> QParams:
        q, own = quantizers[place.name], values[place.name]
        if step and place.name not in plan.shared:
            own = {name: value[step] for name, value in own.items()}
        if q.method == "dynamic" and isinstance(x, jax.ShapeDtypeStruct):
            return QParams(
                np.ones(q.spec.param_shape(x.shape), np.float32),
                np.zeros(q.spec.param_shape(x.shape), np.int32),
                q.spec,
            )
        return q.qparams(own, x)

    def read(args: tuple[Any, ...]) -> tuple[Traced, Annotation]:
        traced = trace(model, args, {})
        return traced, annotate(traced.program, traced.names, traced.constant, plan.is_float)

    traced, annotation = read(args)
    arrays = [a for a in args if isinstance(a, (jax.Array, np.ndarray))]
    size = int(arrays[0].shape[0])
    other, other_annotation = read(
        tuple(
            jnp.zeros((2 * size, *a.shape[1:]), a.dtype) if isinstance(a, (jax.Array, np.ndarray)) else a for a in args
        )
    )
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in other.args]
    graph = convert_program(
        traced.program,
        annotation,
        traced.args,
        traced.names,
        params_of,
        target,
        (other.program, other_annotation, shapes),
        (size, 2 * size),
    )
    positions = jax.tree.map(lambda _: 0, traced.outputs([0] * len(traced.program.outputs)))
    leaves, tree = jax.tree.flatten(positions)
    structure = describe(tree.unflatten(range(len(leaves))))
    if len(leaves) != len(graph.outputs):
        raise ConversionError(
            f"The model returns {len(leaves)} arrays, of which {len(graph.outputs)} come from quantized operations. "
            "Return only what depends on the input through operations that qjax converts."
        )
    return graph.replace(metadata={"producer": "qjax", "output_structure": structure})


# ---------------------------------------------------------------------------- helpers


def _arguments(batch: Any) -> tuple[Any, ...]:
    args = batch if isinstance(batch, tuple) else (batch,)
    for arg in args:
        if not isinstance(arg, (jax.Array, np.ndarray)) and not isinstance(arg, (bool, int, float, str, type(None))):
            raise TypeError(
                f"Expected a batch to be an array or a tuple of the call's arguments, got {type(arg).__name__}."
            )
    return tuple(jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args)


def _evaluation_copy(model: ModuleT) -> ModuleT:
    copy = nnx.clone(model)
    copy.eval()
    return copy


def _edges(annotation: Annotation) -> set[str]:
    layers = annotation.layers
    if not layers:
        return set()
    first, last = layers[0], layers[-1]
    found = [first.weight, first.input, last.weight, last.input, last.output]
    return {place.name for place in found if place is not None}


def _placeholder(q: Quantizer) -> dict[str, Any]:
    if q.method == "dynamic":
        return {}
    shape = (*q.stack, *_param_shape(q))
    zero_point = np.zeros(shape, np.int32)
    with_axes = dataclasses.replace(q)
    return with_axes.init(_raw_qparams(np.ones(shape, np.float32), zero_point, q))


def _param_shape(q: Quantizer) -> tuple[int, ...]:
    return () if q.spec.per_tensor else q.spec.param_shape(q.shape)


def _raw_qparams(scale: Any, zero_point: Any, q: Quantizer) -> QParams:
    return QParams(scale, np.clip(zero_point, q.spec.qmin, q.spec.qmax), q.spec)


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


def _finish(observer: Any, state: Any, q: Quantizer, name: str) -> QParams:
    try:
        if not q.stack:
            return observer.qparams(state, q.spec)
        parts = [
            observer.qparams(jax.tree.map(lambda a, i=index: a[i], state), q.spec) for index in np.ndindex(*q.stack)
        ]
    except ValueError as error:
        raise ValueError(f"Quantizer {name!r}: {error}") from error
    return _stack(parts, q)


def _of_weight(q: Quantizer, w: np.ndarray, way: Any, *, shared: bool) -> QParams:
    if shared:
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
    return _raw_qparams(
        scale.reshape((*q.stack, *scale.shape[1:])), zero_point.reshape((*q.stack, *zero_point.shape[1:])), q
    )
