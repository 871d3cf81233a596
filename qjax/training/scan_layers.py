"""Addresses one layer of a scan by name: "blocks/up/kernel[2]" is entry 2 of the stack "blocks/up/kernel".

A scan over layers stores the parameters of all its layers in one array, and the numbers of their quantizers too.
Methods that work layer by layer read and write one entry of both.
"""

import dataclasses
import re
from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax.calibration.learned import Quantizer

Index = tuple[int, ...]
_PART = re.compile(r"(.+?)((?:\[\d+\])+)")


def part_name(name: str, index: Index) -> str:
    """The name of one entry of a stack, or the stack's own name without an index."""
    return name + "".join(f"[{i}]" for i in index)


def split(name: str, known: Container[str]) -> tuple[str, Index]:
    """The stack to which `name` belongs, and the index in it; a name in `known` is a whole stack."""
    found = None if name in known else _PART.fullmatch(name)
    return (name, ()) if found is None else (found[1], tuple(map(int, re.findall(r"\d+", found[2]))))


class Stacks(dict[str, Any]):
    """Arrays, or trees of arrays, by name; "name[i]" is entry i of the value of "name" unless it has its own value."""

    def __missing__(self, name: str) -> Any:
        base, index = split(name, ())
        if not index:
            raise KeyError(name)
        return jax.tree.map(lambda array: array[index], self[base])

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(split(name, ())[0]))


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of a variable that holds a stack; `part[...]` reads and writes it as if it were a variable."""

    stack: nnx.Variable[Any]
    index: Index

    def __getitem__(self, key: Any) -> Any:
        assert key is Ellipsis
        return self.stack[...][self.index]

    def __setitem__(self, key: Any, value: Any) -> None:
        assert key is Ellipsis
        self.stack[...] = self.stack[...].at[self.index].set(value)


def part_of(
    known: Mapping[str, nnx.Variable[Any]], quantizers: Mapping[str, Quantizer], name: str
) -> nnx.Variable[Any] | Part | None:
    """The variable with this name, or an entry of a variable that holds a stack; None if there is none."""
    base, index = split(name, known)
    if base not in known:
        return None
    stack = quantizers[base].stack if base in quantizers else known[base][...].shape
    if not _within(index, stack):
        return None
    return Part(known[base], index) if index else known[base]


def quantizer_of(quantizers: Mapping[str, Quantizer], name: str) -> Quantizer:
    """The quantizer of a tensor, or of one entry of a stack of tensors.

    Raises:
      KeyError: there is none.
    """
    base, index = split(name, quantizers)
    q = quantizers[base]
    if not _within(index, q.stack):
        raise KeyError(name)
    return dataclasses.replace(q, stack=q.stack[len(index) :]) if index else q


class Quantizers(dict[str, Quantizer]):
    """The quantizers of a plan by name, including those of the layers of a scan."""

    def __missing__(self, name: str) -> Quantizer:
        return quantizer_of(self, name)


def stacked(ends: Mapping[str, tuple[Any, ...]], quantizers: Mapping[str, Quantizer]) -> dict[str, tuple[Any, ...]]:
    """Arrays of quantizers by name, with those of the layers of a scan combined into one stack."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, arrays in ends.items():
        base, index = split(name, quantizers)
        if index and base not in found:
            every = [ends[part_name(base, i)] for i in np.ndindex(*quantizers[base].stack[: len(index)])]
            shape = quantizers[base].stack
            found[base] = tuple(np.stack(column).reshape(shape) for column in zip(*every, strict=True))
        elif not index:
            found[name] = arrays
    return found


def _within(index: Index, shape: tuple[int, ...]) -> bool:
    return len(index) <= len(shape) and bool(np.all(np.less(index, shape[: len(index)])))
