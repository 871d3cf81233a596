"""A product of two activations with a factor behind it, as the product and a multiplication by a constant.

No runtime's product of activations takes a factor g. With y's scale s_y and zero point z_y,

    p = x w, scale s_y / |g|, zero point z_y         BATCH_MATMUL
    y = p |g|, the constant being the code 1         MUL

has one rounding only: the codes of p are those of y, because the scales cancel. So g must not be negative.
"""

import dataclasses
import math

import numpy as np

from qjax.numerics.softfloat import Real
from qjax.ops.base import Preparation
from qjax.ops.composed import Codes, Part, Steps, symmetric
from qjax.ops.epilogue import Affine

_FACTORS = ("mul", "div")


def parts(given: Preparation, affine: Affine, steps: Steps) -> list[Part] | None:
    """The chain; None: no factor, or other steps than factors."""
    y, attributes = given.output, given.attributes
    numbers = [value for _, constants in steps for value in constants.values()]
    if attributes["weight"] is not None or not steps or y.dtype not in ("int8", "int16"):
        return None
    if any(own.get("step") not in _FACTORS for own, _ in steps) or any(math.prod(np.shape(n)) != 1 for n in numbers):
        return None
    factor = abs(affine.g).maximum(Real.of(np.float32(2.0**-100))).reshape(())
    scale = (Real.of(y.scale) / factor).to_float32()
    product = Part("product", "dot", (0, 1), y.shape, dataclasses.replace(y, shape=(), scale=scale), attributes)
    grid = symmetric(factor, 8 if y.dtype == "int8" else 16)
    shape = (1,) * len(y.shape)
    code = affine.g.reshape(shape).sign.astype(y.dtype)
    constant = Codes("factor", code, dataclasses.replace(grid, shape=shape))
    return [product, Part("scaled", "multiply", (product, constant), y.shape, finishes=True)]
