"""Relates the labels of an equation's tensors, with one function for each operation (see `symmetries`).

Given labels of some tensors, a relation labels the others, or gives all of them the factor 1. A relation may be
stricter than needed, which only leaves fewer factors free. Where an operation mixes elements along an axis, or the
data select them, the labels therefore do not change along it.
"""

# The state of the search is passed in, because its class imports this table.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.contrib.post_training.labels import Labels, placed, reshaped
from qjax.tracing import Equation, Value

Relation = Callable[[Any, Equation], None]
"""A function of (the search, an equation of which some tensors have labels)."""

RELATIONS: dict[str, Relation] = {}
"""Name of a primitive -> its relation."""


def _of(*names: str) -> Callable[[Relation], Relation]:
    def register(relation: Relation) -> Relation:
        RELATIONS.update(dict.fromkeys(names, relation))
        return relation

    return register


def _same(search: Any, labels: Labels, axes: Sequence[int]) -> Labels:
    """Make the labels equal along axes, which get the length 1."""
    for axis in axes:
        if labels.shape[axis] > 1:
            first = labels.take([0], axis)
            search.union.join(labels, first)
            labels = first
    return labels


def _mapped(
    search: Any, source: Value, target: Value, pairs: Sequence[tuple[int, int]], *, inverse: bool = False
) -> None:
    """Give two tensors the same labels along pairs of axes, and constant labels along all others."""
    for a, b, axes in ((source, target, pairs), (target, source, [(j, i) for i, j in pairs])):
        if a in search.labels:
            others = [axis for axis in range(len(a.shape)) if axis not in {i for i, _ in axes}]
            labels = _same(search, search.labels[a], others)
            search.visit(b, placed(-labels if inverse else labels, len(b.shape), axes))


def _fitting(search: Any, labels: Labels, value: Value) -> Labels:
    """Labels of a broadcast result, reduced to an operand of it."""
    if not value.shape:
        return _same(search, labels, range(labels.ndim)).reshape(())
    return _same(search, labels, [axis for axis, size in enumerate(value.shape) if size == 1])


def _spread(labels: Labels, rank: int) -> Labels:
    """Labels of an operand, extended to the broadcast result."""
    return labels if labels.ndim else labels.reshape((1,) * rank)


@_of(
    "abs", "convert_element_type", "copy", "dropout", "identity", "leaky_relu", "neg", "reduce_precision", "relu",
    "stop_gradient",
)  # fmt: skip
def _kept(search: Any, eqn: Equation) -> None:
    """f(x / s) = f(x) / s for s > 0."""
    data, result = eqn.inputs[0], eqn.outputs[0]
    if data.shape != result.shape:
        search.refuse(eqn, f"{eqn.primitive!r} reads it")
        return
    _mapped(search, data, result, [(axis, axis) for axis in range(len(data.shape))])


@_of("add", "sub", "add_any", "select_n")
def _sum(search: Any, eqn: Equation) -> None:
    """The terms of a sum, and the branches of a select, have the factors of the result."""
    terms = eqn.inputs[eqn.primitive == "select_n" :]
    (result,) = eqn.outputs
    for value in search.known([*terms, result]):
        labels = _spread(search.labels[value], len(result.shape))
        search.visit(result, labels)
        for term in terms:
            if term.constant is not None and not np.any(np.asarray(term.constant) != 0):
                continue
            search.visit(term, _fitting(search, labels, term))


@_of("mul", "div")
def _multiplied(search: Any, eqn: Equation) -> None:
    """One factor of a product, or the dividend, has the factors of the result; the other has none.

    If there are several, it is the parameter or the operand that depends on layers, not the sines of rotary embeddings.
    """
    (result,), given = eqn.outputs, search.known(eqn.inputs)
    if eqn not in search.chosen:
        choice = [given[0]] if given else [v for v, fixed in zip(eqn.inputs, eqn.fixed, strict=True) if fixed]
        choice = [value for value in choice if value.constant is None]
        choice = choice or [value for value in eqn.inputs if search.from_layers(value)]
        taken = eqn.inputs[:1] if eqn.primitive == "div" else choice
        if len(taken) != 1 or eqn.inputs[0] is eqn.inputs[1]:
            search.refuse(eqn, "a product of two tensors reads it")
            return
        search.chosen[eqn] = taken[0]
    own = search.chosen[eqn]
    for value in eqn.inputs:
        if value is not own:
            search.pin(value, "a product of two tensors reads it")
            if value in search.made and search.made[value].primitive in ("normalize", "standardize"):
                search.scales[own] = None
    if own in search.labels:
        search.visit(result, _spread(search.labels[own], len(result.shape)))
    if result in search.labels:
        search.visit(own, _fitting(search, search.labels[result], own))


