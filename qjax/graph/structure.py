"""The structure of a call's arguments or results, for a graph in memory and, as JSON, for an artifact to hold.

In JSON a leaf is an int, the position of an array. Among the arguments None is an array that the graph does not
read, and ["value", [type, repr]] for a Python value: it is part of the program that the model was traced to, so a call
with another value is an error. In a result None is None, and ["constant", [dtype, shape, hexadecimal bytes]]
for an array that depends on no input. A class of the user's own, any registered pytree, is a dict of its fields there,
or a list where they have no names: `Call` keeps the class, as long as the process lives.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from qjax.support.batches import WITHOUT_LABELS


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What the model takes and returns.

    arguments: the pytree of each. returned: the pytree of the result. leaves: its leaves, each the position of one of
    the graph's outputs, or an array that depends on no input.
    """

    arguments: tuple[Any, ...]
    returned: Any
    leaves: tuple[Any, ...]

    def result(self, outputs: Sequence[Any]) -> Any:
        """The outputs of a graph as the model returns them."""
        return jax.tree.unflatten(self.returned, [outputs[x] if isinstance(x, int) else x for x in self.leaves])

    def without_classes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments with dicts for classes of the user's own, where they are those that the model was traced with."""
        known = [*self.arguments, *(None for _ in range(len(args) - len(self.arguments)))]
        return tuple(plain(x) if jax.tree.structure(x) == tree else x for x, tree in zip(args, known, strict=False))


def plain(tree: Any) -> Any:
    """The same with dicts, lists and tuples for classes of the user's own."""
    if tree is None or is_leaf(tree):
        return tree
    if isinstance(tree, tuple):
        return tuple(plain(value) for value in cast("tuple[Any, ...]", tree))
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    names = [getattr(path[0], "name", getattr(path[0], "key", None)) for path, _ in entries]
    values = [plain(value) for _, value in entries]
    if isinstance(tree, list) or any(isinstance(path[0], _UNNAMED) for path, _ in entries):
        return values
    made = {str(name): value for name, value in zip(names, values, strict=True)}
    # A dict keeps its own order of keys.
    return {str(key): made[str(key)] for key in tree} if type(tree) is dict else made


_UNNAMED = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def describe(tree: Any) -> Any:
    """A result as JSON; its leaves are ints (positions) or arrays (constants). Raises TypeError for other leaves."""

    def read(tree: Any) -> Any:
        if tree is None or (isinstance(tree, int) and not isinstance(tree, bool)):
            return tree
        if isinstance(tree, (jax.Array, np.ndarray)):
            array = np.asarray(tree)
            return ["constant", [array.dtype.name, list(array.shape), array.tobytes().hex()]]
        if isinstance(tree, dict):
            return ["dict", [[key, read(value)] for key, value in cast("dict[str, Any]", tree).items()]]
        if isinstance(tree, (list, tuple)):
            values = [read(value) for value in cast("Sequence[Any]", tree)]
            return ["tuple" if isinstance(tree, tuple) else "list", values]
        raise TypeError(f"The model returns a {type(tree).__name__}; a graph can return arrays and trees of them.")

    return read(plain(tree))


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """The inverse, with `leaves` in the positions."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    kind, items = structure
    if kind == "constant":
        dtype, shape, data = items
        return jnp.asarray(np.frombuffer(bytes.fromhex(data), dtype).reshape(shape))
    if kind == "dict":
        return {key: rebuild(value, leaves) for key, value in items}
    values = [rebuild(value, leaves) for value in items]
    return tuple(values) if kind == "tuple" else values


def positions(structure: Any, where: str) -> list[int | None]:
    """The leaves of a structure that a file states, in its own order; None for an array that is not read.

    Raises:
      ValueError: it is no such structure; where: what it is, for the message.
    """
    if structure is None or type(structure) is int:
        return [structure]
    try:
        kind, items = structure
        if kind == "constant":
            rebuild(structure, ())
        elif kind == "value":
            type_, text = items
            if not (type(type_) is type(text) is str):
                raise TypeError(f"a value of {items}")
        elif kind in ("dict", "list", "tuple"):
            parts = [item for _, item in items] if kind == "dict" else items
            if kind == "dict" and not all(type(key) is str for key, _ in items):
                raise TypeError("a key that is no text")
            return [leaf for part in parts for leaf in positions(part, where)]
        else:
            raise TypeError(f"the kind {str(kind)[:40]!r}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected positions of arrays in tuples, lists and dicts, got {error}") from None
    return []


@dataclasses.dataclass(frozen=True)
class _Array:
    """The place of an array of the arguments among the graph's inputs; None: it is no input."""

    position: int | None


