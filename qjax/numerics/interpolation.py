"""Bilinear interpolation of codes, as TFLite's runtimes compute it and as one exact sum.

An element of the result lies between two rows and two columns of the image. Every method adds four codes with weights,
and rounds once; they differ in the weights.

| method | weights | who |
| --- | --- | --- |
| `fixed` of 20 bits | 10 bits each, ties away from zero | TFLite Micro and LiteRT's own kernels: int8, int16 |
| `fixed` of 22 bits | 11 bits each, ties up | XNNPACK: int8, uint8 |
| `float32` | float32, one rounding per operation, ties up at the end | LiteRT's own kernels: uint8 |
| `exact` | the fractions themselves, over a common denominator | every other target |

The weights depend on sizes alone, so they are constants that are computed on the host. If the weights of `float32` have
so few bits that no operation of the kernel rounds, they are those of `fixed` (ties up). Sources:
reference/resize_bilinear.h and optimized/resize_bilinear.h of LiteRT; indirection.c and s8-ibilinear/ of XNNPACK.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import float32
from qjax.numerics.rounding import Rounding

ResizeMethod = Literal["exact", "tflite", "tflite_optimized", "tflite_arm", "xnnpack", "xnnpack_arm"]
RESIZE_METHODS: tuple[ResizeMethod, ...] = get_args(ResizeMethod)

_SIGNIFICANT = 24
"""The bits of a float32."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The positions of an axis of the result on the axis of the image.

    size, wanted: elements of the image and of the result. align_corners: whether the first and the last ones coincide.
    half_pixel_centers: whether elements are squares whose centers coincide; at most one of the two is true.
    """

    size: int
    wanted: int
    align_corners: bool
    half_pixel_centers: bool

    def __post_init__(self) -> None:
        if self.align_corners and self.half_pixel_centers:
            raise ValueError(
                "align_corners and half_pixel_centers exclude each other: expected at most one of them, got both."
            )

    @property
    def left_out(self) -> int:
        """1 if one element less is counted, because the first and the last coincide; else 0."""
        return int(self.align_corners and self.wanted > 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """The two elements of the image for each one of the result, and their weights.

    places: int32 (2, n). weights: (2, n), int32 or float32. one: the sum of the two weights.
    """

    places: np.ndarray
    weights: np.ndarray
    one: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Interpolation:
    """The constants of a method: an `Axis` for rows and one for columns.

    kind: "fixed", "float32" or "exact". bits: of `fixed`, by which the sum is shifted. rounding: of `fixed`. products:
    of `float32`: "codes" if a code is multiplied by one weight and then by the other, "weights" if these are multiplied
    first.
    """

    rows: Axis
    columns: Axis
    kind: Literal["fixed", "float32", "exact"]
    bits: int = 0
    rounding: Rounding = Rounding.NEAREST_UP
    products: Literal["codes", "weights"] = "codes"


def interpolation(method: ResizeMethod, dtype: str, rows: Grid, columns: Grid) -> Interpolation:
    """The constants of a runtime for codes of a type.

    Raises:
      ValueError: the kernel would read outside of the image, or its constants depend on how its compiler fused floats.
    """
    if method == "exact":
        return Interpolation(_fractions(rows), _fractions(columns), "exact")
    if method.startswith("xnnpack") and dtype in ("int8", "uint8"):
        fused = method.endswith("_arm")
        return Interpolation(_eleven_bits(rows, fused), _eleven_bits(columns, fused), "fixed", 22)
    if dtype != "uint8":
        return Interpolation(_ten_bits(rows), _ten_bits(columns), "fixed", 20, Rounding.NEAREST_AWAY)
    found = _floats(rows, columns, "codes" if method == "tflite" else "weights")
    if method.endswith("_arm") and (found.kind == "float32" or _has_own_kernel(rows, columns)):
        raise ValueError(
            f"a bilinear resize of uint8, {rows.size} x {columns.size} to {rows.wanted} x {columns.wanted}: AArch64 "
            "has another kernel for this case, which was not measured and may round differently"
        )
    return found


def _has_own_kernel(rows: Grid, columns: Grid) -> bool:
    """Whether ResizeBilinear888Uint8 may be chosen, which is written for NEON."""
    return rows.half_pixel_centers and all(grid.wanted == 8 * grid.size for grid in (rows, columns))


def _inside(places: np.ndarray, grid: Grid) -> np.ndarray:
    if places.min() < 0 or places.max() >= grid.size:
        raise ValueError(
            f"a bilinear resize of {grid.size} elements to {grid.wanted}: the kernel's positions are so coarse that it "
            "reads outside of the image, so its result is not defined"
        )
    return places.astype(np.int32)


def _ten_bits(grid: Grid) -> Axis:
    """ComputeInterpolationValuesInteger. C divides toward zero."""
    one, less = 1 << 10, grid.left_out
    scale = (one * (grid.size - less) + (grid.wanted - less) // 2) // (grid.wanted - less)
    position = np.arange(grid.wanted, dtype=np.int64) * scale
    if grid.half_pixel_centers:
        position = position + scale // 2 - one // 2
    lower = np.maximum(position, 0) // one
    upper = np.minimum(np.maximum(position + one - 1, 0) // one, grid.size - 1)
    places = _inside(np.stack([lower, upper]), grid)
    # Beyond the edge both positions are one element, whose weights add up to `one`.
    fraction = np.where(lower == upper, 0, position - one * lower)
    return Axis(places, np.stack([one - fraction, fraction]).astype(np.int32), one)


def _eleven_bits(grid: Grid, fused: bool) -> Axis:
    """xnn_indirection_init_resize_bilinear2d_hwc_q11. fused: whether its compiler fused a product and a sum."""
    f32 = np.float32
    scale = f32(grid.size - grid.left_out) / f32(grid.wanted - grid.left_out)
    steps = np.arange(grid.wanted).astype(np.float32)
    if not grid.half_pixel_centers:
        return _of_positions(grid, steps * scale)
    offset = f32(0.5) * scale - f32(0.5)
    found = _of_positions(grid, steps * scale + offset)
    # Exact in float64, so this rounds once.
    once = _of_positions(grid, (steps.astype(np.float64) * np.float64(scale) + np.float64(offset)).astype(np.float32))
    if fused and not (np.array_equal(once.places, found.places) and np.array_equal(once.weights, found.weights)):
        raise ValueError(
            f"a bilinear resize of {grid.size} elements to {grid.wanted}: its weights depend on whether a compiler for "
            "AArch64 fused a product and a sum"
        )
    return found


def _of_positions(grid: Grid, position: np.ndarray) -> Axis:
    one = 1 << 11
    position = np.minimum(np.maximum(position, np.float32(0)), np.float32(grid.size - 1))
    lower = position.astype(np.int32)
    fraction = np.rint((position - lower.astype(np.float32)) * np.float32(one)).astype(np.int32)
    places = np.stack([lower, np.minimum(lower + 1, grid.size - 1)])
    return Axis(_inside(places, grid), np.stack([one - fraction, fraction]).astype(np.int32), one)


def _floats(rows: Grid, columns: Grid, products: Literal["codes", "weights"]) -> Interpolation:
    """ComputeInterpolationValues, and the weights of its two callers."""
    axes = [_positions(rows), _positions(columns)]
    powers = [_power(axis.weights) for axis in axes]
    # 8 bits of a code, the fraction's bits, one for the half that is added
    if all(power is not None for power in powers) and 8 + sum(p or 0 for p in powers) + 1 <= _SIGNIFICANT:
        shifts = [power or 0 for power in powers]
        fixed = [
            Axis(axis.places, np.rint(axis.weights.astype(np.float64) * 2.0**shift).astype(np.int32), 1 << shift)
            for axis, shift in zip(axes, shifts, strict=True)
        ]
        return Interpolation(fixed[0], fixed[1], "fixed", sum(shifts))
    return Interpolation(axes[0], axes[1], "float32", products=products)


def _positions(grid: Grid) -> Axis:
    f32 = np.float32
    scale = f32(grid.size - grid.left_out) / f32(grid.wanted - grid.left_out)
    position = np.arange(grid.wanted).astype(np.float32)
    position = (position + f32(0.5)) * scale - f32(0.5) if grid.half_pixel_centers else position * scale
    lower = np.maximum(np.floor(position).astype(np.int32), 0)
    upper = np.minimum(np.ceil(position).astype(np.int32), grid.size - 1)
    fraction = position - lower.astype(np.float32)
    return Axis(_inside(np.stack([lower, upper]), grid), np.stack([f32(1) - fraction, fraction]))


def _power(weights: np.ndarray) -> int | None:
    """The least k for which all weights are multiples of 2^-k, if there is one up to 16."""
    for k in range(17):
        scaled = weights.astype(np.float64) * 2.0**k
        if np.array_equal(scaled, np.rint(scaled)):
            return k
    return None


def _fractions(grid: Grid) -> Axis:
    """The positions as fractions of one denominator; beyond the edge the edge repeats."""
    steps = np.arange(grid.wanted, dtype=np.int64)
    if grid.half_pixel_centers:
        numerator, one = (2 * steps + 1) * grid.size - grid.wanted, 2 * grid.wanted
    else:
        numerator, one = steps * (grid.size - grid.left_out), grid.wanted - grid.left_out
    common = math.gcd(one, *(int(n) for n in numerator))
    numerator, one = numerator // common, one // common
    numerator = np.clip(numerator, 0, (grid.size - 1) * one)
    lower = numerator // one
    fraction = numerator - lower * one
    places = np.stack([lower, np.minimum(lower + 1, grid.size - 1)])
    return Axis(_inside(places, grid), np.stack([one - fraction, fraction]).astype(np.int32), int(one))


def _taken(x: Any, axis: int, places: Any) -> Any:
    """Take elements along one axis. The emitters only know gathers along the first one."""
    return jnp.moveaxis(jnp.take(jnp.moveaxis(x, axis, 0), places, axis=0, mode="clip"), 0, axis)


def blended(x: Any, axis: int, places: Any, weights: Any) -> Any:
    """Blend two elements of one axis for each element of the result: multiply by their weights and add."""
    shape = [1] * x.ndim
    shape[axis] = -1
    first, second = (_taken(x, axis, places[i]) * jnp.reshape(weights[i], shape).astype(x.dtype) for i in (0, 1))
    return first + second


def shifted(total: Any, bits: int, rounding: Rounding) -> Any:
    """total / 2^bits, to nearest: ties away from zero or up."""
    one = total.dtype.type
    if not bits:
        return total
    half = one(1 << (bits - 1))
    if rounding is Rounding.NEAREST_UP:
        return (total + half) >> one(bits)
    found = (jnp.abs(total) + half) >> one(bits)
    return jnp.where(total < 0, -found, found)


def in_floats(
    x: jax.Array, axes: tuple[int, int], places: tuple[Any, Any], weights: tuple[Any, Any], products: str
) -> jax.Array:
    """The kernels of uint8: float32 operations in their order, half a code added, the fraction truncated.

    Args:
      x: codes. axes: rows and columns. places, weights: of both, int32 (2, n) and the bits of float32 (2, n).
      products: as in `Interpolation`.
    """

    def weight(axis: int, i: int) -> float32.Float32:
        shape = [1] * x.ndim
        shape[axes[axis]] = -1
        return float32.of_bits(jnp.reshape(jnp.asarray(weights[axis][i]), shape))

    def term(row: int, column: int) -> float32.Float32:
        taken = _taken(_taken(x.astype(jnp.int32), axes[0], places[0][row]), axes[1], places[1][column])
        code, vertical, horizontal = float32.from_int32(taken), weight(0, row), weight(1, column)
        if products == "codes":
            return float32.multiply(float32.multiply(code, vertical), horizontal)
        return float32.multiply(code, float32.multiply(vertical, horizontal))

    order = ((0, 0), (1, 0), (0, 1), (1, 1)) if products == "codes" else ((0, 0), (0, 1), (1, 0), (1, 1))
    total = term(*order[0])
    for row, column in order[1:]:
        total = float32.add(total, term(row, column))
    half = float32.of_bits(jnp.asarray(np.float32(0.5).view(np.int32)))
    return float32.to_int32(float32.add(total, half), Rounding.TOWARD_ZERO)
