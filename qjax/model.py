"""Where layers and export meet: quantize, convert, verify, exact."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax import targets
from qjax.batches import Batches, Inputs, arguments_of, brief, refuse_trace
from qjax.calibrating import calibrate, stacked_qparams
from qjax.calibration.learned import Quantizer
from qjax.explanation import obstacles, refused_rows
from qjax.export import contents
from qjax.export.assign import assign
from qjax.export.backend import backend_of, target_of
from qjax.export.convert import quantized_graph
from qjax.export.integer_graph import IntegerGraph, dequantize_outputs, inputs_of, quantize_inputs
from qjax.export.interpreter import prepare
from qjax.export.interpreter import run as run_graph
from qjax.export.ir import Graph
from qjax.export.lower import ConversionError
from qjax.export.passes.overflow import may_wrap
from qjax.export.structure import Call, describe, describe_arguments, join_arguments, sample_like, split_arguments
from qjax.export.unsupported import unsupported
from qjax.export.verify import Report
from qjax.export.verify import verify as compare_nodes
from qjax.finite import check_bounds, check_finite
from qjax.layers import Traced, TraceError, check_any_batch, check_nothing_drawn, instrument, module_types, trace
from qjax.numerics.affine import QParams
from qjax.numerics.surrogate import with_gradient_of
from qjax.ops import backend
from qjax.ops.formulas import check_target
from qjax.profiled import refuse_model
from qjax.progress import stage, track
from qjax.qmodel import Plan, QuantizedModel, QuantizerState, check_quantized, evaluation_copy, unquantized
from qjax.recipe import Recipe
from qjax.runtimes.comparing import against_runtimes, check_runtimes
from qjax.tracing import Annotation, Place, dynamic_products, lost_tables, said


def quantize(model: nnx.Module, recipe: Recipe, sample: Any, *, progress: bool | None = None) -> QuantizedModel:
    """A copy of `model` that trains with fake quantization; the model itself is not changed.

    Args:
      model: any `nnx.Module` with a `__call__`.
      recipe: bits, methods, overrides.
      sample: one batch: an array, or a tuple of the call's arguments. It finds the tensors and gives every scale a
        first value; `calibrate` with more data makes a better one.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).

    Raises:
      ValueError: an override that matches nothing, or a spec that a tensor cannot take.
      ProfileError: the recipe names a device whose rules the model breaks; the message lists all of them.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize: expected a flax nnx.Module, got {type(model).__name__}. Wrap a linen module and its variables: "
            "qjax.from_linen(module, variables); a Keras model: qjax.from_keras(model); a function of "
            "parameters: qjax.from_function(apply, params)."
        )
    instrumented = instrument(model)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"quantize: expected a qjax.Recipe, got {brief(recipe)}. The order is quantize(model, recipe, sample)."
        )
    if any(isinstance(node, QuantizedModel) for _, node in nnx.iter_graph(model)):
        raise TypeError(
            "quantize: expected a float model, got a quantized one. For another recipe quantize the float model again; "
            "nnx.update(model, nnx.state(qmodel.model)) gives it the trained parameters."
        )
    refuse_trace("quantize")
    args = arguments_of(sample, "quantize")
    with stage(f"quantize: tracing {type(model).__name__}", progress):
        traced = trace(evaluation_copy(instrumented), args, {})
    check_bounds(traced)
    types = module_types(instrumented, traced.read)
    nothing = unquantized(recipe, types)
    nothing = nothing.with_ranges(traced, recipe.integers)
    read, annotation = nothing.read(traced)
    places = annotation.places()
    by_row = recipe.by_row(places, types)
    if by_row:
        # what such a table gives has a quantizer of its own
        nothing = dataclasses.replace(nothing, by_row=by_row)
        read, annotation = nothing.read(traced)
        places = annotation.places()
    traced = read
    recipe.check_matched(places, types)
    recipe.check_dynamic({eqn.scope for eqn, _ in dynamic_products(traced.program)}, types)
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
    scanned = (name for name, place in places.items() if place.own(place.stack))
    shared = frozenset(scanned) if recipe.scan == "shared" else frozenset()
    plan = dataclasses.replace(
        nothing, quantizers=tuple(quantizers.items()), details=details, observers=observers, shared=shared
    )
    qmodel = with_plan(instrumented, plan)
    calibrate(qmodel, [sample], progress=progress)
    if plan.profile is not None:
        rows = refused_rows(traced, annotation, plan)
        refuse_model(plan.profile, quantizers, places, rows, lambda: _convert(qmodel, args, plan.target))
    refused = obstacles(traced, annotation, plan)
    if refused:
        warnings.warn(f"quantize: the model trains, but convert will refuse it.\n{refused}", stacklevel=2)
    for eqn, share in lost_tables(annotation, qmodel.qparams().get).items():
        warnings.warn(said(eqn, share), stacklevel=2)
    return qmodel


