"""The constants of a graph's kernels with every array once, however many nodes hold it.

The steps of an unrolled loop hold the same weights. Passed to a compiled function one by one, each is an argument of
its own: XLA cannot know that they are equal, and repeats for every step what it computes of them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np


class _Places:
    """Per node and role, the index of an array. One object per graph: it is compared by identity."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, int]] = {}


@jax.tree_util.register_pytree_node_class
class SharedConstants(Mapping[str, Mapping[str, Any]]):
    """Node name -> role -> array. A pytree whose leaves are the different arrays."""

    def __init__(self, arrays: tuple[Any, ...], places: _Places) -> None:
        self._arrays, self._places = arrays, places

    @classmethod
    def of(cls, constants: Mapping[str, Mapping[str, Any]]) -> "SharedConstants":
        """Arrays are the same where dtype, shape and bytes are."""
        places, arrays, known = _Places(), list[Any](), dict[Any, int]()
        for node, roles in constants.items():
            places.of[node] = {}
            for role, value in roles.items():
                key: Any = id(value)
                if key not in known:
                    array = np.asarray(value)
                    content = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
                    known[key] = known.setdefault(content, len(arrays))
                    if known[key] == len(arrays):
                        arrays.append(value)
                places.of[node][role] = known[key]
        return cls(tuple(arrays), places)

    def __getitem__(self, node: str) -> Mapping[str, Any]:
        return {role: self._arrays[index] for role, index in self._places.of[node].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.of)

    def __len__(self) -> int:
        return len(self._places.of)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Places]:
        return self._arrays, self._places

    @classmethod
    def tree_unflatten(cls, places: _Places, arrays: tuple[Any, ...]) -> "SharedConstants":
        return cls(tuple(arrays), places)
