"""Elementwise operations of two tensors of 8-bit codes as products, one sum and one shift, if proven equal.

    y = clamp((a * factor0 + b * factor1 + offset) >> shift)

An addition of codes is a plane, rounded and clamped, and a product of codes is a line over the products. A runtime's
own formula takes many steps, each of which rounds. There are only 65,536 pairs of codes, so the formula is computed for
all of them. A plane is used if it has the same code for all but a few pairs, which it lists.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from qjax import ops
from qjax.export.emit.remembered import remembered
from qjax.export.emit.requantize_as_shift import Line
from qjax.jaxprs.evaluator import run_in_numpy
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.ops import formulas
from qjax.ops.base import Elementwise

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_BITS = 30
"""Bits of a factor, not counting its sign."""
_MOST_TURNS = 400
_FEWEST = 16
"""Pairs within the clamp that are needed to determine the plane."""
_ROOM = 2.0**-26
"""By how much more than needed the plane is turned, in codes."""
MOST_EXCEPTIONS = 8
"""Pairs whose code differs from the plane's; a formula that rounds several times sometimes has one or two."""
_NEAR = -(2.0**-8)
"""With a smaller gap than this, too many pairs are wrong."""


@dataclasses.dataclass(frozen=True)
class Plane:
    """clamp(floor((sum of factors * terms + offset) / 2^shift), lowest, highest).

    The terms are the two codes a and b; or, with `centers`, only one: (a - centers[0]) * (b - centers[1]). least, most:
    of the quotient, before the clamp. exceptions: (a, b, what is added to the code of this pair).
    """

    factors: tuple[int, ...]
    offset: int
    shift: int
    lowest: int
    highest: int
    least: int
    most: int
    centers: tuple[int, int] | None = None
    exceptions: tuple[tuple[int, int, int], ...] = ()

    def codes(self, a: Integers, b: Integers) -> Integers:
        """The result for codes that broadcast."""
        total: Any = sum((f * t for f, t in zip(self.factors, terms(a, b, self.centers), strict=True)), self.offset)
        codes = np.clip(total >> self.shift, self.lowest, self.highest)
        for x, y, more in self.exceptions:
            codes = codes + more * ((a == x) & (b == y))
        return codes


def terms(a: Any, b: Any, centers: tuple[int, int] | None) -> tuple[Any, ...]:
    """The numbers that the factors multiply."""
    return (a, b) if centers is None else ((a - np.int32(centers[0])) * (b - np.int32(centers[1])),)


