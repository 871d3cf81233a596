"""ONNX Runtime's softmax of codes inside of a traced kernel, in float32 as the runtime has it.

Its sum goes from left to right. So it is the last of CumSum, which adds in that order in ONNX Runtime and in the
reference evaluator; ReduceSum has an order of its own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.onnx.carried import Carried
from qjax.export.emit.onnx.ranged import read_table
from qjax.export.emit.onnx.views import View
from qjax.numerics import float32
from qjax.numerics.calls import Named
from qjax.numerics.float32 import Float32

_MOST = 2.0**16
"""A bound on the quotient, so that its conversion to int32 and the zero point stay exact."""


def qlinear_softmax(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """Of known constants, none of which leaves float32; only for ONNX Runtime, whose order of additions is known."""
    codes, *constants = operands
    known = [view.known if view.known is not None else view.value for view in constants]
    if not t.for_runtime or any(value is None for value in known):
        return None
    mantissa, exponent, share_mantissa, share_exponent, zero_point = (np.asarray(value, np.int32) for value in known)
    powers, shares = (
        float32.to_array(Float32(*number)) for number in ((mantissa, exponent), (share_mantissa, share_exponent))
    )
    # S is at least the greatest exponential, so the quotient is bounded by the greatest share divided by it
    if not np.isfinite(shares).all() or shares[0] / powers[0] > _MOST:
        return None
    b, last = t.builder, len(codes.shape) - 1
    x = t.materialized(t.carried(codes, "int32"))
    difference = b.op("Sub", b.op("ReduceMax", x, b.integers([last]), keepdims=1), x)
    place = View.full(difference, "int32", codes.shape)
    terms, parts = (read_table(t, b.constant(table), place) for table in (powers, shares))
    sums = b.op("CumSum", terms, b.constant(np.int64(last)))
    total = b.op("Gather", sums, b.integers([codes.shape[last] - 1]), axis=last)
    rounded = b.op("Round", b.op("Div", parts, total))
    moved = b.op("Add", b.cast(rounded, "int32"), b.constant(zero_point.reshape(())))
    low = int(zero_point)
    return [dataclasses.replace(place, name=moved, low=low, high=low + int(_MOST) + 1)]
