"""Integers of a circuit: a variable that alkaid computes from the inputs, plus a constant integer.

alkaid (`alkaid.trace`, version 0.8) stores bounds as float64 and constants of additions as float32, and does not report
if one is not exact. So constants stay outside of it, as Python integers, until an operation needs the sum. There they
are checked.
"""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from qjax.support.errors import Unsupported

WIDEST = 1 << 52
"""Every word must be below this, because alkaid's bounds are float64."""

_CONSTANT = 1 << 23
"""Every constant, without its factors of 2, must be below this, because alkaid computes these in float32."""

_PART = 20
"""Bits of a constant that are added at once if it has too many."""

_LONGEST_TABLE = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """`value + offset`. value: an alkaid FVariable of integers; None: 0, so that the word is constant."""

    value: Any
    offset: int = 0

    @property
    def low(self) -> int:
        """The lowest value."""
        return self.offset + (0 if self.value is None else int(self.value.low))

    @property
    def high(self) -> int:
        """The highest value."""
        return self.offset + (0 if self.value is None else int(self.value.high))


def load(module: str) -> Any:
    """A module of alkaid; if it is missing, the error names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            "emit: Verilog and VHDL are written by the package alkaid: pip install alkaid==0.8.2", name=module
        ) from error


def hardware() -> Any:
    """alkaid's cost model of adders: lookup tables of an FPGA, each bit separately."""
    return load("alkaid.trace").HWConfig(1, -1, -1)


def constant(number: int) -> Word:
    """A word that depends on no input."""
    return Word(None, int(number))


def word(value: Any, offset: int = 0) -> Word:
    """The word of a variable of alkaid, plus an integer."""
    if value.low == value.high:
        return Word(None, offset + int(value.low))
    if max(abs(value.low), abs(value.high)) >= WIDEST:
        raise Unsupported(f"a word lies in [{value.low:.0f}, {value.high:.0f}], but a circuit has at most 52 bits")
    # alkaid would add the next constant to this one, unchecked
    assert value.opr != "cadd", "a word's constants stay in its offset"
    return Word(value, offset)


def settled(x: Word) -> Any:
    """The whole word as one variable of alkaid."""
    _check_constant(x.offset)
    if x.value is None:
        return load("alkaid.trace").FVariable.from_const(float(x.offset), hardware())
    return x.value if x.offset == 0 else x.value + float(x.offset)


def _odd(number: int) -> int:
    """The magnitude of a number without its factors of 2."""
    return abs(number) // max(number & -number, 1)


def _check_constant(number: int) -> None:
    if _odd(number) >= _CONSTANT:
        raise Unsupported(
            f"the constant {number} has more than 23 significant bits, which alkaid would truncate",
            "In layers with weights, scales that are powers of two (target 'fpga') keep constants short.",
        )


def _unit(value: Any) -> int:
    """The greatest power of two of which all values are multiples."""
    step = int(value.step)
    return step & -step


# ---------------------------------------------------------------------------- arithmetic


def add(x: Word, y: Word) -> Word:
    """x + y."""
    offset = x.offset + y.offset
    if x.value is None or y.value is None:
        return Word(y.value if x.value is None else x.value, offset)
    return word(x.value + y.value, offset)


def neg(x: Word) -> Word:
    """-x."""
    return Word(None if x.value is None else -x.value, -x.offset)


def sub(x: Word, y: Word) -> Word:
    """x - y."""
    return add(x, neg(y))


def scaled(x: Word, factor: int) -> Word:
    """x times a known integer."""
    if x.value is None or factor == 0:
        return constant(x.offset * factor)
    if _odd(factor) < _CONSTANT:
        return word(x.value * float(factor), x.offset * factor)
    high, low = factor >> 16, factor & 0xFFFF
    return add(scaled(scaled(x, high), 1 << 16), scaled(x, low))


def product(x: Word, y: Word) -> Word:
    """x * y; for two words that are not constant, a multiplier."""
    if y.value is None:
        return scaled(x, y.offset)
    if x.value is None:
        return scaled(y, x.offset)
    return word(settled(x) * settled(y))


def shifted_left(x: Word, by: Word) -> Word:
    """x * 2**by, for a known `by`."""
    return scaled(x, 1 << _places(by, "shift_left"))


