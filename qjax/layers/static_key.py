"""Keys of what was traced or compiled for a module: modules with equal keys have equal programs.

    Definition.of(nnx.split(Net(scale=2))[0]) != Definition.of(nnx.split(Net(scale=2.0))[0])

`GraphDef` compares its values with ==, which treats 1, 1.0 and True as equal, and so does `nnx.jit`. `key` is stricter
still: a value that can be changed in place (a config object, a function whose closure holds one) has no key, so a
module that holds one is traced again in each call.
"""

import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Hashable, Mapping
from typing import Any, cast

import jax
import numpy as np
from flax import linen, nnx


@dataclasses.dataclass(frozen=True)
class Definition:
    """A `GraphDef` as a key. types: the types of its attributes, which == does not distinguish."""

    graphdef: Any
    types: Hashable

    @classmethod
    def of(cls, graphdef: Any) -> "Definition":
        """The key of a definition; it can be hashed only if the definition can."""
        values = (entry.value for _, entry in graphdef.attributes if hasattr(entry, "value"))
        return cls(graphdef, tuple(_types(value) for value in values))


def _types(value: Any) -> Hashable:
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(_types(item) for item in cast("tuple[Any, ...]", value))
    if isinstance(value, linen.Module):
        return type(value), tuple(_types(item) for _, item in _fields(value))
    return type(value)


def _fields(module: linen.Module) -> list[tuple[str, Any]]:
    """The fields that a linen module was made with; its place in another module is not one of them."""
    names = (field.name for field in dataclasses.fields(cast("Any", module)))
    return [(name, getattr(module, name)) for name in names if name not in ("parent", "name")]


class MayChangeError(TypeError):
    """A value can be changed in place, or it is unknown whether it can."""


_SIMPLE = (type(None), bool, int, str, bytes, type, np.dtype, enum.Enum, type(Ellipsis), jax.lax.Precision)
_WRAPPERS = (jax.custom_jvp, jax.custom_vjp, type(jax.jit(lambda: None)))


def key(value: Any) -> Hashable:
    """A hashable key of a value that cannot change in place.

    Raises:
      MayChangeError: the value can change, or it is unknown whether it can.
    """
    try:
        return _key(value)
    except (RecursionError, ValueError) as error:
        # A local function that calls itself holds itself, and one made before a function that it calls has an empty
        # cell.
        raise MayChangeError(type(value).__name__) from error


def _key(value: Any) -> Hashable:
    if isinstance(value, nnx.GraphDef):
        # == compares its nodes and metadata; its attributes are compared here.
        definition = cast("Any", value)
        return _hash_key(definition), tuple(
            (name, _key(entry.value)) for name, entry in definition.attributes if hasattr(entry, "value")
        )
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, (float, complex, np.generic)):
        return type(value), repr(value)  # distinguishes 0.0 from -0.0, and makes NaN equal to itself
    if isinstance(value, tuple):
        return type(value), tuple(_key(item) for item in cast("tuple[Any, ...]", value))
    if isinstance(value, frozenset):
        return frozenset, frozenset(_key(item) for item in cast("frozenset[Any]", value))
    if isinstance(value, Mapping):
        # A definition holds copies of its mappings, so nobody changes them.
        items = cast("Mapping[Any, Any]", value).items()
        return type(value), tuple((_key(name), _key(item)) for name, item in items)
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return functools.partial, _key(partial.func), _key(partial.args), _key(partial.keywords)
    if isinstance(value, types.FunctionType):
        cells = tuple(_key(cell.cell_contents) for cell in value.__closure__ or ())
        module = sys.modules.get(value.__module__)
        # Functions with the same code, such as two from the factory nnx.initializers.lecun_normal, have the same key.
        text = value if module is None or vars(module) is not value.__globals__ or vars(value) else value.__code__
        return text, value.__module__, cells, _key(value.__defaults__), _key(value.__kwdefaults__)
    if isinstance(value, _WRAPPERS) and inspect.unwrap(value) is not value:
        return value, _key(inspect.unwrap(value))
    if isinstance(value, (types.BuiltinFunctionType, np.ufunc, jax.tree_util.PyTreeDef)):
        return _hash_key(value)
    if isinstance(value, linen.Module):
        return type(value), tuple((name, _key(item)) for name, item in _fields(value))
    raise MayChangeError(type(value).__name__)


def _hash_key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError as error:
        raise MayChangeError(type(value).__name__) from error
    return value