@_of("normalize", "standardize")
def _normalized(search: Any, eqn: Equation) -> None:
    search.refuse(eqn, "a normalization computes it, of which only the scale could absorb factors")


@_of("rms_norm", "layer_norm")
def _norm(search: Any, eqn: Equation) -> None:
    """The scale and bias of a norm absorb the factors of its result."""
    layer, (result,) = eqn.params.get("layer"), eqn.outputs
    if layer is None:
        search.refuse(eqn, "a norm without a scale computes it")
        return
    axes, names = dict(layer.attributes)["feature_axes"], layer.operands
    own = {name: eqn.inputs[names.index(name)] for name in ("scale", "bias") if name in names}
    fits = all(len(value.shape) == len(axes) for value in own.values())
    if "scale" not in own or not fits:
        search.refuse(eqn, "a norm without a scale computes it")
        return
    for value in eqn.inputs:
        if value not in own.values():
            search.pin(value, "a norm reads it")
    for value in own.values():
        search.scales[value] = None
        _mapped(search, value, result, list(enumerate(axes)))


@_of("transpose")
def _transposed(search: Any, eqn: Equation) -> None:
    order = eqn.params["permutation"]
    _mapped(search, eqn.inputs[0], eqn.outputs[0], [(int(a), b) for b, a in enumerate(order)])


@_of("broadcast_in_dim")
def _broadcast(search: Any, eqn: Equation) -> None:
    data, result = eqn.inputs[0], eqn.outputs[0]
    axes = [(a, int(b)) for a, b in enumerate(eqn.params["broadcast_dimensions"])]
    _mapped(search, data, result, [(a, b) for a, b in axes if data.shape[a] == result.shape[b]])


@_of("reshape", "squeeze", "expand_dims")
def _reshaped(search: Any, eqn: Equation) -> None:
    data, result = eqn.inputs[0], eqn.outputs[0]
    if eqn.params.get("dimensions") is not None and eqn.primitive == "reshape":
        search.refuse(eqn, "a reshape in another order reads it")
        return
    for a, b in ((data, result), (result, data)):
        if a in search.labels:
            search.visit(b, reshaped(search.labels[a], a.shape, b.shape))


def _block(search: Any, part: Value, whole: Value, starts: Sequence[int], steps: Sequence[int] | None = None) -> None:
    """`part` is a block of `whole`; the elements before and after it have separate labels."""
    rank = len(whole.shape)
    steps = [1] * rank if steps is None else steps
    ends = [start + (size - 1) * step + 1 for start, step, size in zip(starts, steps, part.shape, strict=True)]
    if whole not in search.labels:
        if part not in search.labels:
            return
        labels = search.labels[part]
        for axis, (start, step, end) in enumerate(zip(starts, steps, ends, strict=True)):
            if part.shape[axis] != whole.shape[axis]:
                labels = _embedded(search, labels, axis, (start, step, end), part.shape[axis], whole.shape[axis])
        search.visit(whole, labels)
    labels = search.labels[whole]
    index = tuple(
        slice(start, end, step) if labels.shape[axis] > 1 else slice(None)
        for axis, (start, step, end) in enumerate(zip(starts, steps, ends, strict=True))
    )
    search.visit(part, labels[index])


def _embedded(search: Any, labels: Labels, axis: int, at: tuple[int, int, int], size: int, whole: int) -> Labels:
    """The labels of a block, extended by new ones along an axis; at: its start, step and end.

    If those of the block are constant along the axis, such as along positions, so are those before and after it.
    """
    start, step, end = at
    shape, changes = [*labels.shape], labels.shape[axis] > 1

    def around(count: int) -> Labels:
        shape[axis] = count if changes else min(count, 1)
        one = search.union.fresh(shape)
        shape[axis] = count
        return np.broadcast_to(one, shape)

    shape[axis] = size
    inner = np.broadcast_to(labels, shape)
    if step > 1:  # the elements between the steps, too
        between = np.array(around(end - start))
        between[(slice(None),) * axis + (slice(None, None, step),)] = inner
        inner = between
    return np.concatenate([around(start), inner, around(whole - end)], axis)


@_of("slice")
def _sliced(search: Any, eqn: Equation) -> None:
    _block(search, eqn.outputs[0], eqn.inputs[0], eqn.params["start_indices"], eqn.params.get("strides"))