def kernel(plane: Plane, dtype: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A plane as a function of two arrays of codes, which broadcast."""

    def codes(a: jax.Array, b: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            shape = jnp.broadcast_shapes(a.shape, b.shape)
            x, y = (jnp.broadcast_to(array.astype(jnp.int32), shape) for array in (a, b))
            total = jnp.full(shape, plane.offset, jnp.int64)
            for factor, term in zip(plane.factors, terms(x, y, plane.centers), strict=True):
                total = total + term.astype(jnp.int64) * np.int64(factor)
            found = clamped_floor(total, plane)
            for first, second, more in plane.exceptions:
                met = (x == np.int32(first)) & (y == np.int32(second))
                found = found + met.astype(jnp.int32) * np.int32(more)
            return found.astype(dtype)

    return codes


def clamped_floor(total: jax.Array, form: Plane | Line) -> jax.Array:
    """clamp(floor(total / 2^shift), lowest, highest), int32; clamped only if the quotient exceeds the codes."""
    shift = jnp.full_like(total, form.shift)
    quotient = right_shift_with_headroom(jnp, total, shift, Rounding.FLOOR).astype(jnp.int32)
    if form.least < form.lowest:
        quotient = jnp.maximum(quotient, np.int32(form.lowest))
    if form.most > form.highest:
        quotient = jnp.minimum(quotient, np.int32(form.highest))
    return quotient


@remembered
def of_node(op: str, attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> Plane | None:
    """The plane of a node with two 8-bit inputs and one number for each constant; None if it has none.

    A node without zero points at 0 (`zero_point0`, `zero_point1`) is tried as a sum, any other also as a product.
    """
    own = ops.get(op)
    dtypes = tuple(attributes.get("input_dtypes", ()))
    plain = (
        isinstance(own, Elementwise)
        and _is_pointwise(attributes, constants)
        and len(dtypes) == 2
        and {*dtypes, attributes.get("dtype")} <= {"int8", "uint8"}
        and all(np.size(value) == 1 for value in constants.values())
    )
    if not plain:
        return None
    a, b = (np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1) for dtype in dtypes)
    given = {role: np.asarray(value).reshape(()) for role, value in constants.items()}
    x = [np.broadcast_to(a[:, None], (256, 256)).astype(dtypes[0]), np.broadcast_to(b, (256, 256)).astype(dtypes[1])]
    made: Any = run_in_numpy(lambda *x: own.kernel(attributes, own.runtime(attributes, given), list(x)))(*x)
    if made.shape != (256, 256):
        return None
    table, (a, b) = np.asarray(made, np.int64), (x.astype(np.int64) for x in (a, b))
    zeros = int(given.get("zero_point0", 0)), int(given.get("zero_point1", 0))
    found = fit(table, a, b)
    return fit(table, a, b, zeros) if found is None else found


def _is_pointwise(attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    """Whether the node's formula is pointwise; the exact sum is."""
    if "formula" in attributes:
        return formulas.get(attributes["formula"]).is_pointwise(attributes, constants)
    return "rounding" in attributes


def fit(table: Integers, a: Integers, b: Integers, centers: tuple[int, int] | None = None) -> Plane | None:
    """The plane with table[i, j] for the codes a[i] and b[j], with exceptions if necessary; None if none was found.

    The lowest and the highest entry are those of the clamp.
    """
    lowest, highest = int(table.min()), int(table.max())
    inner = (table > lowest) & (table < highest)
    if np.count_nonzero(inner) < _FEWEST:
        return None
    found = [np.broadcast_to(t, table.shape).astype(np.float64) for t in terms(a[:, None], b, centers)]
    points = np.stack([*(t[inner] for t in found), np.ones(np.count_nonzero(inner))], 1)
    slopes: Floats = np.linalg.lstsq(points, table[inner] + 0.5, rcond=None)[0][:-1]
    # an offset r is right if low <= r + height < high for all pairs
    low = np.where(table > lowest, table, -np.inf)
    high = np.where(table < highest, table + 1.0, np.inf)
    nearest: Plane | None = None
    for _ in range(_MOST_TURNS):
        if not np.any(slopes):
            break
        height = sum(slope * t for slope, t in zip(slopes, found, strict=True))
        least, most = low - height, high - height
        i, j = np.unravel_index(np.argmax(least), least.shape), np.unravel_index(np.argmin(most), most.shape)
        gap = float(most[j] - least[i])
        if gap > _NEAR:
            plane = _plane(slopes, float(least[i]) + gap / 2, (lowest, highest), found, centers)
            plane = _with_exceptions(plane, table, a, b)
            if plane is not None and not plane.exceptions:
                return plane
            if plane is not None and (nearest is None or len(plane.exceptions) < len(nearest.exceptions)):
                nearest = plane
        # turn the plane about the two pairs that leave the least room
        apart = np.array([t[i] - t[j] for t in found])
        size = float(np.sum(apart * apart))
        if size == 0:
            break
        slopes = slopes + apart * ((max(-gap, 0.0) + _ROOM) / size)
    return nearest


def _with_exceptions(plane: Plane, table: Integers, a: Integers, b: Integers) -> Plane | None:
    """The plane with the pairs that have another code; None if they are too many."""
    more = table - plane.codes(a[:, None], b)
    pairs = np.argwhere(more)
    if len(pairs) > MOST_EXCEPTIONS:
        return None
    return dataclasses.replace(plane, exceptions=tuple((int(a[i]), int(b[j]), int(more[i, j])) for i, j in pairs))


def _plane(
    slopes: Floats, offset: float, ends: tuple[int, int], found: list[Floats], centers: tuple[int, int] | None
) -> Plane:
    """The plane with factors and offset rounded to integers."""
    shift = _BITS - int(np.ceil(np.log2(np.abs(slopes).max())))
    factors = tuple(int(np.rint(np.ldexp(slope, shift))) for slope in slopes)
    third = int(np.rint(np.ldexp(offset, shift)))
    total = sum((f * t.astype(np.int64) for f, t in zip(factors, found, strict=True)), np.int64(third))
    return Plane(factors, third, shift, *ends, int(total.min()) >> shift, int(total.max()) >> shift, centers)
