"""An operation as several: what a runtime computes that has no operator for the whole.

A `Part` is one operation of such a chain, with quantization parameters of its own for its result. `Op.composed` lists
the parts of a node; `export.assign.composed` makes nodes of them. Which operations a runtime composes is said by
`Target.composed`.
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

    name: says what it computes, unique within the chain. op: the operation. inputs: other parts before this one,
    constants, or the place of an input of the whole node. shape: of the result. grid: dtype and quantization parameters
    of the result; None where the operation keeps those of its input, and for the part that `finishes`. divisor: by what
    an accumulator is divided. finishes: the clamps and the quantizer behind the whole node belong behind this part.
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
"""The affine steps behind a node: attributes and constants of each."""


def symmetric(scale: Any, bits: int) -> Operand:
    """Codes of that many bits with the zero point 0; scale: a `Real`, rounded to float32."""
    most = 2 ** (bits - 1) - 1
    return Operand((), f"int{bits}", scale.to_float32(), np.zeros((), np.int32), -most - 1, most)


def coded(name: str, value: Real, grid: Operand, rank: int) -> Codes:
    """Real constants on a symmetric grid, in the rank of what they meet: the nearest codes, saturated."""
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
