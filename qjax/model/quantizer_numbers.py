"""Packs the numbers of all quantizers of a model into a few vectors, one per kind of number.

Flax walks through every module and every variable of a model in each call of a transform. A quantizer has two or more
numbers, and a network has hundreds of quantizers. With one variable per number, this walk took longer than the training
step itself where the batch was small. So the learned logarithms of all scales are one variable, all fixed zero points
are another, and so on.

    log2_scale of "input": (), of "fc/kernel": (3,)   ->   learned_log2_scale: (4,)
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.calibration.learned import Quantizer
from qjax.numerics.learned_scale import learned_scale
from qjax.numerics.meshes import WHOLE, explicit_mesh, typed
from qjax.numerics.packing import unpacked

_LEARNED = "learned_"


class QuantParam(nnx.Param):
    """Numbers of quantizers that training updates: the logarithms of scales, zero points, thresholds.

    Examples:
      ```python
      # what an optimizer of the scales alone moves
      scales = nnx.state(qmodel, qjax.QuantParam)
      ```
    """


class QuantStat(nnx.Variable):
    """Numbers of quantizers that only calibration sets.

    Examples:
      ```python
      # what calibration sets and no optimizer moves
      ranges = nnx.state(qmodel, qjax.QuantStat)
      ```
    """


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where the array of one quantizer lies in a vector."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class _Group:
    """A vector: its attribute, the number that it holds, and the entries; entries of one size are neighbours."""

    attribute: str
    key: str
    dtype: str
    entries: tuple[_Entry, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Layout:
    """Where every number lies. Layouts are compared by their groups, and hashed once."""

    names: tuple[str, ...]
    groups: tuple[_Group, ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.names, self.groups))

    def __repr__(self) -> str:
        return f"<places of {len(self.names)} quantizers>"

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Layout):
            return False
        return self is other or (self.names, self.groups) == (other.names, other.groups)

    @functools.cached_property
    def places(self) -> Mapping[str, Mapping[str, tuple[str, _Entry]]]:
        """Quantizer -> name of an array -> the vector's attribute and the entry in it."""
        found: dict[str, dict[str, tuple[str, _Entry]]] = {name: {} for name in self.names}
        for group in self.groups:
            for entry in group.entries:
                found[entry.name][group.key] = group.attribute, entry
        return found