def with_plan(instrumented: nnx.Module, plan: Plan) -> QuantizedModel:
    """An instrumented model with the quantizers of a plan, whose scales are still to be calibrated or loaded."""
    states = {name: QuantizerState(q, _placeholder(q)) for name, q in plan.quantizers}
    return QuantizedModel(instrumented, plan, states)


def convert(qmodel: QuantizedModel, sample: Any, *, target: Any = None) -> IntegerGraph:
    """The model as a graph that holds integers only, in evaluation mode.

    Args:
      sample: one batch, an array or a tuple of the call's arguments. Of its arrays only the shapes matter: the first
        axis of every array is the batch, and the graph takes any size of it. Its Python values (flags, numbers, None)
        are part of the graph, which refuses a call with others.
      target: the runtime whose rounding the graph obeys, or a `qjax.export.Backend`, whose kernels then compute what
        its patterns match; None takes the recipe's.

    Raises:
      ValueError: a parameter holds NaN or infinity.
      ConversionError: something has no integer form; the message names the primitive, your line, and a cure.
      ProfileError: the recipe names a device whose rules the graph breaks. With another target than the recipe's no
        rule is checked.
    """
    check_quantized(qmodel, "convert")
    args = arguments_of(sample, "convert", traced=True)
    with stage("convert"):
        graph = _convert(qmodel, args, target or qmodel.plan.target)
        if qmodel.plan.profile is not None and target is None:
            contents.check_graph(graph, qmodel.plan.profile).refuse("convert")
            graph = graph.replace(metadata={**graph.metadata, contents.PROFILE: qmodel.plan.profile})
        return IntegerGraph(graph)


def verify(
    graph: IntegerGraph,
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    runtimes: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
) -> Report:
    """Compare the graph with the fake-quantized forward (evaluation mode) on every batch, node by node.

    Args:
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything.
      inputs: what of a batch the model is called with.
      runtimes: names of `qjax.runtimes.RUNTIMES`, such as "onnxruntime", "litert", "c". The graph is emitted for each
        of them into a temporary folder, the file is run there on every batch, and its outputs are compared with the
        graph's. A mapping gives options of `graph.emit` with each name: {"onnxruntime": {"style": "qdq"}}.

    Returns:
      A report; `str()` of it is a verdict and a table.

    Raises:
      ValueError: an unknown runtime, or a format that cannot hold the graph.
      ImportError: a runtime that is not installed.
    """
    if not isinstance(graph, IntegerGraph):
        raise TypeError(
            f"verify: expected a graph from qjax.convert, got {brief(graph)}. The order is verify(graph, qmodel, "
            "batches)."
        )
    check_quantized(qmodel, "verify")
    asked = check_runtimes("verify", runtimes)
    graphdef, state = nnx.split(evaluation_copy(qmodel))
    codes = _codes_of(graphdef)
    given: list[list[np.ndarray]] = []

    def reference(*inputs: Any) -> tuple[Any, dict[str, Any]]:
        return codes(state, *split_arguments(inputs))

    def checked() -> Iterable[tuple[Any, ...]]:
        seen = track(Batches(batches, inputs, "verify"), f"verify: {len(graph.ir.nodes)} nodes, batch")
        for index, (_, args) in enumerate(seen):
            if index == 0:
                model = nnx.merge(graphdef, state)
                check_finite("verify", model, model.trace(*args).traced)
            if asked:
                quantized = graph.quantize(*args)
                given.append([np.asarray(q) for q in (quantized if isinstance(quantized, tuple) else (quantized,))])
            yield args

    def converted(args: tuple[Any, ...]) -> Graph | None:
        target = _target_of_graph(graph.ir, qmodel.plan.target)
        return None if target is None else _convert(qmodel, args, target)

    name = target_of(qmodel.plan.target).name
    report = compare_nodes(graph, reference, checked(), name, converted)
    return report.with_files(against_runtimes(graph, given, asked)) if asked else report


def _target_of_graph(ir: Graph, own: Any) -> Any:
    """The target or backend that a graph was made for, `own` being the model's; None where only its name is known."""
    fused = any(node.op == backend.NAME and node.attributes["backend"] is not None for node in ir.nodes)
    if target_of(own).name == ir.target and (backend_of(own) is not None) == fused:
        return own
    return ir.target if not fused and ir.target in targets.names() else None


