"""The attributes of nodes: an operation declares them as typed dictionaries, and every graph is checked against them.

A node stores its attributes as JSON values, because files do. `Op.fields` declares those of both stages of a graph,
`Op.prepared` those that a target adds. An undeclared attribute is an error. Otherwise a typing mistake in a reader
would be an attribute that no kernel reads, and a forgotten attribute a KeyError in the middle of a run.
"""

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NewType, NotRequired, TypedDict

import numpy as np

from qjax.support.names import did_you_mean

Natural = NewType("Natural", int)
"""An integer from 0 on: an axis, a size, a count. Negative values have no meaning to emitters and runtime kernels."""
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
    """The attributes that every product has in addition to its own layout.

    weight: which operand of the equation is the weight, None for a product of two activations. channels: [axis of the
    result, axis of the weight] for the axes along which the weight's scales vary. rank: of the equation's result.
    permutation: the order of its axes in the node's output, None if it is the same.
    """

    weight: Natural | None
    channels: list[Pair]
    rank: Natural
    permutation: list[Natural] | None


class OfTarget(TypedDict):
    """What a target may add to a node that computes codes from an accumulator, or from rows.

    rule: how a product with weights is requantized. formula: a runtime's own operator. dynamic: how rows are quantized
    at run time. rounding: of an exact sum. accumulator: its register, if it is not exact (`Accumulator.to_json`).
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

    stated: the typed dictionaries that together declare them. possible: those of attributes that may be present or not.
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
    """NumPy's numbers (a user's own axis may be one) as Python's; also inside lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in typing.cast(Any, value)]
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has a type. A bool is no int; an int counts as a float, as JSON does not tell them apart."""
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
