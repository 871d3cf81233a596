"""The structure of a call's arguments or results, in memory and as JSON in an artifact.

In JSON a leaf is an int, the position of an array. Among the arguments, None is an array that the graph does not read,
and ["value", [type, repr]] is a Python value. It is part of the traced program, so a call with another value is an
error. In a result, None is None, and ["constant", [dtype, shape, hexadecimal bytes]] is an array that depends on no
input. An instance of a user's class (any registered pytree) is a dict of its fields, or a list if they have no names;
`Call` keeps the class for the lifetime of the process.

    {"a": x, "b": (y, 3)}  ->  ["dict", [["a", 0], ["b", ["tuple", [1, ["value", ["int", "3"]]]]]]]
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
    """The arguments and results of the model.

    arguments: the pytree of each argument. returned: the pytree of the result. leaves: its leaves, each the position of
    one of the graph's outputs, or an array that depends on no input.
    """

    arguments: tuple[Any, ...]
    returned: Any
    leaves: tuple[Any, ...]

    def result(self, outputs: Sequence[Any]) -> Any:
        """The outputs of a graph in the form that the model returns."""
        return jax.tree.unflatten(self.returned, [outputs[x] if isinstance(x, int) else x for x in self.leaves])

    def without_classes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments in which dicts replace the user's classes with which the model was traced."""
        known = [*self.arguments, *(None for _ in range(len(args) - len(self.arguments)))]
        return tuple(plain(x) if jax.tree.structure(x) == tree else x for x, tree in zip(args, known, strict=False))


def plain(tree: Any) -> Any:
    """The same tree with dicts, lists and tuples instead of the user's classes."""
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
    # A dict keeps its own order of keys, which JAX would sort.
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
    """Undo `describe`, with `leaves` in the positions."""
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
    """The leaves of a structure in a file, in its own order; None for an array that is not read.

    Raises:
      ValueError: it is not a valid structure. where: its name in the message.
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
    """The position of an array among the graph's inputs; None if it is not an input."""

    position: int | None


def describe_arguments(args: tuple[Any, ...], positions: Sequence[int | None]) -> Any:
    """A call's arguments as JSON. positions: of their arrays among the graph's inputs, None if not read."""

    def read(tree: Any) -> Any:
        if is_static(tree):
            return ["value", _static_json(tree)]
        if isinstance(tree, _Array):
            return tree.position
        if isinstance(tree, dict):
            return ["dict", [[key, read(value)] for key, value in cast("dict[str, Any]", tree).items()]]
        if isinstance(tree, (list, tuple)):
            values = [read(value) for value in cast("Sequence[Any]", tree)]
            return ["tuple" if isinstance(tree, tuple) else "list", values]
        raise TypeError(f"The call takes a {type(tree).__name__}; a graph supports arrays and trees of them.")

    found = iter(positions)
    leaves, tree = jax.tree.flatten(args)
    arrays = [_Array(next(found)) if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]
    return read(tuple(plain(x) for x in jax.tree.unflatten(tree, arrays)))


def is_static(value: Any) -> bool:
    """Whether an argument is a Python value, which becomes part of the traced program."""
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _static_json(value: Any) -> list[str]:
    """A Python value as JSON: its type and its repr, so that True differs from 1, and 0.0 from -0.0."""
    value = value.item() if isinstance(value, np.generic) else value
    return [type(value).__name__, repr(value)]


def flatten_arguments(structure: Any, args: Sequence[Any], count: int) -> list[Any]:
    """The `count` arrays of a call in the order of the graph's inputs.

    Arguments after the last array that is read may be left out; Python values must be those of the conversion.

    Raises:
      TypeError: a part of the arguments has another structure, or another Python value.
    """
    found: dict[int, Any] = {}
    items = structure[1]
    needed = max((index + 1 for index, item in enumerate(items) if _reads(item)), default=0)
    if not needed <= len(args) <= len(items):
        raise TypeError(
            f"The graph takes {_describe_kind(structure)} as its arguments, got {len(args)}. {WITHOUT_LABELS}"
        )
    for index, (item, value) in enumerate(zip(items, args, strict=False)):
        _match(item, value, f"argument {index}", found)
    return [found[index] for index in range(count)]