def _codes_of(graphdef: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """(state, arrays, rest of the arguments) -> output and codes."""
    try:
        hash(graphdef)
    except TypeError:
        # a module with a dict or a list among its attributes, which no cache can be keyed by
        return jax.jit(functools.partial(_codes, graphdef), static_argnums=2)
    return functools.partial(_compiled_codes, graphdef)


def _codes(graphdef: Any, state: Any, arrays: Any, rest: Any) -> tuple[Any, dict[str, Any]]:
    return nnx.merge(graphdef, state).codes(*join_arguments(arrays, rest))


_compiled_codes = jax.jit(_codes, static_argnums=(0, 3))
"""Compiled once for a model, however often and against however many targets it is verified."""


Forward = Callable[..., Any]


def exact(qmodel: QuantizedModel, sample: Any, *, target: Any = None) -> Forward:
    """A forward whose value is the integer graph's and whose gradient is the fake-quantized model's.

    Returns `forward(qmodel, *inputs)`: the output of the graph that `convert` would make from the parameters that
    `qmodel` holds at that call, computed by the interpreter's kernels, also inside jit and grad; float32, whatever the
    model's own dtype. It is NaN where the fake-quantized forward is, and everywhere under weights that `convert` would
    refuse because an accumulator could overflow. Evaluation mode: batch statistics are read, not moved. A call with
    other Python values than the sample's (a flag, None) computes the graph for those. Use it for the last epochs, so
    that training sees the deployed rounding:

        forward = qjax.exact(qmodel, sample)

        @nnx.jit
        def step(qmodel, optimizer, x, y):
            loss, grads = nnx.value_and_grad(lambda m: criterion(forward(m, x), y))(qmodel)
            optimizer.update(qmodel, grads)
    """
    check_quantized(qmodel, "exact", numbers=False)
    args = arguments_of(sample, "exact", traced=True)
    chosen = target or qmodel.plan.target
    _convert(qmodel, args, chosen)  # raises here, with concrete numbers, what cannot be converted

    def forward(qmodel: QuantizedModel, *inputs: Any) -> Any:
        if not isinstance(qmodel, QuantizedModel):
            raise TypeError(
                f"exact: expected the quantized model as the forward's first argument, got {brief(qmodel)}. Call "
                "forward(qmodel, x)."
            )
        view = evaluation_copy(qmodel)
        # the value is not differentiated, and some of it cannot be: tables are made on the host
        definition, state = nnx.split(view)
        ir = _convert(nnx.merge(definition, jax.lax.stop_gradient(state)), sample_like(args, inputs), chosen)
        arrays = jax.lax.stop_gradient(inputs_of(ir, inputs))
        # without the fence XLA may compute a constant anew for every output that reads it
        constants = jax.lax.optimization_barrier(prepare(ir))
        env = run_graph(ir, constants, quantize_inputs(ir, arrays))
        value = dequantize_outputs(ir, [env[name] for name in ir.outputs])
        wraps = may_wrap(ir)
        surrogate = jax.tree.map(lambda y, v: y.astype(v.dtype), view(*inputs), value)
        flagged = jax.tree.map(lambda y, v: _flagged(y, v, wraps), surrogate, value)
        return jax.tree.map(with_gradient_of, surrogate, flagged)

    return forward


def _flagged(surrogate: jax.Array, value: jax.Array, wraps: Any) -> jax.Array:
    """`value`, but NaN where the fake-quantized forward is, or where an accumulator may have wrapped (`may_wrap`)."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    lost = jnp.isnan(jax.lax.stop_gradient(surrogate))
    if wraps is not None:
        lost = lost | wraps
    return jnp.where(lost, jnp.full_like(value, np.nan), value)


def _convert(qmodel: QuantizedModel, args: tuple[Any, ...], target: Any) -> Graph:
    rounding = target_of(target)
    check_target(rounding)
    plan, quantizers = qmodel.plan, dict(qmodel.plan.quantizers)
    values = qmodel.quantizer_values()
    model = evaluation_copy(qmodel.model)
    seen: dict[tuple[str, tuple[int, ...]], QParams] = {}

    def params_of(place: Place, step: tuple[int, ...], x: Any) -> QParams:
        q, own = quantizers[place.name], values[place.name]
        if step and place.name not in plan.shared:
            own = {name: value[step] for name, value in own.items()}
        if not q.follows_tensor:
            return q.qparams(own, x)
        # the second trace has shapes alone: what a weight's numbers say, the first one has seen
        if not isinstance(x, jax.ShapeDtypeStruct):
            seen[place.name, step] = q.qparams(own, x)
        return seen[place.name, step]

    def read(args: tuple[Any, ...]) -> tuple[Traced, Annotation]:
        return plan.read(trace(model, args, {}, plan.expected))

    traced, annotation = read(args)
    plan.check_known(annotation)
    _check_stateless(traced, annotation)
    check_finite("convert", qmodel, traced)
    arrays, rest = split_arguments(args)
    size = _batch_size(arrays, traced.names[len(traced.names) - len(arrays) :])
    # a cut such as h[:2] leaves a batch of one or two whole: the other batch is greater than most cuts
    other_size = 2 * size if size > 2 else 64
    larger = [jnp.zeros((other_size, *a.shape[1:]), a.dtype) if a.ndim else a for a in arrays]
    other, other_annotation = read(join_arguments(larger, rest))
    concrete = not any(isinstance(x, Tracer) for x in traced.args)
    programs = (traced.read, other.read)
    if concrete:
        _converts(check_nothing_drawn, programs)
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in other.args]
    quantized = quantized_graph(
        traced.results,
        annotation,
        traced.args,
        traced.names,
        params_of,
        (other.results, other_annotation, shapes),
        (size, other_size),
    )
    graph = assign(quantized, rounding)
    if concrete:
        # once is enough: `exact` converts the same model again in every trace
        _converts(check_any_batch, model, args, programs, (size, other_size))
    assert graph.call is not None
    if not graph.outputs:
        raise ConversionError("The model returns nothing that depends on its arguments; a graph would be empty.")
    call = Call(tuple(jax.tree.structure(x) for x in args), traced.returned, graph.call.leaves)
    order = {name: position for position, name in enumerate(graph.inputs)}
    names = traced.names[len(traced.names) - len(arrays) :]
    arguments = describe_arguments(args, [order.get(name) for name in names])
    metadata: dict[str, Any] = {"producer": "qjax", "input_structure": arguments}
    if not any(isinstance(x, Tracer) for x in call.leaves):
        metadata["output_structure"] = describe(call.result(range(len(graph.outputs))))
    ranges = {order[known.name]: [known.low, known.high] for known in plan.integers if known.name in order}
    if ranges:
        metadata["integers"] = [ranges.get(index) for index in range(len(graph.inputs))]
    graph = graph.replace(metadata=metadata, call=call)
    backend = backend_of(target)
    return graph if backend is None else backend.partition(graph)


def _converts(check: Callable[..., None], *args: Any) -> None:
    """A check of the traces, whose error is one of the conversion."""
    try:
        check(*args)
    except TraceError as error:
        raise ConversionError(str(error)) from error


def _check_stateless(traced: Traced, annotation: Annotation) -> None:
    """A graph computes what the call returns; what it writes must not depend on its arguments."""
    made = {value: eqn for eqn in traced.program.equations for value in eqn.outputs}
    for name, value in traced.written():
        if value not in annotation.constants and value.constant is None:
            if value in made and len(made[value].outputs) > 1:
                # a layer that moves its own statistics: the error names the layer and its cure
                raise unsupported(made[value])
            raise ConversionError(
                f"The call writes the variable {name!r} from its arguments, and a graph keeps nothing between two "
                "calls. qjax.stateful(model, nnx.Cache) makes variables of a type an argument and a result of the "
                "call. Or switch the writing off in evaluation mode."
            )


def _batch_size(arrays: list[Any], names: Sequence[str]) -> int:
    sizes = {name: int(a.shape[0]) for name, a in zip(names, arrays, strict=True) if a.ndim}
    if not sizes:
        raise ValueError("convert: expected a sample with at least one array whose first axis is the batch.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(
            f"convert: the first axis of every argument is the batch, but {listed}. What belongs to no example (a mask "
            "for all of them, say) is a constant of the model, or is repeated for every example."
        )
    return next(iter(sizes.values()))


def _edges(annotation: Annotation) -> set[str]:
    layers = annotation.layers
    if not layers:
        return set()
    first, last = layers[0], layers[-1]
    found = [first.weight, first.input, last.weight, last.input, last.output]
    return {place.name for place in found if place is not None}


def _placeholder(q: Quantizer) -> dict[str, Any]:
    if q.follows_tensor:
        return {}
    shape = (*q.stack, *_param_shape(q))
    zero_point = np.zeros(shape, np.int32)
    return q.init(stacked_qparams(np.ones(shape, np.float32), zero_point, q))


def _param_shape(q: Quantizer) -> tuple[int, ...]:
    return () if q.spec.per_tensor else q.spec.param_shape(q.shape)
