"""Matches the keys of a recipe's overrides to tensors, and finds the axes along which a weight has scales."""

import re
from collections.abc import Iterator, Mapping

from qjax import ops
from qjax.numerics.affine import QSpec
from qjax.numerics.qspec import dividing_group
from qjax.ops.embed_rows import check_rows
from qjax.ops.facts import ProductFacts
from qjax.tracing import Place


def ancestors(path: str) -> Iterator[str]:
    """The path itself and its parents, except for the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def matches(key: str | type, paths: tuple[str, ...], classes: tuple[type, ...]) -> bool:
    """Whether a key selects one of the paths (as a regular expression), or one of the classes or of their bases."""
    if isinstance(key, str):
        return any(re.fullmatch(key, path) for path in paths)
    return any(issubclass(cls, key) for cls in classes)


def paths_of(key: str | type, types: Mapping[str, type]) -> frozenset[str]:
    """The modules that a key matches by themselves, not through a parent."""
    return frozenset(path for path, cls in types.items() if matches(key, (path,), (cls,)))


def can_scale_rows(place: Place) -> bool:
    """Whether a weight is a lookup table, whose rows may each have their own scale."""
    op = _op_of(place)
    return op is not None and op.by_row is not None and not place.integers


def _op_of(place: Place) -> ops.Op | None:
    """The operation that reads a weight or produces an activation; None for inputs of the program."""
    return ops.get(place.op) if place.op in ops.names() else None


def _with_groups(spec: QSpec, place: Place) -> QSpec:
    """The spec with groups if this weight can have them, otherwise with a scale per output channel; see `QSpec`."""
    if spec.group_size is None:
        return spec
    op, rank = _op_of(place), len(place.shape)
    axis = spec.group_axis % rank if rank else 0
    if op is not None and op.scales_rows:
        size = dividing_group(spec.group_size, place.shape[axis])
        return spec.replace(group_size=size, group_axis=0 if size is None else axis)
    summed = [own for own in range(rank) if own not in place.axes]
    size = None
    if isinstance(op, ProductFacts) and op.groups_scales and len(summed) == 1 and axis in (0, summed[0]):
        size = dividing_group(spec.group_size, place.shape[summed[0]])
    if size is None:
        return spec.replace(group_size=None, group_axis=0, axis=-1 if spec.axis is None else spec.axis)
    return spec.replace(group_size=size, group_axis=summed[0])


def weight_spec(spec: QSpec, place: Place) -> QSpec:
    """The spec with the axes along which this weight has scales.

    Raises:
      ValueError: this weight cannot have scales along the axes that the spec asks for.
    """
    op = _op_of(place)
    if op is not None and op.scales_rows:
        check_rows(spec, place.shape, place.name)
    spec = _with_groups(spec, place)
    if op is not None and op.scales_rows:
        return spec
    if spec.axis is None:
        return spec
    axes = place.axes
    if spec.axis != -1:
        rank = len(place.shape)
        asked = (spec.axis,) if isinstance(spec.axis, int) else spec.axis
        if any(not -rank <= axis < rank for axis in asked):
            raise ValueError(
                f"Quantizer {place.name!r}: expected an axis of a tensor of shape {place.shape}, from {-rank} to "
                f"{rank - 1}, got axis={spec.axis}. Use axis=-1 for every output channel of any layer."
            )
        asked = tuple(sorted(axis % rank for axis in asked))
        if not set(asked) <= set(axes):
            raise ValueError(
                f"Quantizer {place.name!r}: expected scales along the output channels, axes {axes} of shape "
                f"{place.shape}; got axis={spec.axis}. Use axis=-1 for every output channel of any layer."
            )
        axes = asked
    return spec.replace(axis=axes or None)
