"""Stores the constants of a graph's kernels with every distinct array once, however many nodes use it.

The steps of an unrolled loop use the same weights. If they were passed to a compiled function one by one, each would be
a separate argument, XLA could not know that they are equal, and would repeat its work on them for every step.

Nodes that are iterations of one body (see `run.find_loops`) have their constants in one array, with the iterations
along its first axis, so that a compiled loop reads them without a copy.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.numerics.meshes import automatic, explicit_mesh

_Place = tuple[int, int | None]
"""The index of an array, and of the part along its first axis; None is the whole array."""


class _Places:
    """Per node and role, the place of its constant. There is one object per graph, and it is compared by identity."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, _Place]] = {}


@jax.tree_util.register_pytree_node_class
class SharedConstants(Mapping[str, Mapping[str, Any]]):
    """Node name -> role -> array. A pytree whose leaves are the distinct arrays."""

    def __init__(self, arrays: tuple[Any, ...], places: _Places) -> None:
        self._arrays, self._places = arrays, places

    @classmethod
    def of(
        cls, constants: Mapping[str, Mapping[str, Any]], iterations: Iterable[Sequence[str]] = ()
    ) -> "SharedConstants":
        """Share arrays that have equal dtype, shape and bytes, and tracers that are the same object.

        iterations: groups of nodes that correspond to one node of a loop's body. Their constants have equal roles,
          shapes and dtypes.
        """
        places, arrays, stacks = _Places(), list[Any](), dict[object, int]()
        keys = _Keys()
        for group in iterations:
            for role in constants[group[0]]:
                values = [constants[name][role] for name in group]
                content = tuple(keys(value) for value in values)
                if len(set(content)) == 1:
                    continue
                if content not in stacks:
                    stacks[content] = len(arrays)
                    traced = any(isinstance(value, jax.Array) for value in values)
                    with automatic(explicit_mesh(values)):
                        arrays.append(jnp.stack(values) if traced else np.stack(values))
                for index, name in enumerate(group):
                    places.of.setdefault(name, {})[role] = (stacks[content], index)
        known: dict[object, int] = {}
        for node, roles in constants.items():
            found = places.of.pop(node, {})
            for role in (role for role in roles if role not in found):
                key = keys(roles[role])
                if key not in known:
                    known[key] = len(arrays)
                    arrays.append(roles[role])
                found[role] = (known[key], None)
            places.of[node] = {role: found[role] for role in roles}
        return cls(tuple(arrays), places)

    def over(self, nodes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The constants of one node's iterations: those that all share, and those with an axis of iterations."""
        same: dict[str, Any] = {}
        stacked: dict[str, Any] = {}
        for role in self._places.of[nodes[0]]:
            held = [self._places.of[name][role] for name in nodes]
            if len(set(held)) == 1:
                same[role] = self[nodes[0]][role]
            elif held == [(held[0][0], index) for index in range(len(nodes))]:
                stacked[role] = self._arrays[held[0][0]]
            else:
                stacked[role] = jnp.stack([self[name][role] for name in nodes])
        return same, stacked

    def __getitem__(self, node: str) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for role, (index, part) in self._places.of[node].items():
            found[role] = self._arrays[index] if part is None else self._arrays[index][part]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.of)

    def __len__(self) -> int:
        return len(self._places.of)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Places]:
        return self._arrays, self._places

    @classmethod
    def tree_unflatten(cls, places: _Places, arrays: tuple[Any, ...]) -> "SharedConstants":
        return cls(tuple(arrays), places)


class _Keys:
    """The keys by which arrays are distinguished; each object is examined once."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            return id(value)
        if id(value) not in self.known:
            array = np.asarray(value)
            self.known[id(value)] = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        return self.known[id(value)]
