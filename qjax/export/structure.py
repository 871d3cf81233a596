"""The structure of a call's arguments or results (dicts, lists, tuples of arrays) as JSON, for an artifact to hold.

A leaf is an int, the position of an array; None stands for what is no array of the graph: a Python value that the model
was traced with, or an argument that it does not read.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np


def describe(tree: Any) -> Any:
    """Replace the leaves, which must be ints (positions), and tag tuples; raises TypeError for other nodes."""
    if isinstance(tree, bool) or not isinstance(tree, (int, dict, list, tuple)):
        raise TypeError(
            f"The model returns a {type(tree).__name__}; a graph can return arrays in dicts, lists and tuples."
        )
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict):
        return ["dict", [[str(key), describe(value)] for key, value in cast("dict[Any, Any]", tree).items()]]
    return ["tuple" if isinstance(tree, tuple) else "list", [describe(value) for value in cast("Sequence[Any]", tree)]]


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """The inverse, with `leaves` in the positions."""
    if isinstance(structure, int):
        return leaves[structure]
    kind, items = structure
    if kind == "dict":
        return {key: rebuild(value, leaves) for key, value in items}
    values = [rebuild(value, leaves) for value in items]
    return tuple(values) if kind == "tuple" else values


def describe_arguments(args: tuple[Any, ...], positions: Sequence[int | None]) -> Any:
    """A call's arguments; positions: of each of its arrays among the graph's inputs, None for one that is not read."""
    found = iter(positions)

    def read(tree: Any) -> Any:
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return None
        if isinstance(tree, (jax.Array, np.ndarray)):
            return next(found)
        if isinstance(tree, Mapping):
            mapping = cast("Mapping[Any, Any]", tree)
            # in the order in which jax.tree takes their leaves
            return ["dict", [[str(key), read(mapping[key])] for key in sorted(mapping)]]
        if type(tree) in (list, tuple):
            return [type(tree).__name__, [read(value) for value in cast("Sequence[Any]", tree)]]
        raise TypeError(f"The call takes a {type(tree).__name__}; a graph knows arrays in dicts, lists and tuples.")

    return read(args)


def flatten_arguments(structure: Any, args: tuple[Any, ...], count: int) -> list[Any]:
    """The `count` arrays of a call in the order of the graph's inputs; arguments that are not read may be left out.

    Raises a TypeError that says which part of the arguments has another structure.
    """
    found: dict[int, Any] = {}
    items = structure[1]
    needed = max((index + 1 for index, item in enumerate(items) if item is not None), default=0)
    if not needed <= len(args) <= len(items):
        raise TypeError(f"The graph takes {_described(structure)} as its arguments, got {len(args)}.")
    for index, (item, value) in enumerate(zip(items, args, strict=False)):
        _match(item, value, f"argument {index}", found)
    return [found[index] for index in range(count)]


def _match(structure: Any, tree: Any, where: str, found: dict[int, Any]) -> None:
    if structure is None:
        return
    if isinstance(structure, int):
        if tree is None or isinstance(tree, (Mapping, list, tuple)):
            raise TypeError(f"The graph's {where}: expected an array, got {type(cast('Any', tree)).__name__}.")
        found[structure] = tree
        return
    kind, items = structure
    wanted = f"The graph's {where}: expected {_described(structure)}, got "
    if kind == "dict":
        if not isinstance(tree, Mapping):
            raise TypeError(wanted + f"{type(tree).__name__}.")
        mapping = cast("Mapping[Any, Any]", tree)
        given = {str(key): value for key, value in mapping.items()}
        if missing := [key for key, item in items if item is not None and key not in given]:
            raise TypeError(wanted + f"the keys {', '.join(given) or 'none'}: {', '.join(missing)} missing.")
        for key, item in items:
            _match(item, given.get(key), f"{where}[{key!r}]", found)
        return
    if not isinstance(tree, (list, tuple)) or len(cast("Sequence[Any]", tree)) != len(items):
        raise TypeError(
            wanted + f"{type(tree).__name__}{f' of {len(tree)}' if isinstance(tree, (list, tuple)) else ''}."
        )
    for index, (item, value) in enumerate(zip(items, cast("Sequence[Any]", tree), strict=True)):
        _match(item, value, f"{where}[{index}]", found)


def _described(structure: Any) -> str:
    if structure is None:
        return "anything"
    if isinstance(structure, int):
        return "array"
    kind, items = structure
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_described(item)}" for key, item in items) + "}"
    inner = ", ".join(_described(item) for item in items)
    return f"({inner})" if kind == "tuple" else f"[{inner}]"


def split_arguments(args: tuple[Any, ...]) -> tuple[list[Any], Hashable]:
    """The arrays of a call, and all the rest: structure and Python values. `join_arguments` is the inverse."""
    leaves, tree = jax.tree.flatten(args)
    static = tuple(None if isinstance(leaf, (jax.Array, np.ndarray)) else (leaf,) for leaf in leaves)
    return [leaf for leaf, other in zip(leaves, static, strict=True) if other is None], (tree, static)


def join_arguments(arrays: Sequence[Any], rest: Any) -> tuple[Any, ...]:
    """The arguments of a call from its arrays and the rest."""
    tree, static = rest
    given = iter(arrays)
    return jax.tree.unflatten(tree, [next(given) if other is None else other[0] for other in static])
