"""A normalisation as a chain of operations of 16 bits, for runtimes that have no operator for it.

For codes x of scale s, their number n per row, and a reach R (the greatest difference of two codes, as a power of two):

    x' = x on 16 bits                 s_d = s R 2^-15     QUANTIZE (of 8 bits; exact)
    m  = mean(x')                     s_d                 MEAN
    d  = x' - m                       s_d                 SUB
    q  = d d                          s^2 R^2 2^-15       MUL
    v  = mean(q)                      s^2 R^2 2^-17       MEAN
    r  = 1 / sqrt(v n / divisor + e)  greatest r 2^-15    a table of the codes of v
    y' = d r                          2^-15 sqrt(divisor) MUL, the scale rounded up to a power of two
    t  = y' gamma                     s_y 2^-6            MUL with constants of 16 bits
    t  = t + beta                     s_y 2^-6            ADD of constants
    y  = t                            s_y                 QUANTIZE (to 8 bits)

No grid depends on the data, so nothing is calibrated and nothing saturates: |d| < R s, q < (R s)^2, and v is at most a
quarter of that, as the variance of numbers in an interval of length R s. R is 2^8 for codes of 8 bits and 2^16 for
those of 16, whose differences lose one bit. If no mean is subtracted, d is x' itself, and q and v have the scale s^2
c^2 / 32767, where c is the code that is farthest from the zero point. For 16-bit results t has the scale 2 s_y, and the
last operation writes them.

Codes of 16 bits compute v a second time, in steps 2^6 times finer, and use its root where that does not saturate
(SELECT_V2).

For codes of 8 bits v has steps of s^2 / 2, whereas rounding x adds s^2 / 12 to a variance. A row with few different
codes therefore loses more precision by its own quantization.
"""

import dataclasses
import math

import numpy as np

from qjax.numerics.elementary import Expression
from qjax.numerics.elementary.expression import literal
from qjax.numerics.softfloat import Real
from qjax.ops.base import Attributes, Operand, Preparation
from qjax.ops.composed import Part, coded, largest, symmetric
from qjax.ops.epilogue import Affine

_WIDE = ("int8", "int16")
_BITS = 15
_FINER = 6
"""The second v of 16 bits has steps that are finer by 2^6."""


def parts(given: Preparation, affine: Affine) -> list[Part] | None:
    """The chain; affine: gamma and beta, and all steps after the node. None: codes for which it is not defined."""
    x, y, attributes = given.inputs[0], given.output, given.attributes
    narrow = x.dtype == "int8"
    sizes = [x.shape[axis] for axis in attributes["axes"]]
    if x.dtype not in _WIDE or y.dtype not in _WIDE or attributes["groups"] != 1 or None in sizes:
        return None
    if not narrow and x.qmin != -(x.qmax or 0):
        return None  # codes of 16 bits with a zero point
    count, center = math.prod(size for size in sizes if size is not None), attributes["center"]
    divisor = attributes["divisor"] or count
    reach = 8 if narrow else 16 if center else 15
    scale = Real.of(x.scale)
    grid = symmetric(scale.scale_by_power_of_two(np.int32(reach - _BITS)), 16)
    square = scale * scale
    if center:
        squares = symmetric(square.scale_by_power_of_two(np.int32(2 * reach - _BITS)), 16)
        power = symmetric(Real.of(squares.scale).scale_by_power_of_two(np.int32(-2)), 16)
    else:
        squares = power = symmetric(square * _farthest(x) / Real.of(np.float32(2**_BITS - 1)), 16)
    kept = tuple(1 if axis in attributes["axes"] else size for axis, size in enumerate(x.shape))

    made: list[Part] = []

    def add(part: Part) -> Part:
        made.append(part)
        return part

    def mean(name: str, of: Part | int, of_grid: Operand) -> Part:
        left = tuple(size for axis, size in enumerate(x.shape) if axis not in attributes["axes"])
        return add(Part(name, "sum", (of,), left, of_grid, {"axes": list(attributes["axes"])}, divisor=count))

    def spread(name: str, of: Part) -> Part:
        places = [axis for axis in range(len(kept)) if axis not in attributes["axes"]]
        return add(Part(name, "broadcast", (of,), kept, None, {"shape": list(kept), "dimensions": places}))

    d: Part | int = add(Part("wide", "rescale", (0,), x.shape, grid)) if narrow else 0
    if center:
        # the mean of codes of 16 bits stays on their own grid
        average = mean("mean", d, grid if narrow else dataclasses.replace(x, shape=()))
        d = add(Part("centered", "add", (d, spread("means", average)), x.shape, grid, {"subtract": True}))
    q = add(Part("squares", "multiply", (d, d), x.shape, squares))
    v = mean("power", q, power)
    inverse, root = _root(attributes, count / divisor, power)
    r = add(Part("root", "table", (v,), v.shape, inverse, {"expression": root.to_json()}))
    if not narrow:
        finer = symmetric(Real.of(power.scale).scale_by_power_of_two(np.int32(-_FINER)), 16)
        w = mean("fine power", q, finer)
        other = add(Part("fine root", "table", (w,), v.shape, inverse, {"expression": root.to_json()}))
        most = (Real.of(finer.scale) * Real.of(np.float32(2**_BITS - 1.5))).to_float32()
        ends = Operand((), "bool")
        full = add(Part("saturated", "compare", (w,), v.shape, ends, {"function": "ge"}, {"right": most}))
        r = add(Part("chosen root", "select", (full, other, r), v.shape))
    unit = symmetric(Real.of(np.float32(2.0 ** (math.ceil(math.log2(divisor) / 2) - _BITS))), 16)
    normal = add(Part("unit", "multiply", (d, spread("roots", r)), x.shape, unit))
    return [*made, *_scaled(given, affine, normal)]


