"""Which codes a tensor may contain, and which of its slices have their own scale."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from qjax.support.names import did_you_mean

T = TypeVar("T")
ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


_ELSEWHERE = {
    "method": "Recipe(method=..., weight_method=...) or Override(method=...) choose how scales are learned.",
    "observer": "Recipe(observer=..., weight_observer=...) choose how scales are found.",
    "scale": "A scale is found by calibration, or is part of QParams(scale, zero_point, spec).",
    "zero_point": "A zero point is found by calibration, or is part of QParams(scale, zero_point, spec).",
}
"""Names that people look for in a QSpec, and where they are set instead."""


def known_fields(elsewhere: Mapping[str, str] = MappingProxyType({})) -> Callable[[type[T]], type[T]]:
    """Decorates a dataclass: an unknown field is an error that lists the known ones and suggests the nearest.

    elsewhere: name -> where it is set instead.
    """

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__
        known = list(inspect.signature(kind).parameters)

        @functools.wraps(init)
        def checked(self: T, *args: Any, **fields: Any) -> None:
            for name in fields:
                if name not in known:
                    raise TypeError(
                        f"{kind.__name__}: expected fields among {', '.join(known)}, got {name}={fields[name]!r}. "
                        f"{elsewhere.get(name) or did_you_mean(name, known).strip() or 'Leave it out.'}"
                    )
            init(self, *args, **fields)

        kind.__init__ = checked
        return kind

    return decorate


@known_fields(_ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class QSpec:
    """Which codes a tensor may contain, and which of its elements share a scale. Hashable.

    A code c represents the real number (c - zero_point) * scale.

    Args:
      bits: 2 to 16.
      signed: codes are in two's complement; otherwise they are not negative.
      symmetric: the zero point is 0. A symmetric *unsigned* spec covers [0, hi]: it is for data that is never negative,
        such as the output of a relu.
      narrow_range: leave out the lowest code, so that signed codes are [-(2^(bits-1)-1), 2^(bits-1)-1]. None means: if
        the spec is symmetric and signed.
      axis: the axis or axes along which each index has its own scale; negative ones count from the end. None means one
        scale for the tensor.
      group_size: split `group_axis` into groups of this many consecutive elements, each with its own scale.
      group_axis: the axis that is split. For the weights of a recipe the default, 0, means the axis that each product
        sums over, whichever axis of the weight that is.

    Groups are for products of matrices that sum over one axis. If a recipe asks for groups of weights,

    - an axis whose size is no multiple of `group_size` gets groups of the greatest divisor that is at least half of
      it, such as 24 for 32 of 48 elements, or else one group;
    - the weights of convolutions, and of products that sum over several axes, get a scale per output channel;
    - a table of embeddings gets one scale, and so does a parameter that is multiplied or added. A table whose spec has
      `axis=0, group_axis=1` has groups within each row.

    `qjax.quantize` lists these tensors in one warning. If no weight has groups of the size asked for, it is an error.

    The parameters' shape lists the axes in the order of the *tensor*, whatever the order in `axis`: a kernel (128, 64)
    with `axis=-1, group_size=32, group_axis=0` has scales of shape (4, 64).

    Examples:
      >>> import qjax
      >>> four = qjax.QSpec(bits=4, axis=-1)
      >>> four.qmin, four.qmax, four.param_shape((128, 64))
      (-7, 7, (64,))
      >>> qjax.QSpec(bits=4, axis=-1, group_size=32).param_shape((128, 64))
      (4, 64)
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool | None = None
    axis: int | tuple[int, ...] | None = None
    group_size: int | None = None
    group_axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", _integer("bits", self.bits))
        if not 2 <= self.bits <= 16:
            raise ValueError(f"QSpec: bits must lie in 2..16. Got {self.bits}")
        for name in ("signed", "symmetric"):
            object.__setattr__(self, name, _boolean(name, getattr(self, name)))
        narrow = self.symmetric and self.signed if self.narrow_range is None else self.narrow_range
        object.__setattr__(self, "narrow_range", _boolean("narrow_range", narrow))
        if self.narrow_range and self.symmetric and not self.signed:
            raise ValueError(
                "QSpec: narrow_range drops the lowest code, the zero of a symmetric unsigned tensor. "
                "Use signed=True, symmetric=False or narrow_range=False"
            )
        if self.axis is not None:
            object.__setattr__(self, "axis", _axes(self.axis))
        object.__setattr__(self, "group_axis", _integer("group_axis", self.group_axis))
        if self.group_size is not None:
            object.__setattr__(self, "group_size", _integer("group_size", self.group_size))
            if self.group_size < 1:
                raise ValueError(f"QSpec: group_size must be at least 1. Got {self.group_size}")
        elif self.group_axis != 0:
            raise ValueError("QSpec: group_axis needs group_size. Give both, or neither")

    @property
    def qmin(self) -> int:
        """The lowest code."""
        lowest = -(2 ** (self.bits - 1)) if self.signed else 0
        return lowest + 1 if self.narrow_range else lowest

    @property
    def qmax(self) -> int:
        """The highest code."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def levels(self) -> int:
        """How many codes there are: `qmax - qmin + 1`."""
        return self.qmax - self.qmin + 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of int8, uint8, int16, uint16 that fits the codes."""
        width = 8 if self.bits <= 8 else 16
        return np.dtype(f"{'int' if self.signed else 'uint'}{width}")

    @property
    def per_tensor(self) -> bool:
        """Whether the whole tensor has one scale."""
        return self.axis is None and self.group_size is None

    def replace(self, **changes: Any) -> "QSpec":
        """A copy with some fields changed. An automatic narrow_range stays automatic.

        (None is resolved at construction, so `QSpec().replace(symmetric=False)` would otherwise keep the
        narrow range that only the symmetric default asked for.)
        """
        if "narrow_range" not in changes and self.narrow_range == (self.symmetric and self.signed):
            changes["narrow_range"] = None
        return dataclasses.replace(self, **changes)

    def param_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes of a tensor of `ndim` dimensions along which parameters vary, ascending and non-negative."""
        axes = () if self.axis is None else (self.axis,) if isinstance(self.axis, int) else self.axis
        if self.group_size is not None:
            axes = (*axes, self.group_axis)
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(f"QSpec: axis {axis} is out of range for a tensor of {ndim} dimensions ({self})")
        resolved = tuple(sorted(axis % ndim for axis in axes))
        if len(set(resolved)) != len(resolved):
            raise ValueError(
                f"QSpec: axis and group_axis name one axis twice for a tensor of {ndim} dimensions ({self})"
            )
        return resolved

    def param_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of scale and zero point for a tensor of `shape`: () per tensor, (16,) for 16 channels."""
        return tuple(self.param_sizes(shape)[axis] for axis in self.param_axes(len(shape)))

    def param_sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Per axis of the tensor: its number of scales."""
        kept = self.param_axes(len(shape))
        sizes = [size if axis in kept else 1 for axis, size in enumerate(shape)]
        if self.group_size is not None:
            group_axis = self.group_axis % len(shape)
            if shape[group_axis] % self.group_size:
                raise ValueError(
                    f"QSpec: group_size must divide the size of axis {group_axis} of a tensor of shape "
                    f"{shape}. Got {self.group_size}"
                )
            sizes[group_axis] = shape[group_axis] // self.group_size
        return tuple(sizes)


def dividing_group(size: int, elements: int) -> int | None:
    """The size of the groups of an axis for which groups of `size` are requested, see `QSpec`; None: one group."""
    sizes = range(size, (size + 1) // 2 - 1, -1)
    return next((n for n in sizes if elements % n == 0 and (n == size or n < elements)), None)


def split_groups(x: ArrayT, spec: QSpec) -> tuple[ArrayT, tuple[int, ...]]:
    """`x` and the axes to reduce, so that `view.max(axes)` has the parameters' shape.

    With groups the group axis is first split in two, (n,) -> (n // group_size, group_size).
    """
    kept = spec.param_axes(x.ndim)
    if spec.group_size is None:
        return x, tuple(axis for axis in range(x.ndim) if axis not in kept)
    spec.param_shape(x.shape)
    at = spec.group_axis % x.ndim
    shape = (*x.shape[:at], x.shape[at] // spec.group_size, spec.group_size, *x.shape[at + 1 :])
    reduced = (axis if axis < at else axis + 1 for axis in range(x.ndim) if axis not in kept)
    return x.reshape(shape), tuple(sorted((*reduced, at + 1)))


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"QSpec: {name} must be an integer. Got {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"QSpec: {name} must be an integer. Got {value!r}") from None


def _boolean(name: str, value: ArrayLike) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"QSpec: {name} must be True or False. Got {value!r}")
    return bool(value)


def _axes(axis: Any) -> int | tuple[int, ...] | None:
    if isinstance(axis, tuple | list):
        axes = tuple(_integer("axis", one) for one in axis)
        return None if not axes else axes[0] if len(axes) == 1 else axes
    return _integer("axis", axis)
