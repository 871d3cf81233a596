"""Keys of calls: two calls with equal keys become one function. A key contains everything but the names of the inputs.

Networks repeat themselves: the steps of a recurrent layer, the layers of a transformer. A kernel is traced and
translated once for all calls with one key.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.export.emit.onnx.views import View


def key_of(value: Any) -> Any:
    """A value as a hashable key; equal keys are equal values, apart from the names of views.

    Raises:
      TypeError: a kind of value that this function does not know.
    """
    if isinstance(value, View):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return "view", key_of({name: part for name, part in fields.items() if name != "name"})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = tuple((field.name, key_of(getattr(value, field.name))) for field in dataclasses.fields(value))
        return type(value).__name__, parts
    if isinstance(value, Mapping):
        # in their order, because it decides the order of a function's inputs
        return "mapping", tuple((name, key_of(part)) for name, part in value.items())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(key_of, value))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return "array", array.dtype.str, array.shape, hashlib.sha256(np.ascontiguousarray(array)).digest()
    if value is None or isinstance(value, str | bool | int | float):
        # 1, 1.0 and True are equal but must have different keys
        return type(value).__name__, repr(value)
    raise TypeError(f"expected a field of a call, got {type(value).__name__}.")
