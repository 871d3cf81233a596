"""Computations on meshes whose axes are explicit or manual.

On a mesh with explicit axes the type of every array states how it is split, and every operation has a rule for it. The
user's model obeys these rules. What qjax computes in its place runs in a view of the mesh whose axes are automatic, in
which the compiler splits the arrays. At the end each result gets the type that it has in the user's model.

Within `jax.shard_map` the type of an array states along which manual axes it varies, that is, differs between devices.
All operands of one equation vary along the same axes, and so do a tensor and its codes.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)

T = TypeVar("T")

PLACEMENTS = frozenset({"device_put", "layout_constraint", "reshard", "sharding_constraint"})
"""Primitives that only define how an array is placed."""

WHOLE = PartitionSpec()
"""The spec of an array that every device holds as a whole."""


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The context's mesh if it has explicit axes; without a context, that of the arrays in a tree."""
    context = get_abstract_mesh()
    if context.axis_names:
        return context if _explicit(context) else None
    return mesh_of(jax.typeof(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def mesh_of(types: Iterable[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes to which the types of arrays refer."""
    meshes = (kind.sharding.mesh for kind in types if getattr(kind, "sharding", None) is not None)
    return next((mesh for mesh in meshes if _explicit(mesh)), None)


def automatic_view(mesh: AbstractMesh) -> AbstractMesh:
    """The same mesh with its explicit axes turned into automatic ones."""
    return mesh.update_axis_types(dict.fromkeys(_explicit(mesh), AxisType.Auto))


@contextlib.contextmanager
def automatic(mesh: AbstractMesh | None) -> Generator[None]:
    """A context with the explicit axes of `mesh` automatic, for arrays that are `untyped`; None changes nothing."""
    with contextlib.nullcontext() if mesh is None else use_abstract_mesh(automatic_view(mesh)):
        yield


def untyped(tree: T) -> T:
    """The arrays of a tree, split as they are, but with types that fit the automatic view."""

    def one(x: Any) -> Any:
        return reshard(x, WHOLE) if isinstance(x, jax.Array) and mesh_of([jax.typeof(x)]) else x

    return jax.tree.map(one, tree)


def typed(tree: T, specs: Any, mesh: AbstractMesh) -> T:
    """The arrays of a tree with the types that the user's model has; specs: a tree like it of `PartitionSpec`."""
    with use_abstract_mesh(mesh):
        return jax.tree.map(lambda x, spec: reshard(x, spec) if isinstance(x, jax.Array) else x, tree, specs)


def placed_as(x: jax.Array, kind: Any) -> jax.Array:
    """An array that the compiler splits as explicit axes do in the user's model, inside of the automatic view.

    Where it chooses itself, it may gather a weight whose product the model splits.
    """
    mesh = mesh_of([kind])
    if mesh is None or get_abstract_mesh() != automatic_view(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, kind.sharding.spec)


def in_automatic(function: Callable[..., T], args: tuple[Any, ...], specs: Callable[[T], Any]) -> T:
    """`function(*args)`, computed where explicit axes are automatic. specs: of the result, a tree like it."""
    mesh = explicit_mesh(args)
    if mesh is None:
        return function(*args)
    with automatic(mesh):
        result = function(*untyped(args))
    return typed(result, specs(result), mesh)


def whole(tree: Any) -> Any:
    """Specs for a tree that every device stores as a whole."""
    return jax.tree.map(lambda _: WHOLE, tree)


def along_batch(inputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Specs for a result whose first axis, if it is as long, is split like that of the first split input."""
    first = next((x for x in inputs if isinstance(x, jax.Array) and parts_of_batch(x) > 1), None)
    if first is None:
        return whole
    size, spec = first.shape[0], PartitionSpec(spec_of(jax.typeof(first))[0])
    return lambda tree: jax.tree.map(lambda x: spec if np.shape(x)[:1] == (size,) else WHOLE, tree)


def spec_of(kind: Any) -> PartitionSpec:
    """How explicit axes split an array, according to its type."""
    return WHOLE if mesh_of([kind]) is None else kind.sharding.spec


def shape_of(kind: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype, explicit sharding and varying axes of a type, for a trace."""
    own = {"manual_axis_type": kind.manual_axis_type} if _varying(kind) else {}
    sharding = kind.sharding if own or mesh_of([kind]) else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, **own)


def varying_alike(arrays: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """The arrays, varying along every manual axis along which one of them does, or one of `like`."""
    found = (_varying(jax.typeof(x)) for x in (*arrays, *like) if isinstance(x, jax.Array))
    axes = frozenset[str]().union(*found)
    return [_vary(x, axes) for x in arrays] if axes else list(arrays)


def varying_as(arrays: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """The arrays, varying where the types state it; None states nothing."""
    return [_vary(x, _varying(kind)) for x, kind in zip(arrays, kinds, strict=True)]


def zeros_of(kind: Any) -> jax.Array:
    """Zeros that vary where a type states it."""
    return varying_as([jnp.zeros(kind.shape, kind.dtype)], [kind])[0]


def _vary(x: Any, axes: frozenset[str]) -> Any:
    # a `shard_map` over one device is opened, see `single_device_shard_map`: its axes are no axes of the context
    missing = tuple(sorted((axes - _varying(jax.typeof(x))) & _axes(get_abstract_mesh(), AxisType.Manual)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(kind: Any) -> frozenset[str]:
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset())


def with_batch(x: Any, size: int) -> jax.ShapeDtypeStruct:
    """The type of an argument with another size of its first axis, which stays split if that size allows it."""
    kind = shape_of(jax.typeof(x))
    if not kind.shape:
        return kind
    sharding = kind.sharding
    if sharding is not None and size % parts_of_batch(x):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    return kind.update(shape=(size, *kind.shape[1:]), sharding=sharding)


def zeros_with_batch(x: Any, size: int) -> jax.Array:
    """Zeros of that type, on the devices of `x`."""
    kind = with_batch(x, size)
    zeros = jnp.zeros(kind.shape, kind.dtype)
    return zeros if kind.sharding is None else reshard(zeros, NamedSharding(x.sharding.mesh, kind.sharding.spec))


def parts_of_batch(x: Any) -> int:
    """Into how many parts the type of an argument splits its first axis."""
    sharding = shape_of(jax.typeof(x)).sharding
    if sharding is None or not x.ndim or sharding.spec[0] is None:
        return 1
    names = sharding.spec[0]
    return math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


def _explicit(mesh: AbstractMesh) -> frozenset[str]:
    return _axes(mesh, AxisType.Explicit)


def _axes(mesh: AbstractMesh, kind: AxisType) -> frozenset[str]:
    return frozenset(name for name, own in zip(mesh.axis_names, mesh.axis_types, strict=True) if own == kind)