def _farthest(x: Operand) -> Real:
    """The square of the code that is farthest from the zero point."""
    low, high = (Real.of(np.asarray(bound, np.int32)) - Real.of(x.zero_point) for bound in (x.qmin, x.qmax))
    farthest = abs(low).maximum(abs(high)).reshape(())
    return farthest * farthest


def _root(attributes: Attributes, share: float, power: Operand) -> tuple[Operand, Expression]:
    """The grid and the function of 1 / sqrt(v share + epsilon), or of 1 / max(sqrt(v share), epsilon).

    The greatest code is that of v = 1, or of epsilon if that is greater; v = 0 saturates.
    """
    epsilon, factor = attributes["epsilon"], np.float64(share)
    joined = attributes["joined"]
    least = epsilon * epsilon if joined == "max" else epsilon
    smallest = (Real.of(power.scale) * Real.of(factor)).maximum(Real.of(np.float64(least)))
    # slightly larger, so that rounding to float32 cannot push the greatest number beyond the codes
    step = Real.of(np.float64(2.0**-_BITS * (1 + 2.0**-14))) / smallest.sqrt()
    steps = (
        ("max", (0, literal(0.0))),
        ("mul", (1, literal(factor))),
        ("max" if joined == "max" else "add", (2, literal(least))),
        ("rsqrt", (3,)),
    )
    return symmetric(step, 16), Expression(steps)


def _scaled(given: Preparation, affine: Affine, normal: Part) -> list[Part]:
    """The steps after the normalised numbers."""
    y, shape = given.output, normal.shape
    s_y, wide = Real.of(y.scale), y.dtype == "int16"
    between = symmetric(s_y.scale_by_power_of_two(np.int32(1 if wide else -6)), 16)
    gamma = coded("gamma", affine.g, symmetric(largest(affine.g) / Real.of(np.float32(2**_BITS - 1)), 16), len(shape))
    scaled = Part("scaled", "multiply", (normal, gamma), shape, between)
    beta = coded("beta", affine.b, between, len(shape))
    shifted = Part("shifted", "add", (scaled, beta), shape, None if wide else between, {"subtract": False})
    if wide:
        return [scaled, dataclasses.replace(shifted, finishes=True)]
    return [scaled, shifted, Part("narrow", "rescale", (shifted,), shape, finishes=True)]
