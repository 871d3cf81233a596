"""Converts a plan of quantizers, and the structure of a sample, to JSON values for the files of Keras models."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from qjax import calibration, targets
from qjax.calibration.learned import Quantizer
from qjax.model.quantized_model import Plan, Product
from qjax.numerics.affine import QSpec
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic
from qjax.support.batches import brief
from qjax.tracing import Integers

_OBSERVERS = tuple(type(calibration.get(name)) for name in calibration.names() if name != "callback")
_CLASSES = {
    cls.__name__: cls for cls in (Plan, Product, Quantizer, QSpec, Dynamic, WeightFormat, Integers, *_OBSERVERS)
}
"""The only classes that a file may name; reading creates no objects of other classes."""


def encode(value: Any) -> Any:
    """Convert a value of a plan or a sample for `json`. Of arrays only shape and dtype are stored.

    Raises:
      TypeError: the value has a class of the user's own, such as an observer with a function.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [encode(item) for item in cast("list[Any]", value)]}
    if isinstance(value, frozenset):
        return {"frozenset": sorted(cast("frozenset[str]", value))}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in cast("Mapping[Any, Any]", value).items()]}
    if isinstance(value, (jax.Array, np.ndarray)):
        return {"array": [list(value.shape), str(value.dtype)]}
    if isinstance(value, targets.Target) and value.name in targets.names() and value == targets.get(value.name):
        return value.name
    if _CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": type(value).__name__, "fields": fields}
    raise TypeError(
        f"save: a .keras file cannot hold {brief(value)} of the recipe. Use the names of targets, methods and "
        "observers; or save_weights, and quantize again with this recipe before load_weights."
    )


def decode(value: Any) -> Any:
    """Undo `encode`; arrays become zeros.

    Raises:
      ValueError: the value is not one that `encode` writes.
    """
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    if given.get("class") in _CLASSES:
        return _CLASSES[given["class"]](**{name: decode(item) for name, item in given["fields"].items()})
    kind, items = next(iter(given.items())) if len(given) == 1 else ("", [])
    if kind == "array":
        return jnp.zeros(*items)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    if kind in ("tuple", "list", "frozenset"):
        return {"tuple": tuple, "list": list, "frozenset": frozenset}[kind](map(decode, items))
    raise ValueError(f"load: expected a plan that this version of qjax has saved, got {brief(given)}.")
