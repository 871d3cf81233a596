"""Variables of foreign models at their paths in an nnx module, and the user's classes along those paths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx


def put(root: nnx.Module, place: Sequence[str], variable: Any, container: Callable[[], nnx.Module]) -> None:
    """Set a variable at a path; modules that are missing on the way are made by `container`."""
    node: Any = root
    for name in place[:-1]:
        if name not in vars(node):
            setattr(node, name, container())
        node = getattr(node, name)
    setattr(node, place[-1], variable)


def types_within(model: nnx.Module, types: Callable[[Any], Mapping[str, type] | None]) -> dict[str, type]:
    """Path in `model` -> class. types: what a module says of the paths within it; None if it says nothing."""
    found: dict[str, type] = {}
    for path, node in nnx.iter_graph(model):
        outer = "/".join(str(part) for part in path)
        for inner, cls in (types(node) or {}).items():
            found["/".join(part for part in (outer, inner) if part)] = cls
    return found
