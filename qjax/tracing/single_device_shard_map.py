"""Reads `jax.shard_map` over a mesh of one device as a plain call.

    shard_map(f, mesh of one device)(x)    ->    f(x), with psum(y, axis) -> y and axis_index(axis) -> 0

A layer that splits its work over a mesh always uses `shard_map`. On a mesh of one device every axis has one member, so
sums, gathers and exchanges along an axis return the member's own array, and its index is 0.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, get_abstract_mesh

_OWN = frozenset(
    """psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all ppermute""".split()  # noqa: SIM905
)


class _Axes(threading.local):
    """The mesh axes of one member around the equations that are currently read."""

    names: frozenset[Any] = frozenset()


_axes = _Axes()


def body_of(eqn: Any) -> ClosedJaxpr | None:
    """The function that a `shard_map` calls on the one device of its mesh; None for any other equation."""
    if eqn.primitive.name != "shard_map" or eqn.params["mesh"].size != 1:
        return None
    return ClosedJaxpr(eqn.params["jaxpr"], ())


@contextlib.contextmanager
def inside(eqn: Any) -> Generator[None]:
    """A context in which the body of such a `shard_map` is read."""
    outer = _axes.names
    _axes.names = outer | frozenset(eqn.params["mesh"].axis_names)
    try:
        yield
    finally:
        _axes.names = outer


def hands_on(eqn: Any) -> bool:
    """Whether an equation returns its operands, because its axes have one member or it only marks what varies.

    Marks are added again where an equation runs, see `meshes.varying_as`, so a constant stays a constant.
    """
    if eqn.primitive.name == "pvary":
        return True
    params = eqn.params
    if eqn.primitive.name not in _OWN or params.get("axis_index_groups") is not None:
        return False
    if [v.aval.shape for v in eqn.invars] != [v.aval.shape for v in eqn.outvars]:
        return False
    if tuple(params.get("perm", ((0, 0),))) != ((0, 0),):
        return False
    names = params.get("axes", params.get("axis_name"))
    return bool(names) and _axes.names.issuperset(names if isinstance(names, tuple) else (names,))


def speaks(eqn: Any) -> bool:
    """Whether an equation communicates along axes of one member."""
    return hands_on(eqn) or is_first(eqn)


def is_first(eqn: Any) -> bool:
    """Whether an equation asks for the index along axes of one member, which is 0."""
    if eqn.primitive.name != "axis_index":
        return False
    name = eqn.params["axis_name"]
    return _axes.names.issuperset(name if isinstance(name, tuple) else (name,))


def is_typed(eqn: Any) -> bool:
    """Whether an equation states types of the mesh of such a `shard_map`, which are no types where it runs now."""
    for var in (*getattr(eqn, "outvars", ()), *getattr(eqn, "invars", ())):
        mesh = getattr(getattr(var.aval, "sharding", None), "mesh", None)
        if mesh is not None and mesh.axis_names:
            return mesh.size == 1 and AxisType.Manual in mesh.axis_types and mesh != get_abstract_mesh()
    return False


def bind_untyped(eqn: Any, args: Sequence[Any], bind: Callable[[Any, Sequence[Any]], list[Any]]) -> list[Any]:
    """Run such an equation without these types; bind: runs an equation.

    A call of `jit` is opened, because the types are those of all its equations.
    """
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
    if inner is None:
        return bind(eqn.replace(params={**eqn.params, "sharding": None}) if "sharding" in eqn.params else eqn, args)
    known = dict(zip(inner.jaxpr.invars, args, strict=True)) | dict(
        zip(inner.jaxpr.constvars, inner.consts, strict=True)
    )

    def read(var: Any) -> Any:
        return var.val if hasattr(var, "val") else known[var]

    for one in inner.jaxpr.eqns:
        given = [read(var) for var in one.invars]
        made = given if hands_on(one) else bind_untyped(one, given, bind) if is_typed(one) else bind(one, given)
        known.update(zip(one.outvars, made, strict=True))
    return [read(var) for var in inner.jaxpr.outvars]
