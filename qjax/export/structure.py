"""The structure of a model's output (dicts, lists, tuples of arrays) as JSON, so that an artifact can hold it."""

from collections.abc import Sequence
from typing import Any


def describe(tree: Any) -> Any:
    """Replace the leaves, which must be ints (positions), and tag tuples; raises TypeError for other nodes."""
    if isinstance(tree, bool) or not isinstance(tree, (int, dict, list, tuple)):
        raise TypeError(
            f"The model returns a {type(tree).__name__}; a graph can return arrays in dicts, lists and tuples."
        )
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict):
        return ["dict", [[str(key), describe(value)] for key, value in tree.items()]]
    return ["tuple" if isinstance(tree, tuple) else "list", [describe(value) for value in tree]]


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """The inverse, with `leaves` in the positions."""
    if isinstance(structure, int):
        return leaves[structure]
    kind, items = structure
    if kind == "dict":
        return {key: rebuild(value, leaves) for key, value in items}
    values = [rebuild(value, leaves) for value in items]
    return tuple(values) if kind == "tuple" else values
