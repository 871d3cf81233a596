"""The three main steps: `quantize` a float model, `convert` it to an integer graph, `verify` the graph."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax import targets
from qjax.api.calibrate import measure_ranges, stacked_qparams
from qjax.api.convert import BATCH, Batch, check_batch, graph_of
from qjax.api.explain import obstacles, refused_rows
from qjax.api.recipe_fit import Fit, float_steps
from qjax.assign.backend import backend_of, target_of
from qjax.calibration.learned import Quantizer
from qjax.comparison.verify import Report
from qjax.comparison.verify import verify as compare_nodes
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import PROFILE, UNCALIBRATED, Graph
from qjax.graph.state import STATE, Asked
from qjax.graph.structure import join_arguments, split_arguments
from qjax.layers import Definition, instrument, module_types, trace
from qjax.lower import ConversionError
from qjax.model.finite import check_bounds, check_finite
from qjax.model.quantized_model import Plan, Product, QuantizedModel, check_quantized, evaluation_copy, unquantized
from qjax.model.quantizer_numbers import QuantizerNumbers
from qjax.ops import backend
from qjax.recipe.recipe import Recipe
from qjax.runtimes.comparing import against_runtimes, check_runtimes
from qjax.support.batches import Batches, Inputs, arguments_of, brief, refuse_trace
from qjax.support.errors import refuse
from qjax.support.extensions import profiles
from qjax.support.on_cpu import on_cpu
from qjax.support.progress import stage, track
from qjax.support.transfers import with_transfers
from qjax.support.user_frames import users_level
from qjax.tracing import Annotation, dynamic_products, lost_tables, said


@with_transfers
def quantize(model: nnx.Module, recipe: Recipe, sample: Any, *, progress: bool | None = None) -> QuantizedModel:
    """Return a copy of `model` that trains with fake quantization; the model itself is not changed.

    Args:
      model: any `nnx.Module` with a `__call__`.
      recipe: bits, methods, overrides.
      sample: one batch: an array, or a tuple of the call's arguments. Tracing it finds the tensors and gives every
        scale a first value; `calibrate` with more data improves on it.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: an override matches nothing, or tensors cannot have the specs; the message lists all of them. Or the
        recipe has `gradients`, and the model has no product whose backward pass has an integer form.
      ProfileError: the recipe names a device whose rules the model breaks; the message lists all of them.

    One warning lists the settings of the recipe that no tensor uses, another one the weights whose groups differ from
    what it asks for, and a third one the float steps of parts under `Dynamic` that only StableHLO files can hold.

    Examples:
      ```python
      recipe = qjax.Recipe(target="tflite_micro", weights=qjax.QSpec(bits=4, axis=-1))
      qmodel = qjax.quantize(model, recipe, x)
      # trains weights and scales
      optimizer = nnx.Optimizer(qmodel, optax.adam(1e-3), wrt=nnx.Param)
      ```
    """
    return quantize_derived(model, recipe, sample, progress=progress, judged=True)


def quantize_derived(
    model: nnx.Module, recipe: Recipe, sample: Any, *, progress: bool | None = None, judged: bool = False
) -> QuantizedModel:
    """`quantize` with a recipe derived from the user's; `judged`: whether to warn of settings without effect."""
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
            "quantize: expected a float model, got a quantized one. To use another recipe, quantize the float model "
            "again; nnx.update(model, nnx.state(qmodel.model)) copies the trained parameters into it."
        )
    refuse_trace("quantize")
    args = arguments_of(sample, "quantize")
    with stage(f"quantize: tracing {type(model).__name__}", progress):
        traced = trace(evaluation_copy(instrumented), args, {}, known=False)
    check_bounds(traced)
    types = module_types(instrumented, traced.read)
    nothing = unquantized(recipe, types)
    nothing = nothing.with_ranges(traced, recipe.integers)
    read, annotation = nothing.read(traced)
    places = annotation.places()
    by_row = recipe.by_row(places, types)
    if by_row:
        # The output of a table with a scale per row gets a quantizer of its own, so read the places again.
        nothing = dataclasses.replace(nothing, by_row=by_row)
        read, annotation = nothing.read(traced)
        places = annotation.places()
    traced = read
    recipe.check_matched(places, types)
    recipe.check_dynamic({eqn.scope for eqn, _ in dynamic_products(traced.program)}, types)
    edges, outputs, operands = _edges(annotation), annotation.output_names, annotation.operands
    quantizers: dict[str, Quantizer] = {}
    wrong: list[str] = []
    for name, place in places.items():
        edge, output, operand = (name in names for names in (edges, outputs, operands))
        try:
            quantizers[name] = recipe.quantizer(place, types, edge=edge, output=output, operand=operand)
        except ValueError as error:
            wrong.append(str(error))
    refuse(wrong)
    details = tuple((n, (p.kind, p.module, p.op, p.shape)) for n, p in places.items())
    observers = tuple(
        (n, recipe.weight_observer_of(q.spec) if places[n].kind == "weight" else recipe.observer_of(q.spec))
        for n, q in quantizers.items()
    )
    scanned = (name for name, place in places.items() if place.own(place.stack))
    shared = frozenset(scanned) if recipe.scan == "shared" else frozenset()
    products = {
        product.name: product
        for eqn, found in dynamic_products(traced.program)
        for product in [Product.of(eqn, found, annotation.origins)]
    }
    plan = dataclasses.replace(
        nothing,
        quantizers=tuple(quantizers.items()),
        details=details,
        observers=observers,
        shared=shared,
        products=tuple(products.values()),
    )
    if judged:
        fit = Fit(recipe, types, annotation, places, quantizers, plan, edges, bool(traced.adapters))
        for text in (fit.other_groups(), fit.unused(), fit.float_backward(), float_steps(traced, annotation, plan)):
            if text:
                warnings.warn(text, stacklevel=users_level())
    qmodel = with_plan(instrumented, plan)
    measure_ranges(qmodel, [sample], progress=progress)
    if plan.profile is not None:
        rows = refused_rows(traced, annotation, plan)
        judge = profiles().check_model
        judge(plan.profile, quantizers, places, rows, lambda: graph_of(qmodel, args, plan.target))
    refused = obstacles(traced, annotation, plan)
    looping = bool(plan.float_paths) and any(eqn.is_scan for eqn in traced.program.walk())
    if judged and not refused and plan.profile is None and (looping or _are_unusual(plan)):
        # This check uses the present numbers; training may still change what a sum can reach.
        refused = _refusal(qmodel, args)
    if refused:
        warnings.warn(f"quantize: the model trains, but convert will refuse it.\n{refused}", stacklevel=users_level())
    lost = lost_tables(annotation, qmodel.qparams().get)
    if lost:
        warnings.warn(said(lost), stacklevel=users_level())
    return qmodel