def _layout(quantizers: Mapping[str, Quantizer], values: Mapping[str, Mapping[str, Any]]) -> _Layout:
    kinds: dict[tuple[str, str, str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, quantizer in quantizers.items():
        for key, value in values[name].items():
            attribute = _LEARNED + key if key in quantizer.learned else key
            if hasattr(QuantizerNumbers, attribute) or attribute == "layout":
                raise ValueError(f"Quantizer {name!r}: its estimator calls a number {key!r}, a name that is taken.")
            kind = attribute, key, str(jnp.asarray(value).dtype)
            kinds.setdefault(kind, []).append((name, tuple(np.shape(value))))
    attributes = [attribute for attribute, _, _ in kinds]
    groups: list[_Group] = []
    for (attribute, key, dtype), members in sorted(kinds.items()):
        end = 0
        entries: list[_Entry] = []
        for name, shape in sorted(members, key=lambda member: math.prod(member[1])):
            entries.append(_Entry(name, end, shape))
            end = entries[-1].end
        unique = attribute if attributes.count(attribute) == 1 else f"{attribute}_{dtype}"
        groups.append(_Group(unique, key, dtype, tuple(entries)))
    return _Layout(tuple(quantizers), tuple(groups))


class QuantizerNumbers(nnx.Module):
    """The numbers of all quantizers: one variable per kind; `numbers[name]` is a view of one quantizer's share.

    Numbers that training updates are a `QuantParam` ("learned_log2_scale"), those that only calibration sets a
    `QuantStat` ("zero_point").
    """

    def __init__(self, quantizers: Mapping[str, Quantizer], values: Mapping[str, Mapping[str, Any]]) -> None:
        """values: quantizer -> its arrays by name."""
        self.layout = _layout(quantizers, values)
        for group in self.layout.groups:
            arrays = [np.asarray(values[entry.name][group.key]).reshape(-1) for entry in group.entries]
            kind = QuantParam if group.attribute.startswith(_LEARNED) else QuantStat
            setattr(self, group.attribute, kind(jnp.asarray(np.concatenate(arrays))))

    def __getitem__(self, name: str) -> "OneQuantizer":
        if name not in self.layout.places:
            raise KeyError(f"No quantizer {name!r}; there are {', '.join(self.layout.names)}.")
        return OneQuantizer(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def named(self, state: Any = None) -> dict[str, dict[str, Any]]:
        """Quantizer -> its arrays by name.

        state: anything with this module's vectors as attributes, such as gradients or an optimizer's moments
        (`gradients["quantizers"]`); arrays that it lacks are left out. None is the module itself.
        """
        found: dict[str, dict[str, Any]] = {name: {} for name in self.layout.names}
        for group in self.layout.groups:
            if state is not None and group.attribute not in state:
                continue
            vector = _array(getattr(self, group.attribute) if state is None else state[group.attribute])
            for entry, piece in zip(group.entries, _pieces(vector, group), strict=True):
                found[entry.name][group.key] = piece
        return found

    def ready(self, quantizers: Mapping[str, Quantizer]) -> dict[str, dict[str, Any]]:
        """`named()` with every "log2_scale" of LSQ converted to its "scale", all in one computation."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.layout.names}
        for group in self.layout.groups:
            vector = _array(getattr(self, group.attribute))
            scaled = {e.name for e in group.entries if group.key == "log2_scale" and quantizers[e.name].takes_scale}
            if len(scaled) < len(group.entries):
                for entry, piece in zip(group.entries, _pieces(vector, group), strict=True):
                    found[entry.name][group.key] = piece
            if scaled:
                for entry, piece in zip(group.entries, _pieces(learned_scale(vector), group), strict=True):
                    if entry.name in scaled:
                        found[entry.name].pop(group.key, None)
                        found[entry.name]["scale"] = piece
        return found

    def write(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Set numbers of quantizers: name -> arrays by name, in their shapes; quantizers not named do not change."""
        changed: dict[str, list[tuple[_Entry, Any]]] = {}
        for name, arrays in values.items():
            for key, value in arrays.items():
                attribute, entry = self[name].place(key)
                changed.setdefault(attribute, []).append((entry, value))
        for attribute, parts in changed.items():
            variable: nnx.Variable[Any] = getattr(self, attribute)
            variable[...] = _write_entries(variable[...], parts)


@dataclasses.dataclass(frozen=True)
class OneQuantizer:
    """The numbers of one quantizer, read from and written to the vectors; `one.log2_scale[...]` is one of them."""

    numbers: QuantizerNumbers
    name: str

    def values(self) -> dict[str, Any]:
        """The arrays by name."""
        return {key: OneArray(self, key)[...] for key in self.numbers.layout.places[self.name]}

    def place(self, key: str) -> tuple[str, _Entry]:
        """The attribute of the vector that holds an array, and its entry there."""
        places = self.numbers.layout.places[self.name]
        if key not in places:
            raise AttributeError(f"Quantizer {self.name!r} has no {key!r}; it has {', '.join(places) or 'no numbers'}.")
        return places[key]

    def __getattr__(self, key: str) -> "OneArray":
        if key.startswith("_") or key in ("numbers", "name"):
            # copy and pickle ask for these before the object has any fields
            raise AttributeError(key)
        self.place(key)
        return OneArray(self, key)


@dataclasses.dataclass(frozen=True)
class OneArray:
    """An array of one quantizer; `array[...]` reads and writes it as if it were a variable."""

    quantizer: OneQuantizer
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of scans first, then those of channels."""
        return self.quantizer.place(self.key)[1].shape

    def __getitem__(self, index: Any) -> Any:
        attribute, entry = self.quantizer.place(self.key)
        vector = getattr(self.quantizer.numbers, attribute)[...]
        # Slice on the host where possible, because each slice on the device would be a program of its own.
        cut = (np.asarray(vector) if _is_here(vector) else vector)[entry.start : entry.end]
        return jnp.asarray(cut.reshape(entry.shape)[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is not Ellipsis:
            value = self[...].at[index].set(value)
        self.quantizer.numbers.write({self.quantizer.name: {self.key: value}})


def _array(value: Any) -> Any:
    """The numbers; if explicit axes of a mesh split them, every device gets all of them."""
    array = value[...] if isinstance(value, nnx.Variable) else value
    mesh = explicit_mesh(array)
    return array if mesh is None else typed(array, WHOLE, mesh)


def _flat(entry: _Entry, value: Any, dtype: Any) -> jax.Array:
    if np.shape(value) != entry.shape:
        raise ValueError(f"Quantizer {entry.name!r}: expected numbers of shape {entry.shape}, got {np.shape(value)}.")
    return jnp.asarray(value, dtype).reshape(-1)


def _is_here(array: Any) -> bool:
    return not isinstance(array, Tracer) and array.is_fully_addressable


def _pieces(vector: Any, group: _Group) -> list[Any]:
    return unpacked(vector, [entry.shape for entry in group.entries])


def _write_entries(vector: Any, parts: list[tuple[_Entry, Any]]) -> jax.Array:
    shaped = [(entry, _flat(entry, value, vector.dtype)) for entry, value in parts]
    if all(_is_here(x) for x in (vector, *(value for _, value in shaped))):
        # Write on the host, because each write on the device would be a program of its own.
        copy = np.array(vector)
        for entry, value in shaped:
            copy[entry.start : entry.end] = np.asarray(value)
        return jnp.asarray(copy)
    for entry, value in shaped:
        vector = vector.at[entry.start : entry.end].set(value)
    return vector