def describe_arguments(args: tuple[Any, ...], positions: Sequence[int | None]) -> Any:
    """A call's arguments; positions: of each of its arrays among the graph's inputs, None for one that is not read."""

    def read(tree: Any) -> Any:
        if is_static(tree):
            return ["value", _fixed(tree)]
        if isinstance(tree, _Array):
            return tree.position
        if isinstance(tree, dict):
            return ["dict", [[key, read(value)] for key, value in cast("dict[str, Any]", tree).items()]]
        if isinstance(tree, (list, tuple)):
            values = [read(value) for value in cast("Sequence[Any]", tree)]
            return ["tuple" if isinstance(tree, tuple) else "list", values]
        raise TypeError(f"The call takes a {type(tree).__name__}; a graph knows arrays and trees of them.")

    found = iter(positions)
    leaves, tree = jax.tree.flatten(args)
    arrays = [_Array(next(found)) if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]
    return read(tuple(plain(x) for x in jax.tree.unflatten(tree, arrays)))


def is_static(value: Any) -> bool:
    """Whether an argument is a Python value, which tracing makes part of the program."""
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _fixed(value: Any) -> list[str]:
    """A Python value as JSON: its type and its repr, so that True is not 1, nor 0.0 the same as -0.0."""
    value = value.item() if isinstance(value, np.generic) else value
    return [type(value).__name__, repr(value)]


def flatten_arguments(structure: Any, args: Sequence[Any], count: int) -> list[Any]:
    """The `count` arrays of a call in the order of the graph's inputs.

    Arguments behind the last array that is read may be left out; a Python value must be the one of the conversion.

    Raises:
      TypeError: a part of the arguments has another structure, or another Python value.
    """
    found: dict[int, Any] = {}
    items = structure[1]
    needed = max((index + 1 for index, item in enumerate(items) if _reads(item)), default=0)
    if not needed <= len(args) <= len(items):
        raise TypeError(f"The graph takes {_described(structure)} as its arguments, got {len(args)}. {WITHOUT_LABELS}")
    for index, (item, value) in enumerate(zip(items, args, strict=False)):
        _match(item, value, f"argument {index}", found)
    return [found[index] for index in range(count)]


def _reads(structure: Any) -> bool:
    """Whether a part of the arguments holds an array that the graph reads."""
    if structure is None or isinstance(structure, int):
        return structure is not None
    kind, items = structure
    return kind != "value" and any(_reads(item[1] if kind == "dict" else item) for item in items)


