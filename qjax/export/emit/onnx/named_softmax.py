"""ONNX Runtime's softmax of codes inside of a traced kernel, in float32 as in the runtime.

Its sum goes from left to right and is therefore the last element of CumSum, which adds in that order in ONNX Runtime
and in the reference evaluator; ReduceSum has an order of its own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.onnx.carried import Carried
from qjax.export.emit.onnx.ranged import read_table
from qjax.export.emit.onnx.views import View
from qjax.numerics.calls import Named

_MOST = 2.0**16
"""A bound on the quotient, so that its conversion to int32 and the zero point stay exact."""


Number = tuple[np.ndarray, np.ndarray]
"""Mantissas and exponents."""


def _in_float32(powers: Number, shares: Number) -> tuple[np.ndarray, np.ndarray] | None:
    """Both tables divided by one power of two, if no number then is too large and none loses a bit.

    Neither sums nor quotients change by it. S is at least the greatest exponential, so the greatest share divided by
    that bounds the quotient.
    """
    wide = [np.ldexp(m.astype(np.float64), e) for m, e in (powers, shares)]
    if wide[1][0] / wide[0][0] > _MOST:
        return None
    excess = max(0, int(np.frexp(wide[1].max())[1]) - 127)
    wide = [np.ldexp(table, -excess) for table in wide]
    least = min(float(table[table > 0].min()) for table in wide)
    if excess and least < float(np.finfo(np.float32).tiny):
        return None
    return wide[0].astype(np.float32), wide[1].astype(np.float32)


def qlinear_softmax(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For known constants that float32 represents, maybe scaled; for ONNX Runtime, whose additions have an order."""
    codes, *constants = operands
    known = [view.known if view.known is not None else view.value for view in constants]
    if not t.for_runtime or any(value is None for value in known):
        return None
    mantissa, exponent, share_mantissa, share_exponent, zero_point = (np.asarray(value, np.int32) for value in known)
    scaled = _in_float32((mantissa, exponent), (share_mantissa, share_exponent))
    if scaled is None:
        return None
    powers, shares = scaled
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
