"""Elementwise functions, which are tables of codes, and SOFTMAX.

A table contains what the target's own kernel computes. qjax knows it for LOGISTIC and TANH of int8 codes; for all
others the installed runtime is run, code by code (`run_kernel`). A target that is no runtime of .tflite files has the
correctly rounded table of the real function.
"""

import math
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.chains import Chain, Source, Step
from qjax.contrib.importers.tflite.kernels import LOG_SOFTMAX
from qjax.contrib.importers.tflite.run_kernel import Function
from qjax.contrib.importers.tflite.values import axis_of, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.numerics.elementary import Expression
from qjax.numerics.gemmlowp_log_softmax import GREATEST_SCALE, LEAST_SCALE, SCALE, ZERO_POINT
from qjax.numerics.softmax import SUM_BITS
from qjax.support.errors import Unsupported

_ZERO, _HALF, _ONE, _THREE, _SIX = (float(n).hex() for n in (0, 0.5, 1, 3, 6))
_STEPS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "LOGISTIC": [("logistic", (0,))],
    "TANH": [("tanh", (0,))],
    "EXP": [("exp", (0,))],
    "LOG": [("log", (0,))],
    "SQRT": [("sqrt", (0,))],
    "RSQRT": [("rsqrt", (0,))],
    "ABS": [("abs", (0,))],
    "NEG": [("neg", (0,))],
    "ELU": [("expm1", (0,)), ("gt", (0, _ZERO)), ("select", (2, 1, 0))],
    "RELU_0_TO_1": [("clamp", (_ZERO, 0, _ONE))],
    "HARD_SWISH": [("add", (0, _THREE)), ("clamp", (_ZERO, 1, _SIX)), ("mul", (0, 2)), ("div", (3, _SIX))],
}


_SOFTMAX = (("int8", "int8"), ("uint8", "uint8"), ("int16", "int16"), ("int8", "int16"))


def _expression(operator: Operator) -> Expression:
    if operator.name == "LEAKY_RELU":
        slope = float(np.uint32(operator.options["alpha"]).view(np.float32))
        if not math.isfinite(slope):
            raise bad(operator, f"a slope of {slope}")
        return Expression((("mul", (0, slope.hex())), ("gt", (0, _ZERO)), ("select", (2, 1, 0))))
    if operator.name == "GELU":
        if operator.options["approximate"]:
            cube: list[tuple[str, tuple[Any, ...]]] = [("integer_pow", (0, _THREE)), ("mul", (1, (0.044715).hex()))]
            steps = [*cube, ("add", (0, 2)), ("mul", (3, math.sqrt(2 / math.pi).hex())), ("tanh", (4,))]
        else:
            steps = [("mul", (0, math.sqrt(0.5).hex())), ("erf", (1,))]
        last = len(steps)
        steps = [*steps, ("add", (last, _ONE)), ("mul", (0, last + 1)), ("mul", (last + 2, _HALF))]
        return Expression(tuple(steps))
    return Expression(tuple(_STEPS[operator.name]))


@reads(*_STEPS, "LEAKY_RELU", "GELU")
def function(walk: Walk, operator: Operator) -> None:
    """A table; the codes of a runtime's kernel are computed when the target is known."""
    x = walk.codes_of(operator, 0)
    q = x.quantization
    name, grid = walk.result(operator, x.shape)
    output = walk.output(operator)
    if output.dtype != x.dtype:
        raise Unsupported(
            f"codes of {x.dtype} become {output.dtype}", "Use the same number of bits for input and output"
        )
    options = {
        "LEAKY_RELU": lambda: {"alpha": float(np.uint32(operator.options["alpha"]).view(np.float32))},
        "GELU": lambda: {"approximate": bool(operator.options["approximate"])},
    }.get(operator.name, dict)()
    walk.functions[name] = Function(operator.name, options, x.dtype, q, grid)
    walk.node("table", [x], name, {"expression": _expression(operator).to_json()})


