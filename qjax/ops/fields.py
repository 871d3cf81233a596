"""The attributes of a node: an operation states them as typed dictionaries, and every graph is checked against them.

A node holds its attributes as JSON values, because files do. `Op.fields` names those of both stages of a graph,
`Op.prepared` those that a target adds. What is not stated is an error: a typing mistake in a reader would otherwise be
an attribute that no kernel reads, and a forgotten attribute a KeyError in the middle of a run.
"""

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NewType, NotRequired, TypedDict

import numpy as np

from qjax.support.names import did_you_mean

Natural = NewType("Natural", int)
"""An integer from 0 on: an axis, a size, a count. Emitters and kernels of runtimes read none from the end."""
Pair = list[Natural]


class NoFields(TypedDict):
    """The attributes of an operation that has none."""


class Axis(TypedDict):
    """axis: the one axis along which the operation works, from 0."""

    axis: Natural


class Axes(TypedDict):
    """axes: those that are reduced, from 0."""

    axes: list[Natural]


class Product(TypedDict):
    """What every product has beside its own layout.

    weight: which operand of the equation is the weight, None for a product of two activations.
    channels: [axis of the result, axis of the weight] for the axes along which the weight's scales run.
    rank: of the equation's result. permutation: the order of its axes in the node's output, None if they stay.
    """

    weight: Natural | None
    channels: list[Pair]
    rank: Natural
    permutation: list[Natural] | None


class OfTarget(TypedDict):
    """What a target may add to a node that makes codes of an accumulator, or of rows.

    rule: of the requantization of a product with weights. formula: that of a runtime's own operator.
    dynamic: that of rows that get codes at run time. rounding: of an exact sum.
    accumulator: its register, where it is not exact (`Accumulator.to_json`).
    """

    rule: NotRequired[str]
    formula: NotRequired[str]
    dynamic: NotRequired[str]
    rounding: NotRequired[str]
    accumulator: NotRequired[list[Any]]


class Rounded(TypedDict):
    """rounding: of the exact sum, see `numerics.rounding.Rounding`."""

    rounding: str


OF_TARGETS = tuple(OfTarget.__annotations__)
"""Attributes that only a target sets; a quantized graph has none of them."""


def problem(stated: tuple[Any, ...], given: Mapping[str, Any], possible: tuple[Any, ...] = ()) -> str | None:
    """What is wrong with a node's attributes, or None.

    stated: the typed dictionaries that together name them. possible: of attributes that may be there, all or some.
    """
    fields = {name: (kind, False) for name, (kind, _) in _fields_of(possible).items()} | _fields_of(stated)
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            return f"has no attribute {name!r}.{did_you_mean(name, fields)} Its attributes: {known}."
        if not fits(value, fields[name][0]):
            return f"attribute {name!r}: expected {described(fields[name][0])}, got {value!r}."
    lacking = sorted(name for name, (_, needed) in fields.items() if needed and name not in given)
    return f"lacks the attribute {lacking[0]!r}, {described(fields[lacking[0]][0])}." if lacking else None


@functools.cache
def _fields_of(stated: tuple[Any, ...]) -> dict[str, tuple[Any, bool]]:
    """name -> (type, whether it must be there)."""
    found: dict[str, tuple[Any, bool]] = {}
    for kind in stated:
        hints = typing.get_type_hints(kind)
        found |= {name: (hint, name in kind.__required_keys__) for name, hint in hints.items()}
    return found


def plain(value: Any) -> Any:
    """Numbers of numpy, which a user's own axis may be, as Python's; lists of them too."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in typing.cast(Any, value)]
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type. A bool is no int; an int is a float, as JSON does not tell them apart."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in arguments)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(fits(item, arguments[0]) for item in typing.cast(Any, value))
    if kind is float:
        return type(value) in (int, float)
    if kind is Natural:
        return type(value) is int and value >= 0
    return type(value) is kind


def described(kind: Any) -> str:
    """A type in words, for errors."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(described(choice) for choice in arguments)
    if origin is list:
        return f"a list of {described(arguments[0])}"
    words = {
        int: "integer",
        Natural: "integer from 0 on",
        float: "number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    return words.get(kind, "JSON value")
