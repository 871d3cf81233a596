"""A requantization rule inside of a traced kernel, as one multiplication and shift on the possible accumulators."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx import requantizing
from qjax.export.emit.onnx.carried import Carried
from qjax.export.emit.onnx.views import View
from qjax.export.emit.requantizations import line_within
from qjax.numerics.calls import Named


def rounded_codes(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For constants that are one number each; None for any other, and if the rule has no such form."""
    rule, qmin, qmax = call.static
    acc, *values, zero_point = operands
    numbers = [view.value for view in (*values, zero_point)]
    code = next((dtype for dtype in ("int8", "uint8") if bounds.fits((qmin, qmax), dtype)), None)
    plain = (
        rule.monotone
        and acc.dtype == "int32"
        and code is not None
        and len(values) == len(rule.fields)
        and all(number is not None for number in numbers)
    )
    if not plain or code is None:
        return None
    flat = {role: np.asarray([number], np.int32) for role, number in zip(rule.fields, numbers, strict=False)}
    flat["bias"] = np.zeros(1, np.int32)
    ends = np.asarray([acc.range[0]], np.int64), np.asarray([acc.range[1]], np.int64)
    line = line_within(rule, flat, np.asarray(numbers[-1], np.int32), ends, (qmin, qmax))
    if line is None:
        return None
    found = requantizing.written(t, code, t.settled(acc), line, ())
    return [dataclasses.replace(found, dtype="int32", held=code, low=qmin, high=qmax, value=None, known=None)]
