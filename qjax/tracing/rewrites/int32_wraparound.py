"""Writes out casts and arithmetic of integers that may wrap around, in int32.

A graph holds every integer as int32, and a cast between integers is no operation there. A cast that may change the
number is therefore written as arithmetic:

    x.astype(int8)                             ->    ((x & 255) ^ 128) - 128
    x.astype(uint8)                            ->    x & 255
    x.astype(uint32), + - * & | ^ ~ of uint32  ->    the same in int32, whose bits are equal

The last line holds for the bits but not for the order: a number from 2^31 is negative in int32. It is therefore used
only where everything that reads the result is such arithmetic again, a cast to other integers, or the caller.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.composite import composite
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined

SAME = "same_number"
"""The primitive of a cast between integers that does not change the number in the graph."""

_RING: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
}
_MOVES = IDENTITIES | frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose slice rev concatenate".split()  # noqa: SIM905
)


def keeps_number(eqn: Equation) -> bool:
    """Whether a cast preserves the number in the graph: between floats, or between integers without wrapping."""
    if eqn.primitive == SAME:
        return True
    if eqn.primitive != "convert_element_type" or eqn.inputs[0].is_float != eqn.outputs[0].is_float:
        return False
    if eqn.inputs[0].is_float:
        return True
    before, after = np.dtype(eqn.in_dtypes[0]), np.dtype(eqn.out_dtypes[0])
    # an input of 64 bits is checked to be within int32, and int32 has the bits of uint32
    return np.can_cast(before, after) or (after.kind == "i" and after.itemsize >= 4)


def write_wraps(program: Program) -> Program:
    """Write such casts and arithmetic in int32."""
    return _Wraps(program, set(program.outputs)).rewritten()


def write_wraps_inside(program: Program) -> Program:
    """The same for a body, whose results are read by other equations."""
    return _Wraps(program, set()).rewritten()


class _Wraps:
    """returned: the values that the caller receives."""

    def __init__(self, program: Program, returned: set[Value]) -> None:
        self.program = program
        self.returned = returned
        self.readers: dict[Value, list[Equation]] = {}
        for eqn in program.equations:
            for value in eqn.inputs:
                self.readers.setdefault(value, []).append(eqn)

    def rewritten(self) -> Program:
        if not any(_narrows(eqn) or _unsigned(eqn) for eqn in self.program.equations):
            return self.program
        equations: list[Equation] = []
        known: dict[Value, bool] = {}
        for eqn in self.program.equations:
            if _narrows(eqn):
                equations += _write_in_int32(eqn, _narrowed(np.dtype(eqn.out_dtypes[0])))
            elif _unsigned(eqn) and self._is_free(eqn.outputs[0], known):
                equations += _write_in_int32(eqn, _RING.get(eqn.primitive, lambda x: x))
            else:
                equations.append(eqn)
        return dataclasses.replace(self.program, equations=tuple(equations))

    def _is_free(self, value: Value, known: dict[Value, bool]) -> bool:
        """Whether nothing depends on the order of a value, so that its bits are enough."""
        if value not in known:
            known[value] = True  # the answer while its own readers are examined
            readers = self.readers.get(value, ())
            inside = value not in self.program.outputs or value in self.returned
            known[value] = inside and all(self._reads_bits(eqn, known) for eqn in readers)
        return known[value]

    def _reads_bits(self, eqn: Equation, known: dict[Value, bool]) -> bool:
        if eqn.body is not None or eqn.function:
            return False
        if eqn.primitive == "convert_element_type":
            kind = np.dtype(eqn.out_dtypes[0])
            return kind.kind in "biu" and (not _unsigned(eqn) or self._is_free(eqn.outputs[0], known))
        if _unsigned(eqn) or eqn.primitive in _MOVES:
            return self._is_free(eqn.outputs[0], known)
        return False


def _is_data(eqn: Equation) -> bool:
    return any(not v.fixed and v.constant is None for v in eqn.inputs)


def _narrows(eqn: Equation) -> bool:
    """Whether data is cast to integers of 8 or 16 bits and may change."""
    if eqn.primitive != "convert_element_type" or keeps_number(eqn) or not _is_data(eqn):
        return False
    before, after = np.dtype(eqn.in_dtypes[0]), np.dtype(eqn.out_dtypes[0])
    return before.kind in "iu" and after.kind in "iu" and after.itemsize < 4


def _unsigned(eqn: Equation) -> bool:
    """Whether data is cast to uint32 and may change, or uint32 arithmetic is done."""
    if len(eqn.outputs) != 1 or eqn.out_dtypes[0] != np.uint32 or not _is_data(eqn):
        return False
    if eqn.primitive == "convert_element_type":
        return np.dtype(eqn.in_dtypes[0]).kind in "iu" and not keeps_number(eqn)
    return eqn.primitive in _RING


def _narrowed(dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    mask = np.int32(2 ** (8 * dtype.itemsize) - 1)
    sign = np.int32(2 ** (8 * dtype.itemsize - 1))

    def narrowed(x: Any) -> Any:
        low = x & mask
        return low if dtype.kind == "u" else (low ^ sign) - sign

    return narrowed


def _write_in_int32(eqn: Equation, function: Callable[..., Any]) -> list[Equation]:
    """The equation's function on int32, followed by a cast to the equation's dtype."""
    before, (whole,) = inlined(lambda *x: function(*_as_int32(x)), eqn.inputs, None, eqn)
    back, _ = inlined(lambda x: x.astype(eqn.out_dtypes[0]), [whole], eqn.outputs, eqn)
    return [*before, composite(SAME, back, [whole], eqn.outputs)]


def _as_int32(values: Sequence[Any]) -> list[Any]:
    return [x.astype(jnp.int32) for x in values]
