"""A node's attributes as ONNX attributes: integers, lists of integers and text directly, others as JSON text."""

import json
from typing import Any

import onnx
from onnx import AttributeProto, helper

from qjax.export import document

_JSON = "json:"


def encoded(name: str, value: Any) -> onnx.AttributeProto:
    """One attribute."""
    if type(value) is int or (type(value) is str and not value.startswith(_JSON)):
        return helper.make_attribute(name, value)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):  # pyright: ignore[reportUnknownVariableType]
        return helper.make_attribute(name, list(value))  # pyright: ignore[reportUnknownArgumentType]
    return helper.make_attribute(name, _JSON + document.text(value))


def decoded(attribute: onnx.AttributeProto) -> Any:
    """The inverse. Raises ValueError for anything that `encoded` does not write."""
    if attribute.type == AttributeProto.INT:
        return attribute.i
    if attribute.type == AttributeProto.INTS:
        return list(attribute.ints)
    if attribute.type == AttributeProto.STRING:
        text = attribute.s.decode()
        return json.loads(text[len(_JSON) :]) if text.startswith(_JSON) else text
    raise ValueError(f"attribute {attribute.name!r}: expected an integer, a list of integers or text.")