def shifted_right(x: Word, by: Word) -> Word:
    """floor(x / 2**by), for a known `by`."""
    bits = _places(by, "shift_right")
    if bits == 0:
        return x
    if x.value is None:
        return constant(x.offset >> bits)
    unit = _unit(x.value)
    if unit >> bits:
        return word(x.value * 2.0**-bits, x.offset >> bits)
    # bits below the value's own cannot change the floor
    offset = x.offset // unit * unit
    outside, inside = offset >> bits, offset & ((1 << bits) - 1)
    if _odd(inside) >= _CONSTANT and bits > _PART:
        # in two steps, each with a part of the constant
        high, low = inside >> _PART, inside & ((1 << _PART) - 1)
        part = shifted_right(Word(x.value, low), constant(_PART))
        return shifted_right(add(part, constant(high + (outside << bits - _PART))), constant(bits - _PART))
    whole = settled(Word(x.value, inside)) * 2.0**-bits
    reach = max(abs(int(np.floor(whole.low))), abs(int(np.ceil(whole.high)))) + 1
    return word(whole.quantize(int(whole.low < 0), reach.bit_length(), 0), outside)


def rounded_right(x: Word, by: Word) -> Word:
    """x / 2**by, rounded to nearest, ties to even, for a known `by`."""
    bits = _places(by, "shift_right")
    if x.value is None:
        return constant(round(Fraction(x.offset, 1 << bits)))
    # common factors of 2 would make the constants below longer
    common = math.gcd(_unit(x.value), x.offset, 1 << bits).bit_length() - 1
    x, bits = Word(x.value * 2.0**-common, x.offset >> common), bits - common
    if bits == 0:
        return x
    odd = masked(shifted_right(x, constant(bits)), constant(1))
    return shifted_right(add(x, Word(odd.value, odd.offset + (1 << bits - 1) - 1)), constant(bits))


def masked(x: Word, mask: Word) -> Word:
    """x & mask, for a known mask of low bits, or of all but low bits."""
    bits = _known(mask, "and")
    if bits < 0:
        return sub(x, masked(x, constant(-bits - 1)))
    if bits & (bits + 1):
        raise Unsupported(f"'and' with {bits} has no form in a circuit: low bits, or all but them, are expected")
    if x.low >= 0 and x.high <= bits:
        return x
    if x.value is None or _unit(x.value) > bits:
        return constant(x.offset & bits)
    width = bits.bit_length()
    if width == 1:
        lowest = word(x.value.quantize(0, 1, 0))
        return sub(constant(1), lowest) if x.offset & 1 else lowest
    moved = Word(x.value, x.offset & bits)
    if moved.low >= 0 and moved.high <= bits:
        return moved
    return word(settled(moved).quantize(0, width, 0))


def wrapped(x: Word, dtype: str) -> Word:
    """x modulo the number of codes of an integer dtype."""
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    if low <= x.low and x.high <= high:
        return x
    return add(masked(sub(x, constant(low)), constant(high - low)), constant(low))


# ---------------------------------------------------------------------------- choices


def relu(x: Word) -> Word:
    """max(x, 0)."""
    if x.low >= 0:
        return x
    return constant(0) if x.high <= 0 else word(settled(x).relu())


def maximum(x: Word, y: Word) -> Word:
    """max(x, y)."""
    if x.low >= y.high:
        return x
    if y.low >= x.high:
        return y
    if x.value is None:
        x, y = y, x
    elif y.value is not None and x.offset == y.offset:
        return word(x.value.max_of(y.value), x.offset)
    return add(relu(sub(x, y)), y)


def minimum(x: Word, y: Word) -> Word:
    """min(x, y)."""
    return neg(maximum(neg(x), neg(y)))


def clamped(low: Word, x: Word, high: Word) -> Word:
    """min(max(x, low), high)."""
    return minimum(maximum(x, low), high)


def negative(x: Word) -> Word:
    """1 where x < 0, else 0."""
    if x.low >= 0:
        return constant(0)
    if x.high < 0:
        return constant(1)
    if _odd(x.offset) >= _CONSTANT:
        return negative(shifted_right(x, constant(_PART)))
    return word(settled(x).is_negative())