@_of("split", "concatenate")
def _joined(search: Any, eqn: Equation) -> None:
    split = eqn.primitive == "split"
    axis = eqn.params["axis" if split else "dimension"]
    parts, (whole,) = (eqn.outputs, eqn.inputs) if split else (eqn.inputs, eqn.outputs)
    # Twice, because the first labelled part decides the labels of the whole, which all parts then share.
    for _ in range(2):
        start = 0
        for part in parts:
            at = [start if i == axis else 0 for i in range(len(whole.shape))]
            if part.constant is None or whole in search.labels:
                _block(search, part, whole, at)
            start += part.shape[axis]


@_of("gather")
def _gathered(search: Any, eqn: Equation) -> None:
    """Rows selected by data: the labels are constant along the axes of selection."""
    (data, *_), (result,), params = eqn.inputs, eqn.outputs, eqn.params
    if params.get("fill_value"):
        search.refuse(eqn, "it is joined with a constant")
        return
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(data.shape)) if axis not in gone]
    pairs = list(zip(kept, numbers.offset_dims, strict=True))
    _mapped(search, data, result, [(a, int(b)) for a, b in pairs if sizes[a] == data.shape[a]])


@_of("reduce_sum")
def _summed(search: Any, eqn: Equation) -> None:
    data, axes = eqn.inputs[0], eqn.params["axes"]
    kept = [axis for axis in range(len(data.shape)) if axis not in axes]
    _mapped(search, data, eqn.outputs[0], [(a, b) for b, a in enumerate(kept)])


@_of("dot_general")
def _dot(search: Any, eqn: Equation) -> None:
    """A product passes factors on in one of three ways, which the first tensor with labels decides.

    | way | when |
    | --- | --- |
    | made | only the result has labels: the parameter among the operands absorbs them |
    | through | an operand has constant labels along the summed axes: the result has them, the other has none |
    | against | otherwise: the other operand has the inverse labels along the summed axes, and the result has none |
    """
    if eqn.inputs[0] is eqn.inputs[1]:
        search.refuse(eqn, "a product with itself reads it")
        return
    if eqn not in search.chosen:
        way = _way(search, eqn)
        if way is None:
            search.refuse(eqn, "a product of two tensors reads it")
            return
        search.chosen[eqn] = way
    way, side = search.chosen[eqn]
    own, other, (result,) = eqn.inputs[side], eqn.inputs[1 - side], eqn.outputs
    contracted, batched = eqn.params["dimension_numbers"]
    batch = [(int(axes), b) for b, axes in enumerate(batched[side])]
    if way == "against":
        search.pin(result, "a product of it needs factors of its own")
        together = [*zip(batched[side], batched[1 - side]), *zip(contracted[side], contracted[1 - side])]  # noqa: B905
        _mapped(search, own, other, [(int(a), int(b)) for a, b in together], inverse=True)
        return
    search.pin(other, "a product reads it that passes on the factors of the other operand")
    free = [i for i in range(len(own.shape)) if i not in (*contracted[side], *batched[side])]
    others = len(other.shape) - len(contracted[0]) - len(batched[0])
    first = len(batch) + (others if side else 0)
    _mapped(search, own, result, [*batch, *((axis, first + b) for b, axis in enumerate(free))])


def _way(search: Any, eqn: Equation) -> tuple[str, int] | None:
    """The way, and the operand that decides it."""
    given = [side for side in (0, 1) if eqn.inputs[side] in search.labels]
    if len(given) == 2:
        return "against", 0
    if not given:
        fixed = [side for side in (0, 1) if eqn.fixed[side]]
        return ("made", fixed[0]) if len(fixed) == 1 else None
    (side,) = given
    labels = search.union.found(search.labels[eqn.inputs[side]])
    summed = [int(axis) for axis in eqn.params["dimension_numbers"][0][side]]
    changes = any(np.any(labels != labels.take([0], axis)) for axis in summed)
    return ("against" if changes or _meets_function(search, eqn.outputs[0]) else "through"), side


def _meets_function(search: Any, value: Value) -> bool:
    """Whether anything but moves, sums and products reads a tensor, as a softmax reads the scores."""
    todo, seen = [value], set[Value]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        for eqn in search.readers.get(one, ()):
            if eqn.primitive not in RELATIONS:
                return True
            if eqn.primitive not in ("dot_general", "normalize", "standardize", "rms_norm", "layer_norm"):
                todo += eqn.outputs
    return False