def _reads(structure: Any) -> bool:
    """Whether a part of the arguments contains an array that the graph reads."""
    if structure is None or isinstance(structure, int):
        return structure is not None
    kind, items = structure
    return kind != "value" and any(_reads(item[1] if kind == "dict" else item) for item in items)


def _match(structure: Any, tree: Any, where: str, found: dict[int, Any]) -> None:
    if structure is None:
        if is_static(tree) or not is_leaf(tree):
            raise TypeError(
                f"The graph's {where}: expected an array (one that the graph does not read), got {_spell(tree)}. "
                "Another argument there may lead to another program: convert with it, or leave it out."
            )
        return
    if isinstance(structure, int):
        if isinstance(tree, str) or not is_leaf(tree):
            raise TypeError(f"The graph's {where}: expected an array, got {type(tree).__name__}.")
        found[structure] = tree
        return
    kind, items = structure
    if kind == "value":
        if not is_static(tree) or _static_json(tree) != items:
            raise TypeError(
                f"The graph's {where}: expected {items[1]}, with which the model was converted, got {_spell(tree)}. A "
                "Python value is part of the program: convert a graph for each value."
            )
        return
    wanted = f"The graph's {where}: expected {_describe_kind(structure)}, got "
    if kind == "dict":
        if not isinstance(tree, Mapping):
            raise TypeError(wanted + f"{type(tree).__name__}{_cure(tree)}.")
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
            wanted + f"{type(tree).__name__}{f' of {len(tree)}' if isinstance(tree, (list, tuple)) else _cure(tree)}."
        )
    for index, (item, value) in enumerate(zip(items, cast("Sequence[Any]", tree), strict=True)):
        _match(item, value, f"{where}[{index}]", found)


def _cure(tree: Any) -> str:
    """The cure for an instance of a user's class that the graph does not know."""
    if is_leaf(tree):
        return ""
    return (
        ". Its class or its static fields differ from those that the model was converted with. A graph from a "
        "file knows no classes at all: give a dict or a list as above"
    )


def is_leaf(tree: Any) -> bool:
    """Whether it is a single leaf: neither None nor a pytree with parts."""
    return jax.tree_util.all_leaves([tree])


def _spell(value: Any) -> str:
    """An argument in an error."""
    return _static_json(value)[1] if is_static(value) else type(value).__name__


def _describe_kind(structure: Any) -> str:
    if structure is None or isinstance(structure, int):
        return "array"
    kind, items = structure
    if kind == "value":
        return items[1]
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_describe_kind(item)}" for key, item in items) + "}"
    inner = ", ".join(_describe_kind(item) for item in items)
    return f"({inner})" if kind == "tuple" else f"[{inner}]"


def split_arguments(args: tuple[Any, ...]) -> tuple[list[Any], Hashable]:
    """Split a call's arguments into its arrays and the rest (structure and Python values); see `join_arguments`.

    The rest distinguishes True from 1 and from 1.0, and 0.0 from -0.0, so that it can be the key of a cache.
    """
    leaves, tree = jax.tree.flatten(args)
    static = tuple(
        None if isinstance(leaf, (jax.Array, np.ndarray)) else (type(leaf), repr(leaf), leaf) for leaf in leaves
    )
    return [leaf for leaf, other in zip(leaves, static, strict=True) if other is None], (tree, static)


def join_arguments(arrays: Sequence[Any], rest: Any) -> tuple[Any, ...]:
    """Undo `split_arguments`."""
    tree, static = rest
    given = iter(arrays)
    return jax.tree.unflatten(tree, [next(given) if other is None else other[-1] for other in static])


def sample_like(sample: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sample for a call: the sample itself, with the Python values of the call.

    If the call has its arrays in other places, the sample consists of zeros.
    """
    (own, own_rest), (arrays, rest) = split_arguments(sample), split_arguments(args)
    (own_tree, own_static), (tree, static) = cast("tuple[Any, Any]", own_rest), cast("tuple[Any, Any]", rest)
    same = tree == own_tree and [s is None for s in static] == [s is None for s in own_static]
    return join_arguments(own if same else [jnp.zeros(a.shape, a.dtype) for a in arrays], rest)