_PRELU = (Step("MINIMUM", (0, 0.0)), Step("MUL", (2, 1)), Step("MAXIMUM", (0, 0.0)), Step("ADD", (3, 4)))
"""min(x, 0) alpha + max(x, 0) of x, alpha."""


@reads("PRELU")
def prelu(walk: Walk, operator: Operator) -> None:
    """A table with an entry for each pair of a code and a slope."""
    x, slope = (walk.codes_of(operator, place) for place in (0, 1))
    output = walk.output(operator)
    if not x.dtype == slope.dtype == output.dtype or x.dtype == "int16":
        raise Unsupported(
            f"codes of {x.dtype} with slopes of {slope.dtype} become {output.dtype}",
            "Use 8 bits for all three, so that all pairs fit a table",
        )
    try:
        shape = np.broadcast_shapes(x.shape, slope.shape)
    except ValueError:
        raise bad(operator, f"shapes {x.shape} and {slope.shape}") from None
    name, grid = walk.result(operator, shape)
    held = walk.tensors[slope.name].value
    low, high = slope.quantization.qmin, slope.quantization.qmax
    if held is not None and np.size(held):
        low, high = int(np.min(held)), int(np.max(held))
    sources = (
        Source(x.dtype, x.quantization, x.quantization.qmin, x.quantization.qmax),
        Source(slope.dtype, slope.quantization, low, high),
    )
    walk.functions[name] = Chain(sources, _PRELU, output.dtype, grid, operator.name)
    ranges = [[source.low, source.high] for source in sources]
    walk.node("pair_table", [walk.ranked(y, len(shape), name) for y in (x, slope)], name, {"ranges": ranges})


@reads("SOFTMAX")
def softmax(walk: Walk, operator: Operator) -> None:
    """Softmax along the last axis; whether the target's kernel is known is checked when the target is."""
    x = walk.codes_of(operator, 0)
    beta = float(np.uint32(operator.options["beta"]).view(np.float32))
    if beta != 1:
        raise Unsupported(f"a beta of {beta:.6g}", "Multiply its input first, or leave beta at 1")
    if not x.shape or not x.shape[-1]:
        raise bad(operator, f"an input of {x.shape}")
    name, _ = walk.result(operator, x.shape)
    if (x.dtype, walk.output(operator).dtype) not in _SOFTMAX:
        raise Unsupported(
            f"codes of {x.dtype} become {walk.output(operator).dtype}",
            "Use the same number of bits for input and output",
        )
    walk.node("softmax", [x], name, {"axes": [axis_of(-1, len(x.shape), operator)]})


@reads("LOG_SOFTMAX")
def log_softmax(walk: Walk, operator: Operator) -> None:
    """Log-softmax along the last axis, with the only scale and zero point that its kernels support."""
    x, stated = walk.codes_of(operator, 0), walk.output(operator)
    if not x.dtype == stated.dtype == "int8":
        raise Unsupported(f"codes of {x.dtype} become {stated.dtype}", "Use int8 for both")
    name, grid = walk.result(operator, x.shape)
    if grid.scale != SCALE or int(grid.zero_point) != ZERO_POINT:
        raise Unsupported(
            f"its output has the scale {grid.scale:.6g} and the zero point {int(grid.zero_point)}",
            f"Its kernels have {SCALE} and {ZERO_POINT}",
        )
    if not LEAST_SCALE < x.quantization.scale < GREATEST_SCALE or not x.shape or not 1 <= x.shape[-1] < 1 << SUM_BITS:
        raise Unsupported(
            f"{x.shape[-1:]} codes with the scale {x.quantization.scale:.6g}",
            f"qjax knows its kernels for 1 to {(1 << SUM_BITS) - 1} codes, and scales from 2^-20 to 16",
        )
    walk.marks[name] = LOG_SOFTMAX
    walk.node("log_softmax", [x], name, {"axes": [len(x.shape) - 1], "is_operator": True})
