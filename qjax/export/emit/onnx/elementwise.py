"""The table of elementwise primitives: the ONNX operator of each, or the nodes that compute it.

An entry takes a builder, a dtype, the primitive's parameters and the names of operands that broadcast, and returns a
name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.arithmetic import count_leading_zeros, shift
from qjax.export.emit.onnx.builder import Builder

Entry = Callable[[Builder, str, Any, Sequence[str]], str]
"""(builder, dtype of the last operand, parameters, operands) -> the result."""


def _plain(op: str, **attributes: Any) -> Entry:
    return lambda b, dtype, params, x: b.op(op, *x, **attributes)


def _logic(of_bool: str, of_integers: str) -> Entry:
    return lambda b, dtype, params, x: b.op(of_bool if dtype == "bool" else of_integers, *x)


def widened(b: Builder, dtype: str, x: Sequence[str], write: Callable[..., str]) -> str:
    """write(*x), in int32 for codes of 16 bits, because ONNX Runtime 1.31 has few operators for those."""
    if dtype not in ("int16", "uint16"):
        return write(*x)
    return b.cast(write(*(b.cast(name, "int32") for name in x)), dtype)


def extreme(b: Builder, kind: str, dtype: str, x: str, y: str) -> str:
    """The "Max" or "Min" of two operands.

    For int64 it is written as a comparison, because ONNX Runtime 1.31 (AVX) compares the low halves of such numbers as
    signed ones, so that its Max(2^31, 1) is 1.
    """
    if dtype == "int64":
        return b.op("Where", b.op("Greater" if kind == "Max" else "Less", x, y), x, y)
    return widened(b, dtype, (x, y), lambda *names: b.op(kind, *names))


def _extreme(kind: str) -> Entry:
    return lambda b, dtype, params, x: extreme(b, kind, dtype, *x)


def _sign(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    """The sign; for int64 by comparisons, because ONNX Runtime 1.31's Sign(2^31) is -1."""
    if dtype != "int64":
        return b.op("Sign", *x)
    zero = b.constant(np.int64(0))
    above, below = (b.cast(b.op(name, x[0], zero), dtype) for name in ("Greater", "Less"))
    return b.op("Sub", above, below)


def _remainder(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    """The remainder; in 64 bits from the quotient, because Mod in ONNX Runtime 1.31 uses doubles beyond 2^53."""
    if dtype not in ("int64", "uint64"):
        return b.op("Mod", *x, fmod=1)
    return b.op("Sub", x[0], b.op("Mul", b.op("Div", *x), x[1]))


def _select(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    """select_n selects by number, so False is the first case. dtype: of the cases."""
    which, first, second = x
    if dtype == "bool":
        return b.op("Or", b.op("And", which, second), b.op("And", b.op("Not", which), first))
    if dtype in ("uint64", "uint32"):
        raise ValueError(f"ONNX: no form for a choice between numbers of {dtype}.")
    return widened(b, dtype, (first, second), lambda no, yes: b.op("Where", which, yes, no))


def _shift(kind: str) -> Entry:
    return lambda b, dtype, params, x: shift(b, kind, dtype, *x)


def _negative(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    if not dtype.startswith("u"):
        return b.op("Neg", x[0])
    return b.op("Sub", b.constant(np.asarray(0, dtype)), x[0])


def _not_equal(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    return b.op("Not", b.op("Equal", *x))


def _round(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    """ONNX's Round rounds ties to even."""
    if int(params["rounding_method"]) != 1:
        raise ValueError("ONNX: no form for a rounding with ties away from 0.")
    return b.op("Round", x[0])


def _is_finite(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    return b.op("Not", b.op("Or", b.op("IsNaN", x[0]), b.op("IsInf", x[0])))


def _power(b: Builder, dtype: str, params: Any, x: Sequence[str]) -> str:
    result = x[0]
    for _ in range(params["y"] - 1):
        result = b.op("Mul", result, x[0])
    return result


ELEMENTWISE: dict[str, Entry] = {
    "add": _plain("Add"),
    "sub": _plain("Sub"),
    "mul": _plain("Mul"),
    "div": _plain("Div"),
    "rem": _remainder,
    "neg": _negative,
    "abs": _plain("Abs"),
    "sign": _sign,
    "max": _extreme("Max"),
    "min": _extreme("Min"),
    "and": _logic("And", "BitwiseAnd"),
    "or": _logic("Or", "BitwiseOr"),
    "xor": _logic("Xor", "BitwiseXor"),
    "not": _logic("Not", "BitwiseNot"),
    "eq": _plain("Equal"),
    "ne": _not_equal,
    "lt": _plain("Less"),
    "le": _plain("LessOrEqual"),
    "gt": _plain("Greater"),
    "ge": _plain("GreaterOrEqual"),
    "shift_left": _shift("left"),
    "shift_right_arithmetic": _shift("right_arithmetic"),
    "shift_right_logical": _shift("right_logical"),
    "clz": lambda b, dtype, params, x: count_leading_zeros(b, dtype, x[0]),
    "select_n": _select,
    "floor": _plain("Floor"),
    "ceil": _plain("Ceil"),
    "round": _round,
    "is_finite": _is_finite,
    "integer_pow": _power,
    "square": lambda b, dtype, params, x: b.op("Mul", x[0], x[0]),
}
