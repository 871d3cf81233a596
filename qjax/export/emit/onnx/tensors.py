"""Tensors and attributes of a graph in ONNX; what ONNX has no field for is JSON under the key "qjax".

Initialisers are integers only. A scale is a float, so it is in the metadata of its tensor. A node's attributes are
integers, lists of integers and text; all others are JSON text.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from qjax.export import document, strict_json
from qjax.export.artifact import packing
from qjax.export.emit.onnx.builder import element_type
from qjax.graph.ir import Tensor

KEY = "qjax"


def put(owner: Any, value: Any, key: str = KEY) -> None:
    """Set one entry of a proto's metadata, a JSON value."""
    entry = owner.metadata_props.add()
    entry.key, entry.value = key, document.text(value)


def taken(owner: Any, key: str = KEY) -> Any:
    """The JSON value that `put` set, or None."""
    found = [entry.value for entry in owner.metadata_props if entry.key == key]
    return strict_json.loads(found[0], f"The metadata {key!r}") if found else None


def initializer(
    name: str, tensor: Tensor, order: Sequence[int] | None = None, *, plain: bool = False
) -> onnx.TensorProto:
    """A constant; unless `plain`, codes of at most 4 bits become INT4 or UINT4, two to a byte."""
    order = tuple(range(len(tensor.shape))) if order is None else tuple(order)
    # transpose leaves a scalar a scalar, but ascontiguousarray would not
    value = np.asarray(tensor.value).transpose(order)
    value = np.ascontiguousarray(value).reshape(value.shape)
    kind = None if plain else narrow_type(tensor)
    proto = numpy_helper.from_array(value if kind is None else value.astype(kind), name)
    put(proto, document.of_tensor(tensor, order))
    return proto


def narrow_type(tensor: Tensor) -> Any:
    """The 4-bit dtype that fits a constant's codes, or None."""
    if packing.packed_bits(tensor.dtype, tensor.quantization) is None or not tensor.shape:
        return None
    assert tensor.quantization is not None
    return ml_dtypes.int4 if tensor.quantization.qmin < 0 else ml_dtypes.uint4


def value_info(name: str, dtype: str, sizes: Sequence[int | str], facts: Any = None) -> onnx.ValueInfoProto:
    """The type of a computed tensor; a size that is text is the name of a free one."""
    info = helper.make_tensor_value_info(name, element_type(dtype), sizes)
    if facts is not None:
        put(info, facts)
    return info


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
        where = f"The attribute {attribute.name!r}"
        return strict_json.loads(text[len(_JSON) :], where) if text.startswith(_JSON) else text
    raise ValueError(f"attribute {attribute.name!r}: expected an integer, a list of integers or text.")
