"""Converts a quantized model to its integer graph: traces at two batch sizes, lowering, and the target's constants."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.assign import assign
from qjax.assign.backend import backend_of, target_of
from qjax.graph import state as states
from qjax.graph.ir import Graph
from qjax.graph.structure import Call, describe, describe_arguments, join_arguments, split_arguments
from qjax.graph.unsupported import unsupported
from qjax.layers import (
    Traced,
    TraceError,
    check_any_batch,
    check_nothing_drawn,
    describe_batch_of_one,
    positional,
    trace,
)
from qjax.lower import ConversionError, quantized_graph
from qjax.model.finite import check_finite
from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.numerics.affine import QParams
from qjax.numerics.meshes import automatic, explicit_mesh, untyped, zeros_with_batch
from qjax.ops.formulas import check_target
from qjax.support.batches import batch_size
from qjax.support.user_frames import users_level
from qjax.tracing import Annotation, Place

Batch: TypeAlias = Literal["free", "fixed"]
BATCH = "batch"
"""The key of a graph's metadata that is "fixed" where the graph accepts the sample's batch size only."""


def graph_of(
    qmodel: QuantizedModel,
    args: tuple[Any, ...],
    target: Any,
    batch: Batch | None = None,
    state: states.Asked | None = None,
    *,
    checked: bool = False,
) -> Graph:
    """Build the graph that `qjax.convert` returns, from concrete or from traced numbers.

    batch, state: see `qjax.convert`. checked: whether this model was converted before, so that no warning is repeated.

    Raises:
      ConversionError: something has no integer form.
    """
    rounding = target_of(target)
    check_target(rounding)
    plan, quantizers = qmodel.plan, dict(qmodel.plan.quantizers)
    values = qmodel.quantizer_values()
    model = evaluation_copy(qmodel.model)
    seen: dict[tuple[str, tuple[int, ...]], QParams] = {}

    def params_of(place: Place, step: tuple[int, ...], x: Any) -> QParams:
        if place.name not in quantizers:
            # The sample's own trace has been checked already, so this trace is the one on the larger batch.
            raise ConversionError(
                "the model runs operations on a larger batch that it doesn't run on the sample's batch "
                f"({place.name!r}), as a scan or a loop over the examples does",
                "A graph has one structure for every batch: treat all examples at once, and scan or loop over another "
                'axis. Or take the sample\'s batch only: convert(..., batch="fixed").',
                where=place.location,
            )
        q, own = quantizers[place.name], values[place.name]
        if step and place.name not in plan.shared:
            own = {name: value[step] for name, value in own.items()}
        if not q.follows_tensor:
            return q.qparams(own, x)
        # The second trace has shapes but no numbers, so reuse the parameters that the first one derived from the
        # weight.
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
    place = None if state is None else _locate_state(state, model, args, traced)
    concrete = not any(isinstance(x, Tracer) for x in traced.args)
    second = None
    if batch != "fixed" and _have_a_batch(arrays, traced.names, batch, said=checked):
        second = _trace_second_batch(model, read, (arrays, rest), traced, batch)
    programs = (traced.read,) if second is None else (traced.read, second[0].read)
    if concrete:
        _as_conversion_error(check_nothing_drawn, programs)
    other = None
    if second is not None:
        larger, larger_annotation, _ = second
        shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in larger.args]
        other = larger.results, larger_annotation, shapes
    sizes = (0, 0) if second is None else second[2]
    names = traced.names[len(traced.names) - len(arrays) :]
    with automatic(explicit_mesh(traced.args)):
        own, values = untyped((traced.args, values))
        quantized = quantized_graph(traced.results, annotation, own, traced.names, params_of, other, sizes)
        if place is not None:
            quantized = _share_quantizers(quantized, place, names, args, traced)
        graph = assign(quantized, rounding)
    if concrete and second is not None and not checked:
        _as_conversion_error(check_any_batch, model, args, programs, sizes)
        if 1 not in sizes and (said := describe_batch_of_one(model, args, traced.read, sizes[0])) is not None:
            warnings.warn(
                f"{said}. The graph does on every batch what the model does on a batch of {sizes[0]}. Write the model "
                "without special cases for the batch size, and name the axis to squeeze, as in jnp.squeeze(x, -1).",
                stacklevel=users_level(),
            )
    assert graph.call is not None
    if not graph.outputs:
        raise ConversionError("The model returns nothing that depends on its arguments; a graph would be empty.")
    call = Call(tuple(jax.tree.structure(x) for x in args), traced.returned, graph.call.leaves)
    order = {name: position for position, name in enumerate(graph.inputs)}
    arguments = describe_arguments(args, [order.get(name) for name in names])
    metadata: dict[str, Any] = {"producer": "qjax", "input_structure": arguments}
    if place is not None:
        metadata[states.STATE] = [place.argument, place.result]
    if second is None:
        metadata[BATCH] = "fixed"
    if not any(isinstance(x, Tracer) for x in call.leaves):
        metadata["output_structure"] = describe(call.result(range(len(graph.outputs))))
    ranges = {order[known.name]: [known.low, known.high] for known in plan.integers if known.name in order}
    if ranges:
        metadata["integers"] = [ranges.get(index) for index in range(len(graph.inputs))]
    graph = graph.replace(metadata=metadata, call=call)
    backend = backend_of(target)
    return graph if backend is None else backend.partition(graph)


def _locate_state(state: states.Asked, model: nnx.Module, args: tuple[Any, ...], traced: Traced) -> states.Where:
    result = jax.tree.unflatten(traced.returned, traced.results.outputs)
    return states.locate(state, positional(model), args, result)


def _share_quantizers(
    quantized: Graph, place: states.Where, names: Sequence[str], args: tuple[Any, ...], traced: Traced
) -> Graph:
    """The quantized graph in which the next state has the same quantizers as the state."""
    assert quantized.call is not None
    counts = [len(split_arguments((x,))[0]) for x in args]
    first = sum(counts[: place.argument])
    before = names[first : first + counts[place.argument]]
    leaves = jax.tree.leaves(place.part(jax.tree.unflatten(traced.returned, quantized.call.leaves)))
    return states.share_quantizers(quantized, before, leaves)


def check_batch(what: str, batch: Any) -> None:
    """Raise a ValueError for anything but a `Batch`."""
    if batch is not None and batch not in get_args(Batch):
        raise ValueError(f'{what}: expected batch="free", batch="fixed" or None, got {batch!r}.')


def _trace_second_batch(
    model: nnx.Module, read: Any, given: tuple[list[Any], Any], traced: Traced, batch: Batch | None
) -> tuple[Traced, Annotation, tuple[int, int]] | None:
    """Trace the model on a second batch size: the trace, its annotation, and both sizes.

    None where the state of the model fixes the batch size.

    Raises:
      ConversionError: the model fails on the second size, and it holds no state that explains the failure.
    """
    arrays, rest = given
    size = batch_size(tuple(arrays))
    # A slice such as h[:2] returns a batch of one or two unchanged, so choose a size larger than most such slices.
    other_size = 2 * size if size > 2 else 64
    larger = [zeros_with_batch(a, other_size) if a.ndim else a for a in arrays]
    try:
        return *read(join_arguments(larger, rest)), (size, other_size)
    except (TypeError, ValueError) as error:
        if batch is None and _holds_batch(model, size):
            return None
        raise ConversionError(
            f"the model takes a batch of {size}, but fails on one of {other_size}, although a graph must accept any "
            f"batch: {str(error).rstrip('.')}",
            'Convert for the sample\'s batch size only: convert(..., batch="fixed").',
        ) from error


def _holds_batch(model: nnx.Module, size: int) -> bool:
    """Whether a variable that is not a parameter (a cache, a memory) has one row per example."""
    state = nnx.state(model, lambda path, value: not isinstance(value, nnx.Param))
    return any(np.ndim(leaf) and np.shape(leaf)[0] == size for leaf in jax.tree.leaves(state))


def _as_conversion_error(check: Callable[..., None], *args: Any) -> None:
    """Run a check of the traces, and report its errors as errors of the conversion."""
    try:
        check(*args)
    except TraceError as error:
        raise ConversionError(error.why, error.cure, what=error.what, where=error.where) from error


def _check_stateless(traced: Traced, annotation: Annotation) -> None:
    """Raise where a call writes variables that depend on its arguments, because a graph only computes results."""
    made = {value: eqn for eqn in traced.program.equations for value in eqn.outputs}
    for name, value in traced.written():
        if value not in annotation.constants and value.constant is None:
            if value in made and len(made[value].outputs) > 1:
                # For a layer that updates its own statistics, this error names the layer and the cure.
                raise unsupported(made[value])
            raise ConversionError(
                f"The call writes the variable {name!r} from its arguments, but a graph keeps no state between calls",
                "qjax.stateful(model, nnx.Cache) turns the variables of a type into an argument and a result of the "
                "call. Or turn the writing off in evaluation mode.",
            )


def _have_a_batch(arrays: list[Any], names: Sequence[str], batch: Batch | None, *, said: bool) -> bool:
    """Whether all arguments share one first axis, the batch; if not, the graph is fixed to their shapes.

    said: whether the user has been told already.
    """
    names = names[len(names) - len(arrays) :]
    sizes = {name: int(a.shape[0]) for name, a in zip(names, arrays, strict=True) if a.ndim}
    if len(set(sizes.values())) == 1:
        return True
    found = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "no argument is an array with an axis"
    why = f"convert: the first axis of every argument is the batch, but {found}."
    if batch == "free":
        raise ValueError(
            f"{why} Make what belongs to no example (for instance a mask that all examples share) a constant of the "
            'model, or repeat it for every example. Or fix the sample\'s shapes: convert(..., batch="fixed").'
        )
    if not said:
        warnings.warn(
            f"{why} So the graph takes these shapes only. For a graph of any batch, make what belongs to no example "
            "(for instance a mask that all examples share) a constant of the model, or repeat it for every example. If "
            'you mean this one size, pass convert(..., batch="fixed").',
            stacklevel=users_level(),
        )
    return False