def _are_unusual(plan: Plan) -> bool:
    """Whether a target may refuse the codes or the scales of a plan, which is rare with the usual 8-bit codes."""
    return target_of(plan.target).powers_of_two or any(
        spec.bits > 8 or (spec.symmetric and spec.signed and not spec.narrow_range)
        for spec in (q.spec for _, q in plan.quantizers)
    )


def _refusal(qmodel: QuantizedModel, args: tuple[Any, ...]) -> str:
    """The error with which `convert` refuses the model at its present numbers; "" where it accepts it."""
    try:
        graph_of(evaluation_copy(qmodel), args, qmodel.plan.target, "fixed")
    except ConversionError as error:
        return str(error)
    except ValueError as error:
        # Other errors follow from numbers that training changes.
        return str(error) if target_of(qmodel.plan.target).powers_of_two else ""
    return ""


def with_plan(instrumented: nnx.Module, plan: Plan) -> QuantizedModel:
    """An instrumented model with the quantizers of a plan; their scales are calibrated or loaded later."""
    values = {name: _placeholder(q) for name, q in plan.quantizers}
    return QuantizedModel(instrumented, plan, QuantizerNumbers(plan.by_name, values))


@with_transfers
def convert(
    qmodel: QuantizedModel,
    sample: Any,
    *,
    target: Any = None,
    batch: Batch | None = None,
    state: Asked | None = None,
) -> IntegerGraph:
    """Convert the model, in evaluation mode, to a graph that holds integers only.

    Args:
      qmodel: the quantized model.
      sample: one batch, an array or a tuple of the call's arguments. Only the shapes of its arrays matter: the first
        axis of every array is the batch, and the graph accepts any size of it. Its Python values (flags, numbers, None)
        become part of the graph, which refuses a call with other values.
      target: the runtime whose rounding the graph matches, or a `qjax.export.Backend`, whose kernels then compute what
        its patterns match; None takes the recipe's.
      batch: "free": the graph accepts any batch size, which a trace at a second size proves. "fixed": it accepts the
        sample's size only, and the first axes of the arguments may differ. None means "free", with two exceptions:
        "fixed" where the model cannot be traced at another size and holds a state with one row per example, such as
        its own cache; and "fixed" with a warning where the first axes of the arguments differ. A graph with a fixed
        batch has `graph.ir.metadata["batch"] == "fixed"`.
      state: the argument, by name or position, that the call returns in its next version, such as a cache. Its next
        value is the part of the result with the same structure, shapes and dtypes (of several, the one with the same
        name); `state=(argument, key of the result)` names it explicitly. Both have the same scales and zero points, so
        that `graph.step(state, ...)` carries the state as codes.

    Raises:
      ValueError: a parameter holds NaN or infinity.
      ConversionError: something has no integer form; the message names the primitive, your line, and a cure.
      ProfileError: the graph breaks rules of the device that the recipe names. Under another target than the recipe's
        the rules are not checked.

    Examples:
      ```python
      graph = qjax.convert(qmodel, x)
      graph.save("model.qjax")
      other = qjax.convert(qmodel, x, target="onnxruntime")  # another runtime's rounding
      ```
    """
    check_quantized(qmodel, "convert")
    args = arguments_of(sample, "convert", traced=True)
    check_batch("convert", batch)
    with stage("convert"), on_cpu(qmodel, args) as (near, arrays):
        graph = graph_of(near, arrays, target or qmodel.plan.target, batch, state)
        if qmodel.plan.profile is not None and target is None:
            profiles().check_graph(graph, qmodel.plan.profile).refuse("convert")
            graph = graph.replace(metadata={**graph.metadata, PROFILE: qmodel.plan.profile})
        blind = qmodel.warn_if_blind("convert")
        if blind:
            graph = graph.replace(metadata={**graph.metadata, UNCALIBRATED: list(blind)})
        return IntegerGraph(graph)