def _match(structure: Any, tree: Any, where: str, found: dict[int, Any]) -> None:
    if structure is None:
        if is_static(tree) or not is_leaf(tree):
            raise TypeError(
                f"The graph's {where}: expected an array (one that the graph does not read), got {_named(tree)}. "
                "Another argument there may make another program of the model: convert with it, or leave it out."
            )
        return
    if isinstance(structure, int):
        if isinstance(tree, str) or not is_leaf(tree):
            raise TypeError(f"The graph's {where}: expected an array, got {type(tree).__name__}.")
        found[structure] = tree
        return
    kind, items = structure
    if kind == "value":
        if not is_static(tree) or _fixed(tree) != items:
            raise TypeError(
                f"The graph's {where}: expected {items[1]}, with which the model was converted, got {_named(tree)}. A "
                "Python value is part of the program: convert a graph for each value."
            )
        return
    wanted = f"The graph's {where}: expected {_described(structure)}, got "
    if kind == "dict":
        if not isinstance(tree, Mapping):
            raise TypeError(wanted + f"{type(tree).__name__}{_own(tree)}.")
        mapping = cast("Mapping[Any, Any]", tree)
        given = {str(key): value for key, value in mapping.items()}
        listed = f"the keys {', '.join(given) or 'none'}: "
        if missing := [key for key, item in items if _reads(item) and key not in given]:
            raise TypeError(wanted + listed + f"{', '.join(missing)} missing.")
        known = dict(items)
        if unknown := [key for key in given if key not in known]:
            raise TypeError(wanted + listed + f"the model was converted without {', '.join(unknown)}.")
        for key, value in given.items():
            _match(known[key], value, f"{where}[{key!r}]", found)
        return
    if not isinstance(tree, (list, tuple)) or len(cast("Sequence[Any]", tree)) != len(items):
        raise TypeError(
            wanted + f"{type(tree).__name__}{f' of {len(tree)}' if isinstance(tree, (list, tuple)) else _own(tree)}."
        )
    for index, (item, value) in enumerate(zip(items, cast("Sequence[Any]", tree), strict=True)):
        _match(item, value, f"{where}[{index}]", found)


def _own(tree: Any) -> str:
    """What to do with an instance of a class of the user's own that the graph does not know."""
    if is_leaf(tree):
        return ""
    return (
        ". Its class or its static fields differ from those that the model was converted with. A graph from a "
        "file knows no classes at all: give a dict or a list as above"
    )


def is_leaf(tree: Any) -> bool:
    """Whether it is one leaf: neither None nor a pytree with parts."""
    return jax.tree_util.all_leaves([tree])


def _named(value: Any) -> str:
    """An argument in an error."""
    return _fixed(value)[1] if is_static(value) else type(value).__name__


def _described(structure: Any) -> str:
    if structure is None or isinstance(structure, int):
        return "array"
    kind, items = structure
    if kind == "value":
        return items[1]
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_described(item)}" for key, item in items) + "}"
    inner = ", ".join(_described(item) for item in items)
    return f"({inner})" if kind == "tuple" else f"[{inner}]"


def split_arguments(args: tuple[Any, ...]) -> tuple[list[Any], Hashable]:
    """The arrays of a call, and all the rest: structure and Python values. `join_arguments` is the inverse.

    The rest tells True from 1 and from 1.0, and 0.0 from -0.0: a cache with it as the key keeps them apart.
    """
    leaves, tree = jax.tree.flatten(args)
    static = tuple(
        None if isinstance(leaf, (jax.Array, np.ndarray)) else (type(leaf), repr(leaf), leaf) for leaf in leaves
    )
    return [leaf for leaf, other in zip(leaves, static, strict=True) if other is None], (tree, static)


def join_arguments(arrays: Sequence[Any], rest: Any) -> tuple[Any, ...]:
    """The arguments of a call from its arrays and the rest."""
    tree, static = rest
    given = iter(arrays)
    return jax.tree.unflatten(tree, [next(given) if other is None else other[-1] for other in static])


def sample_like(sample: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sample for a call: the sample itself, with the Python values of the call.

    A call with its arrays in other places has a sample of zeros.
    """
    (own, own_rest), (arrays, rest) = split_arguments(sample), split_arguments(args)
    (own_tree, own_static), (tree, static) = cast("tuple[Any, Any]", own_rest), cast("tuple[Any, Any]", rest)
    same = tree == own_tree and [s is None for s in static] == [s is None for s in own_static]
    return join_arguments(own if same else [jnp.zeros(a.shape, a.dtype) for a in arrays], rest)
