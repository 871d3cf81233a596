"""The structure of a call's arguments or results (dicts, lists, tuples of arrays) as JSON, for an artifact to hold.

A leaf is an int, the position of an array. Among the arguments None stands for an array that the graph does not read,
and ["value", [type, repr]] for a Python value: it is part of the program that the model was traced to, so a call with
another value is an error.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from qjax.batches import WITHOUT_LABELS


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
        if is_static(tree):
            return ["value", _fixed(tree)]
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


def is_static(value: Any) -> bool:
    """Whether an argument is a Python value, which tracing makes part of the program."""
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _fixed(value: Any) -> list[str]:
    """A Python value as JSON: its type and its repr, so that True is not 1, nor 0.0 the same as -0.0."""
    value = value.item() if isinstance(value, np.generic) else value
    return [type(value).__name__, repr(value)]


def flatten_arguments(structure: Any, args: tuple[Any, ...], count: int) -> list[Any]:
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
        if is_static(tree) or isinstance(tree, (Mapping, list, tuple)):
            raise TypeError(
                f"The graph's {where}: expected an array (one that the graph does not read), got {_named(tree)}. "
                "Another argument there may make another program of the model: convert with it, or leave it out."
            )
        return
    if isinstance(structure, int):
        if tree is None or isinstance(tree, (str, Mapping, list, tuple)):
            raise TypeError(f"The graph's {where}: expected an array, got {type(cast('Any', tree)).__name__}.")
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
            raise TypeError(wanted + f"{type(tree).__name__}.")
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
            wanted + f"{type(tree).__name__}{f' of {len(tree)}' if isinstance(tree, (list, tuple)) else ''}."
        )
    for index, (item, value) in enumerate(zip(items, cast("Sequence[Any]", tree), strict=True)):
        _match(item, value, f"{where}[{index}]", found)


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

    A call whose arrays stand elsewhere has a sample of zeros.
    """
    (own, own_rest), (arrays, rest) = split_arguments(sample), split_arguments(args)
    (own_tree, own_static), (tree, static) = cast("tuple[Any, Any]", own_rest), cast("tuple[Any, Any]", rest)
    same = tree == own_tree and [s is None for s in static] == [s is None for s in own_static]
    return join_arguments(own if same else [jnp.zeros(a.shape, a.dtype) for a in arrays], rest)
