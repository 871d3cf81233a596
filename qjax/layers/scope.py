"""Makes the modules of a model traceable: each call runs in a scope with the module's path.

An instrumented module keeps its attributes and its isinstance relations, because it becomes an instance of a subclass
of its own class whose `__call__` opens the scope. Layers of `MARKED` also bind a marker (see `tracing.marker`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from qjax.layers import nnx_layers, normalization
from qjax.layers.function import function_types, types_within
from qjax.tracing import SCOPE, Program

MARKED: dict[type, Callable[..., Any]] = {
    nnx.BatchNorm: nnx_layers.batch_norm,
    nnx.Dropout: nnx_layers.dropout,
    nnx.Embed: nnx_layers.embed,
    **normalization.CALLS,
}


def instrument(model: nnx.Module) -> nnx.Module:
    """Copy the model with every module in its scope; shared modules stay shared, under the path found first."""
    clone = nnx.clone(model)
    seen: set[int] = set()
    for path, node in nnx.iter_graph(clone):
        if not isinstance(node, nnx.Module) or id(node) in seen:
            continue
        seen.add(id(node))
        if "__call__" not in dir(type(node)):
            continue
        node.__class__ = _make_scoped(type(node))
        setattr(node, "qjax_path", ".".join(str(part) for part in path))  # noqa: B010
    return clone


@functools.cache
def _make_scoped(base: type) -> type:
    marked = MARKED.get(base)

    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(SCOPE + self.qjax_path):
            if marked is not None:
                return marked(self, base, *args, **kwargs)
            return base.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # The class cannot be imported from a module, so unpickling derives it from the user's class again.
        return _unpickled, (base,), vars(self).copy()

    members = {"__call__": call, "__module__": base.__module__, "qjax_base": base, "__reduce_ex__": reduce}
    return type(base)(base.__name__, (base,), members)


def _unpickled(base: type) -> Any:
    """An instrumented module without attributes, which `pickle` then sets."""
    return object.__new__(_make_scoped(base))


class NamedScope:
    """The type of scopes named by `jax.named_scope` in a function of parameters."""


def module_types(model: nnx.Module, program: Program) -> dict[str, type]:
    """Path ("blocks/0/conv1") -> the user's class, for every module of an instrumented model.

    Args:
      program: a trace of the model, which reveals the scopes of functions.
    """
    types = {**function_types(model), **types_within(model, _own_types)}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            types.setdefault("/".join(str(part) for part in path), getattr(type(node), "qjax_base", type(node)))
    for scope in _scopes(program):
        while scope not in types:
            types[scope] = NamedScope
            scope = scope.rpartition("/")[0]
    return types


def _own_types(node: Any) -> Mapping[str, type] | None:
    """Path -> class of the layers that a module of another library has within it."""
    return getattr(node, "qjax_types", None) if isinstance(node, nnx.Module) else None


def _scopes(program: Program) -> set[str]:
    bodies = [eqn.body for eqn in program.equations if eqn.body is not None]
    return {eqn.scope for eqn in program.equations}.union(*map(_scopes, bodies))
