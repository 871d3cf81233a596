"""Bilinear resizing of images of codes, read from files of other tools; `jax.image.resize` is a product of matrices."""

from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import interpolation
from qjax.numerics._namespace import traced, wide
from qjax.numerics.interpolation import Grid, Interpolation
from qjax.numerics.rounding import Rounding
from qjax.numerics.softfloat import Real
from qjax.ops import accumulator_bounds
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Op,
    Operand,
    Preparation,
    Prepared,
    Role,
    Shape,
    Site,
    centered,
    register,
)
from qjax.ops.epilogue import clamp_codes, finish_sum, fold_sum, greatest_shift
from qjax.ops.facts import always
from qjax.ops.fields import Natural
from qjax.support.errors import Unsupported

_RUNTIMES = ("int8", "uint8", "int16")


class PreparedFields(TypedDict):
    """method: "fixed", "float32" or "exact", see `numerics.interpolation`. The other fields belong to these methods."""

    method: str
    bits: NotRequired[int]
    rounding: NotRequired[str]
    products: NotRequired[str]


class Fields(TypedDict):
    """axes: of rows and columns. size: their sizes in the result."""

    axes: list[Natural]
    size: list[Natural]
    align_corners: bool
    half_pixel_centers: bool


@register
class ResizeBilinear(Op):
    """An image in another size: four weighted codes are added, and the sum is rounded once.

    constants: row_places, column_places, row_weights and column_weights are int32 (2, n). For the method `float32`, the
    weights are the bits of float32 numbers.
    """

    name = "resize_bilinear"
    fields = Fields
    prepared = PreparedFields
    role = Role.PRODUCER
    takes_steps = False
    keeps_batch = always

    def prepare(self, given: Preparation) -> Prepared:
        x, y = given.inputs[0], given.output
        native = x.dtype == y.dtype and x.dtype in _RUNTIMES and _one_grid(x, y)
        grids = _grids(given.attributes, x.shape)
        method = given.target.resize if native else "exact"
        try:
            found = interpolation.interpolation(method, x.dtype, *grids)
        except ValueError as error:
            raise Unsupported(
                f"{error} under {given.target.name!r}", "Use another target, or resize to another size"
            ) from None
        constants: dict[str, Any] = {
            "row_places": found.rows.places,
            "row_weights": found.rows.weights.view(np.int32),
            "column_places": found.columns.places,
            "column_weights": found.columns.weights.view(np.int32),
        }
        return Prepared(*_of(found, constants, given))

    def restated(self, given: Preparation) -> Prepared | None:
        return self.prepare(given)

    def arithmetic(self, attributes: Attributes) -> str:
        method = attributes["method"]
        if method == "fixed":
            return f"four codes with weights of {attributes['bits']} bits together ({attributes['rounding']})"
        return (
            "four codes with weights of float32" if method == "float32" else "four codes with fractions, one rounding"
        )

    def accumulator(self, site: Site) -> Bounds | None:
        (x,) = site.inputs
        assert x.qmin is not None
        assert x.qmax is not None
        if site.attributes["method"] == "float32" or _is_wide(site.attributes["method"], x.dtype):
            return None
        held = [np.asarray(site.constants[f"{name}_weights"], np.int64) for name in ("row", "column")]
        most = int(np.prod([np.abs(weights).sum(axis=0).max() for weights in held]))
        exact = site.attributes["method"] == "exact"
        return accumulator_bounds.within(
            most * (accumulator_bounds.reach(x) if exact else max(abs(x.qmin), abs(x.qmax)))
        )

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, method = inputs[0], attributes["method"]
        rows, columns = attributes["axes"]
        places = jnp.asarray(constants["row_places"]), jnp.asarray(constants["column_places"])
        weights = jnp.asarray(constants["row_weights"]), jnp.asarray(constants["column_weights"])
        if method == "float32":
            codes = interpolation.in_floats(x, (rows, columns), places, weights, attributes["products"])
            return _narrowed(codes, constants, attributes)
        if method == "exact":
            total = interpolation.blended(centered(x, constants, 0), rows, places[0], weights[0])
            return finish_sum([interpolation.blended(total, columns, places[1], weights[1])], constants, attributes)
        bits, rounding = attributes["bits"], Rounding(attributes["rounding"])
        if not _is_wide(method, str(x.dtype)):
            total = interpolation.blended(x.astype(jnp.int32), rows, places[0], weights[0])
            total = interpolation.blended(total, columns, places[1], weights[1])
            return _narrowed(interpolation.shifted(total, bits, rounding), constants, attributes)
        with wide(jnp):
            total = interpolation.blended(x.astype(jnp.int64), rows, places[0], weights[0])
            total = interpolation.blended(total, columns, places[1], weights[1])
            codes = interpolation.shifted(total, bits, rounding).astype(jnp.int32)
        return _narrowed(codes, constants, attributes)


def _one_grid(x: Operand, y: Operand) -> bool:
    if traced(x.scale, x.zero_point, y.scale, y.zero_point):
        return False
    return bool(np.array_equal(x.scale, y.scale) and np.array_equal(x.zero_point, y.zero_point))


def _grids(attributes: Attributes, shape: Shape) -> tuple[Grid, Grid]:
    found: list[Grid] = []
    for axis, wanted in zip(attributes["axes"], attributes["size"], strict=True):
        size = shape[axis]
        if size is None:
            raise Unsupported("it resizes the batch, which has no fixed size", "Resize along other axes")
        found.append(Grid(size, wanted, attributes["align_corners"], attributes["half_pixel_centers"]))
    return found[0], found[1]


def _of(found: Interpolation, constants: dict[str, Any], given: Preparation) -> tuple[dict[str, Any], dict[str, Any]]:
    if found.kind == "float32":
        return constants, {"method": found.kind, "products": found.products}
    if found.kind == "fixed":
        return constants, {"method": found.kind, "bits": found.bits, "rounding": found.rounding.value}
    x, y = given.inputs[0], given.output
    step = Real.of(x.scale) / Real.of(float(found.rows.one * found.columns.one))
    folded = fold_sum([step], y.scale, given.affine, greatest_shift(y.qmin, y.qmax))
    return constants | folded, {"method": found.kind, "rounding": given.target.rounding.value}


def _is_wide(method: str, dtype: str) -> bool:
    """Whether the sum needs more than 32 bits."""
    return method == "fixed" and dtype == "int16"


def _narrowed(codes: jax.Array, constants: Constants, attributes: Attributes) -> jax.Array:
    return clamp_codes(codes, constants).astype(attributes["dtype"])
