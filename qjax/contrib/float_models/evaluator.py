"""Evaluates the nodes of a float file with JAX; what depends on no input is computed in NumPy during the trace.

Shapes are numbers during a trace, so chains of Shape, Gather, Concat and Reshape become constants, for any batch.

ONNX keeps the channels of images on axis 1. Runtimes for devices keep them last, and so does the evaluator: an operator
on images moves the channels once (`Last`), and the following ones pass such an array on until one needs the order of
the file. A transposition of the file between the two orders costs nothing then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.contrib.float_models.graph import (
    FREE_BATCH,
    OPERATORS,
    Call,
    FloatGraph,
    Last,
    Operator,
    clean_scope,
    in_file_order,
    is_known,
    is_traced,
    shape_of,
    to_first,
    to_last,
)
from qjax.support.errors import Unsupported

_NARROW = {"int64": np.int32, "uint64": np.uint32}


Shapes = dict[str, tuple[tuple[int, ...], ...]]
"""Output of a node -> the shapes of the node's inputs; "" -> those of the model's outputs."""


def evaluate(
    graph: FloatGraph,
    values: Mapping[str, Any],
    exported: Shapes | None = None,
    *,
    record: Shapes | None = None,
    updates: dict[str, Any] | None = None,
) -> list[Any]:
    """The outputs of a graph.

    Args:
      values: the inputs and parameters by name, in the order of the file. exported: what `record` held after a call at
        the batch size that the file fixes, None if this call has it. record: filled with the shapes of all inputs.
        updates: None in evaluation; in training it is filled with the new statistics of norms.

    Raises:
      Unsupported: a node cannot be computed; the error names it.
    """
    known: dict[str, Any] = {**graph.constants, **values}
    uses: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.inputs:
            uses[name] = uses.get(name, 0) + 1
    for port in graph.outputs:
        uses[port.name] = uses.get(port.name, 0) + 1
    for node in graph.nodes:
        given = [known[name] if name else None for name in node.inputs]
        if record is not None:
            record[node.outputs[0]] = tuple(shape_of(value) for value in given)
        with jax.named_scope(clean_scope(node.name)):
            call = Call(node, exported=(exported or {}).get(node.outputs[0], ()), training=updates is not None)
            found = apply(call, given)
        if updates is not None:
            updates.update(call.updates)
        for name, value in zip(node.outputs, found, strict=False):
            if name:
                known[name] = value
        for name in node.inputs:
            if name:
                uses[name] -= 1
                if not uses[name]:
                    known.pop(name, None)  # arrays of an eager call are freed as early as possible
    if record is not None:
        record[""] = tuple(shape_of(known[port.name]) for port in graph.outputs)
    return [device(in_file_order(known[port.name]), f"output {port.name!r}") for port in graph.outputs]


def apply(call: Call, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of one node, for inputs that are arrays or `Last`."""
    node = call.node
    own = OPERATORS[node.op]
    if own.on_last is not None and isinstance(inputs[0], Last):
        kept = own.on_last(call, inputs[0], *inputs[1:])
        if kept is not None:
            return [kept]
    # Other operators know images, but not images whose channels are split.
    inputs = [in_file_order(value) if isinstance(value, Last) and value.parts else value for value in inputs]
    given = [
        _static(call, v) if v is not None and (i in own.static or -1 in own.static) else v for i, v in enumerate(inputs)
    ]
    if all(value is None or is_known(value) for value in given):
        return _in_numpy(own, call, given)
    given = _laid_out(own, call, given)
    given = [
        device(v, node.title) if v is not None and i not in own.static and -1 not in own.static else v
        for i, v in enumerate(given)
    ]
    found = _run(own, call, given)
    return [Last(v) if call.last and getattr(v, "ndim", 0) > 2 else v for v in found]


def _run(own: Operator, call: Call, given: Sequence[Any]) -> Sequence[Any]:
    try:
        found = own.function(call, *given)
    except Unsupported:
        raise
    except (TypeError, ValueError, IndexError, KeyError, ZeroDivisionError, OverflowError, AttributeError) as error:
        shapes = ", ".join("none" if v is None else f"{v.dtype}{list(v.shape)}" for v in given)
        reason = str(error).splitlines()[0][:200].rstrip(".") if str(error) else type(error).__name__
        cure = "If these are not the shapes that you expect, check the arguments of the call; else the file is damaged"
        if call.exported:
            cure = f"The file fixes the batch at another size than this call's. {FREE_BATCH}"
        raise call.refuse(
            f"it does not accept inputs {shapes}: {reason}",
            cure,
        ) from error
    return found if isinstance(found, (tuple, list)) else [found]


