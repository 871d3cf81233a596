"""Cumulative sums, maxima and minima, in log2(n) steps of shift and combine.

x, x + shift(x, 1), that + shift(that, 2), that + shift(that, 4), ...    (Hillis and Steele)
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import accumulator_bounds
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Quantized,
    Role,
    Shape,
    Site,
    centered,
    real,
    register,
)
from qjax.ops.epilogue import finish
from qjax.ops.facts import ChoosesNoPlace, End, always, no_filling, no_formula, scale_of_input
from qjax.ops.fields import Axis
from qjax.ops.float_accumulator import Pending
from qjax.ops.grid import GridOp


def _attributes(eqn: Equation) -> dict[str, Any]:
    return {"axis": int(eqn.params["axis"]), "reverse": bool(eqn.params["reverse"])}


def _scanned(attributes: Attributes, x: jax.Array, combine: Callable[..., jax.Array], neutral: int) -> jax.Array:
    """Hillis and Steele: after step k every element combines itself and the 2^(k+1) - 1 elements before it."""
    axis, distance = attributes["axis"], 1
    while distance < x.shape[axis]:
        pair = (-distance, distance, 0) if attributes["reverse"] else (distance, -distance, 0)
        config = [pair if a == axis else (0, 0, 0) for a in range(x.ndim)]
        # Must be a Python number: with a tracer, JAX would trace another primitive, which the emitters do not know.
        x = combine(x, lax.pad(x, np.asarray(neutral, x.dtype), config))
        distance *= 2
    return x


class SumFields(Axis):
    """reverse: whether to start from the end of `axis`."""

    reverse: bool


@register
class CumulativeSum(Op):
    """`lax.cumsum`; the accumulator is the exact sum of centered codes."""

    name = "cumulative_sum"
    fields = SumFields
    role = Role.PRODUCER
    primitives = ("cumsum",)
    keeps_batch = always
    takes_steps = True
    operation = no_formula
    scales = scale_of_input

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return _attributes(eqn)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(real(x))
        acc = eqn.bind(x.codes.astype(jnp.float32))[0]
        return [Pending.start(acc, lax.stop_gradient(x.scale.reshape(())), eqn.out_dtypes[0], rounded=False)]

    def accumulator(self, site: Site) -> Bounds | None:
        (x,) = site.inputs
        return accumulator_bounds.within(
            accumulator_bounds.count(x.shape, [site.attributes["axis"]]) * accumulator_bounds.reach(x)
        )

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return finish([_scanned(attributes, centered(inputs[0], constants, 0), lax.add, 0)], constants, attributes)


class ExtremumFields(SumFields):
    """function: which of the elements up to this one is taken."""

    function: Literal["max", "min"]


@register
class CumulativeExtremum(GridOp):
    """`lax.cummax` and `lax.cummin`: codes are ordered like their values. attributes: function, axis, reverse."""

    name = "cumulative_extremum"
    fields = ExtremumFields
    primitives = ("cummax", "cummin")
    keeps_batch = always
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"function": eqn.primitive.removeprefix("cum"), **_attributes(eqn)}

    def hides(self, eqn: Equation) -> Collection[End]:
        return ("low",) if eqn.primitive == "cummax" else ("high",)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        info = np.iinfo(x.dtype)
        if attributes["function"] == "max":
            return _scanned(attributes, x, lax.max, info.min)
        return _scanned(attributes, x, lax.min, info.max)


class IntegerFields(SumFields):
    """function: how the elements up to this one are combined."""

    function: Literal["sum", "max", "min"]


@register
class CumulativeInteger(ChoosesNoPlace, Op):
    """`lax.cumsum`, `cummax` and `cummin` of plain int32 (positions, counts); sums modulo 2^32.

    attributes: function, axis, reverse.
    """

    name = "cumulative_integer"
    fields = IntegerFields
    role = Role.INTEGER
    primitives = ("cumsum", "cummax", "cummin")
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and np.dtype(eqn.in_dtypes[0]) == np.int32

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"function": eqn.primitive.removeprefix("cum"), **_attributes(eqn)}

    def accumulator(self, site: Site) -> Bounds | None:
        # plain integers, which wrap in the float model too
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        info = np.iinfo(np.int32)
        combine, neutral = {"sum": (lax.add, 0), "max": (lax.max, info.min), "min": (lax.min, info.max)}[
            attributes["function"]
        ]
        return _scanned(attributes, inputs[0], combine, neutral)