def nonzero(x: Word) -> Word:
    """1 where x is not 0, else 0."""
    if x.low > 0 or x.high < 0:
        return constant(1)
    return constant(0) if x.value is None else word(settled(x).unary_bit_op("any"))


def less(x: Word, y: Word) -> Word:
    """1 where x < y, else 0."""
    return negative(sub(x, y))


def inverted(x: Word) -> Word:
    """1 - x, for a word that is 0 or 1."""
    return sub(constant(1), x)


def both(x: Word, y: Word) -> Word:
    """1 where both are 1, for words that are 0 or 1."""
    if x.value is None or y.value is None:
        return product(x, y)
    return word(settled(x) & settled(y))


def either(x: Word, y: Word) -> Word:
    """1 where one is 1, for words that are 0 or 1."""
    return inverted(both(inverted(x), inverted(y)))


def chosen(which: Word, zero: Word, one: Word) -> Word:
    """`one` where `which` is 1, `zero` where it is 0."""
    if which.value is None:
        return one if which.offset else zero
    if which.offset == 1:
        which, zero, one = neg(sub(which, constant(1))), one, zero
    if zero.value is None and one.value is None:
        return add(scaled(which, one.offset - zero.offset), zero)
    offset = one.offset if one.offset == zero.offset else 0
    parts = [settled(Word(part.value, part.offset - offset)) for part in (one, zero)]
    result = settled(which).msb_mux(*parts)
    return word(result, offset)


def magnitude(x: Word) -> Word:
    """|x|."""
    return maximum(x, neg(x))


def looked_up(x: Word, table: Sequence[int]) -> Word:
    """table[x], for an x within the table."""
    if x.value is None:
        return constant(table[x.offset])
    low, high, unit = x.low, x.high, _unit(x.value)
    if low < 0 or high >= len(table) or high - low >= _LONGEST_TABLE:
        raise Unsupported(f"an index in [{low}, {high}] into a table of {len(table)} entries has no form in a circuit")
    entries = [int(table[place]) for place in range(low, high + 1, unit)]
    if len(set(entries)) == 1:
        return constant(entries[0])
    if max(map(abs, entries)) >= _CONSTANT:
        raise Unsupported("a table with entries of more than 23 bits has no form in a circuit")
    return word(settled(x).lookup(np.array(entries, np.float64)))


def _known(x: Word, what: str) -> int:
    if x.value is not None:
        raise Unsupported(f"{what!r} by a number that depends on the input has no form in a circuit")
    return x.offset


def _places(by: Word, what: str) -> int:
    found = _known(by, what)
    if not 0 <= found < 64:
        raise Unsupported(f"{what!r} by {found} places has no form in a circuit: 0 to 63 are expected")
    return found


# ---------------------------------------------------------------------------- products


def matmul(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Rows of words times known integers: (m, k), (k, n) -> (m, n), by alkaid's adder graphs."""
    if weights.size and int(np.abs(weights).max()) >= _CONSTANT:
        raise Unsupported("weights of more than 23 bits have no form in a circuit")
    trace = load("alkaid.trace")
    zero = trace.FVariable.from_const(0.0, hardware())
    values, offsets = np.empty(rows.shape, object), np.empty(rows.shape, object)
    for place, x in np.ndenumerate(rows):
        values[place], offsets[place] = (zero, x.offset) if x.value is None else _unsigned_bit(x.value, x.offset)
    sums = np.matmul(trace.FVArray(values, hwconf=hardware()), weights.astype(np.float64))
    known = np.matmul(offsets, weights.astype(object))
    result = np.empty(known.shape, object)
    for place, value in np.ndenumerate(np.asarray(sums)):
        result[place] = (
            word(value, int(known[place])) if hasattr(value, "low") else constant(int(value) + int(known[place]))
        )
    return result


def _unsigned_bit(value: Any, offset: int) -> tuple[Any, int]:
    """The same sum of a variable and an integer, but a one-bit variable that may be negative becomes 0 or above.

    alkaid 0.8.2 makes tables of the sums of up to six one-bit variables, and assumes that each bit is 0 or above.
    """
    low = int(value.low)
    if low >= 0 or sum(value.kif) != 1:
        return value, offset
    return value - low, offset + low