def _in_numpy(own: Operator, call: Call, given: Sequence[Any]) -> list[Any]:
    """The outputs of a node whose inputs are all known, as NumPy arrays."""
    if own.in_numpy:
        call.xp = np
        with np.errstate(all="ignore"):
            return [None if v is None else np.asarray(v) for v in _run(own, call, given)]
    ready = [
        device(v, call.node.title) if v is not None and i not in own.static and -1 not in own.static else v
        for i, v in enumerate(given)
    ]
    with jax.ensure_compile_time_eval():
        if own.layout == "last" and getattr(ready[0], "ndim", 0) > 2:
            ready[0], call.last = to_last(ready[0]), True
        found = _run(own, call, ready)
        ready = [None if v is None else np.asarray(to_first(v) if call.last and v.ndim > 2 else v) for v in found]
    # Known integers keep the file's 64 bits, which shapes and bounds use.
    wide = any(is_known(v) and v.dtype.name == "int64" for v in given)
    return [v.astype(np.int64) if wide and v is not None and v.dtype.name == "int32" else v for v in ready]


def _static(call: Call, value: Any) -> np.ndarray:
    """An input that decides shapes, as a NumPy array."""
    value = in_file_order(value)
    if is_traced(value):
        raise call.refuse(
            "a shape, an axis or another number that decides about shapes depends on an input of the model",
            "Export the model with this number as a constant (in PyTorch: int(...) of it, or a fixed size)",
        )
    return np.asarray(value)


def _laid_out(own: Operator, call: Call, given: list[Any]) -> list[Any]:
    """The inputs in the order that the operator takes; sets `call.last`."""
    first = given[0] if given else None
    if own.layout == "last":
        if isinstance(first, Last):
            call.last, first = True, first.array
        elif getattr(first, "ndim", 0) > 2:
            call.last, first = True, to_last(device(first, call.node.title))
        return [first, *(in_file_order(value) for value in given[1:])]
    if own.layout == "each" and any(isinstance(value, Last) for value in given):
        rank = max(_rank(value) for value in given if value is not None)
        if all(value.array.ndim == rank for value in given if isinstance(value, Last)):
            call.last = True
            return [None if value is None else _aligned(value, rank) for value in given]
    if own.layout == "axes" and isinstance(first, Last):
        call.last = True
        return [v if v is None or i in own.static else _aligned(v, first.array.ndim) for i, v in enumerate(given)]
    return [in_file_order(value) for value in given]


def _aligned(value: Any, rank: int) -> Any:
    """An operand that broadcasts against an image, in the order of the image."""
    if isinstance(value, Last):
        return value.array
    if np.ndim(value) == 0:
        return value
    xp = np if is_known(value) else jnp
    shape = (1,) * (rank - value.ndim) + tuple(value.shape)
    if sum(size != 1 for size in shape) <= 1:
        return xp.reshape(value, (shape[0], *shape[2:], shape[1]))
    return to_last(xp.reshape(value, shape), xp)


def _rank(value: Any) -> int:
    return value.array.ndim if isinstance(value, Last) else np.ndim(value)


def device(value: Any, where: str) -> Any:
    """A value as JAX takes it: 64-bit integers become 32-bit ones if they fit.

    Raises:
      Unsupported: they do not fit; or float64, which JAX computes only with `jax_enable_x64`.
    """
    if isinstance(value, Last):
        return Last(device(value.array, where), value.parts)
    if not is_known(value) or jax.config.jax_enable_x64:
        return value
    name = value.dtype.name
    if name in ("float64", "complex128"):
        raise Unsupported(
            f"{name}, which JAX computes only with 64-bit types",
            'Export the model in float32, or set jax.config.update("jax_enable_x64", True)',
            what=where,
        )
    if name in _NARROW:
        narrow = np.iinfo(_NARROW[name])
        if value.size and (value.min() < narrow.min or value.max() > narrow.max):
            raise Unsupported(
                f"integers from {value.min()} to {value.max()}, and JAX computes with 32 bits",
                'Export the model with 32-bit integers, or set jax.config.update("jax_enable_x64", True)',
                what=where,
            )
        return value.astype(_NARROW[name])
    return value