@with_transfers
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
      graph: the graph that `convert` returned.
      qmodel: the model from which it was made.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything.
      inputs: picks the model's arguments out of a batch.
      runtimes: names of `qjax.runtimes.RUNTIMES`, such as "onnxruntime", "litert", "c". The graph is emitted for each
        of them into a temporary folder, the file is run there on every batch, and its outputs are compared with the
        graph's. A mapping adds options of `graph.emit` to each name: {"onnxruntime": {"style": "qdq"}}.

    Returns:
      A report; its `str()` is a verdict and a table.

    Raises:
      ValueError: the graph belongs to another model, a runtime is unknown, or its format cannot hold the graph.
      ImportError: a runtime is not installed.

    Examples:
      ```python
      report = qjax.verify(graph, qmodel, batches)
      print(report)  # codes compared, codes that differ, and why
      qjax.verify(graph, qmodel, batches, runtimes=["c"])  # also compiles and runs the C code
      ```
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
        seen = track(Batches(batches, inputs, "verify"), f"verify: {len(graph.ir.nodes)} nodes, batch", compiles=True)
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
        known = graph.ir.metadata.get(STATE)
        state = None if known is None else (known[0], known[1])
        return None if target is None else graph_of(qmodel, args, target, graph.ir.metadata.get(BATCH), state)

    name = target_of(qmodel.plan.target).name
    report = compare_nodes(graph, reference, checked(), name, converted)
    return report.with_files(against_runtimes(graph, given, asked)) if asked else report


def _target_of_graph(ir: Graph, own: Any) -> Any:
    """The target or backend that a graph was made for (`own` is the model's); None where only its name is known."""
    fused = any(node.op == backend.NAME and node.attributes["backend"] is not None for node in ir.nodes)
    if target_of(own).name == ir.target and (backend_of(own) is not None) == fused:
        return own
    return ir.target if not fused and ir.target in targets.names() else None


def _codes_of(graphdef: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A compiled function of (state, arrays, other arguments) that returns the output and the codes."""
    definition = Definition.of(graphdef)
    try:
        hash(definition)
    except TypeError:
        # A module with a dict or a list among its attributes cannot be hashed, so no cache can hold it.
        return jax.jit(functools.partial(_codes, definition), static_argnums=2)
    return functools.partial(_compiled_codes, definition)


def _codes(definition: Definition, state: Any, arrays: Any, rest: Any) -> tuple[Any, dict[str, Any]]:
    return nnx.merge(definition.graphdef, state).codes(*join_arguments(arrays, rest))


_compiled_codes = jax.jit(_codes, static_argnums=(0, 3))
"""Compiled once per model, however often and against however many targets the model is verified."""


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
