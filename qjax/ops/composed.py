"""Splits an operation into several, for a runtime that has no operator for the whole.

A `Part` is one operation of such a chain, with its own quantization parameters for its result. `Op.composed` lists the
parts of a node; `assign.decompose_ops` makes nodes of them. `Target.composed` defines which operations a runtime
composes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Union

import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.softfloat import Real
from qjax.ops.base import Array, Attributes, Constants, Operand


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """A constant tensor of codes; operand: its shape and quantization parameters."""

    name: str
    value: Array
    operand: Operand


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One operation of a chain.

    name: describes what it computes, unique within the chain. op: the operation. inputs: other parts before this one,
    constants, or the index of an input of the whole node. shape: of the result. grid: dtype and quantization parameters
    of the result; None if they are those of the input, and for the part that `finishes`. divisor: the number by which
    an accumulator is divided. finishes: whether the clamps and the quantizer after the whole node belong after this
    part.
    """

    name: str
    op: str
    inputs: tuple[Union["Part", Codes, int], ...]
    shape: tuple[int | None, ...]
    grid: Operand | None = None
    attributes: Attributes = dataclasses.field(default_factory=dict)
    constants: Constants = dataclasses.field(default_factory=dict)
    divisor: int = 1
    finishes: bool = False


Steps = Sequence[tuple[Attributes, Mapping[str, Any]]]
"""The affine steps after a node: attributes and constants of each."""


def symmetric(scale: Any, bits: int) -> Operand:
    """A grid for codes of that many bits with the zero point 0; scale: a `Real`, rounded to float32."""
    most = 2 ** (bits - 1) - 1
    return Operand((), f"int{bits}", scale.to_float32(), np.zeros((), np.int32), -most - 1, most)


def coded(name: str, value: Real, grid: Operand, rank: int) -> Codes:
    """The nearest codes of real constants on a symmetric grid, saturated, with the rank of the other operand."""
    value = value.reshape((1,) * (rank - len(value.shape)) + value.shape)
    codes = (value / Real.of(grid.scale)).to_int32()
    xp = host_or_trace(codes)
    assert grid.qmax is not None
    codes = xp.clip(codes, np.int32(-grid.qmax), np.int32(grid.qmax)).astype(grid.dtype)
    return Codes(name, codes, dataclasses.replace(grid, shape=tuple(np.shape(codes))))


def largest(value: Real) -> Real:
    """The greatest magnitude, a scalar; at least 2^-100."""
    found = abs(value).to_float32()
    xp = jnp if host_or_trace(found) is jnp else np
    return Real.of(xp.maximum(xp.max(found), np.float32(2.0**-100)).astype(np.float32))
