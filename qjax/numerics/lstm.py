"""The LSTM of 8-bit activations and 16-bit cells, as TFLite's runtimes compute it, and with one rounding per result.

A step computes the gates g from the input x and the hidden state h, then the cell c and the next hidden state:

    g = x W + b + h R;  c' = sigmoid(forget) c + sigmoid(input) tanh(cell);  h' = sigmoid(output) tanh(c')

Gates are int16 codes of scale 2^-12, the results of sigmoid and tanh have the scale 2^-15, and the cell's scale is a
power of two.

| method | gates | products of int16 | functions |
| --- | --- | --- | --- |
| `tflite` | the second product is added before it is clamped | one rounding, ties away from zero | of gemmlowp |
| `tflite_micro` | both products are clamped, then their sum | two roundings | interpolated tables |
| `exact` | one rounding of the sum | one rounding of c' | correctly rounded |

The functions are tables of all codes here. The interpolated ones are those of the operators LOGISTIC and TANH of int16,
so the caller who knows the runtime's codes passes them. Sources: lstm_eval.cc and portable_tensor_utils.cc of LiteRT,
lstm_eval.cc of tflite-micro, fixedpoint.h of gemmlowp.
"""

from typing import Literal, get_args

import numpy as np

from qjax.numerics.elementary import Expression, table
from qjax.numerics.gemmlowp_functions import EXP_OF_MINUS_POWERS

LstmMethod = Literal["exact", "tflite", "tflite_micro"]
LSTM_METHODS: tuple[LstmMethod, ...] = get_args(LstmMethod)

GATE_BITS = 12
"""Gates have the scale 2^-12: numbers between -8 and 8."""
UNIT_BITS = 15
"""Results of sigmoid and tanh have the scale 2^-15."""
_CODES = np.arange(-(2**15), 2**15, dtype=np.int64)
_ONE = 2**15 - 1


def exact_table(function: str, bits: int) -> np.ndarray:
    """The correctly rounded function of all codes of scale 2^-bits.

    Args:
      function: "logistic" or "tanh".

    Returns:
      65,536 int16 codes of scale 2^-15.
    """
    ends = (-(2**15), 2**15 - 1)
    scales = np.float32(2.0**-bits), np.float32(2.0**-UNIT_BITS)
    found = table(Expression(((function, (0,)),)), [], scales[0], np.int32(0), ends, scales[1], np.int32(0), ends)
    return found.astype(np.int16)


def gemmlowp_table(function: str, bits: int) -> np.ndarray:
    """gemmlowp's function of all codes of scale 2^-bits, in fixed point of 16 bits.

    Args:
      function: "logistic" or "tanh". bits: 9 to 15.

    Returns:
      65,536 int16 codes of scale 2^-15.
    """
    if not 9 <= bits <= UNIT_BITS:
        raise ValueError(f"gemmlowp_table: expected 9 to 15 fractional bits, got {bits}")
    integer_bits = UNIT_BITS - bits
    if function == "tanh":
        below = np.where(_CODES < 0, _CODES, _wrapped(-_CODES))
        y = _tanh_of_negative(below, integer_bits)
        y = np.where(_CODES == 0, 0, np.where(_CODES < 0, _wrapped(-y), y))
    else:
        positive = np.where(_CODES > 0, _CODES, _wrapped(-_CODES))
        y = _reciprocal(_exp(_wrapped(-positive), integer_bits), 1, 0)
        y = np.where(_CODES == 0, 2**14, np.where(_CODES > 0, y, _wrapped(_ONE - y)))
    return y.astype(np.int16)


def _tanh_of_negative(a: np.ndarray, integer_bits: int) -> np.ndarray:
    """-tanh(a) for a <= 0: (1 - e) / (1 + e) with e = exp(2 a), with the same raw value and one more integer bit."""
    return _reciprocal(_exp(a, integer_bits + 1), 2, 2**13)


def _exp(a: np.ndarray, integer_bits: int) -> np.ndarray:
    """exp(a) as Q0.15 for a <= 0: of a modulo 1/4, times exp(-2^k) for each remaining bit."""
    fraction = 15 - integer_bits
    quarter = 1 << (fraction - 2)
    rest = (a & (quarter - 1)) - quarter
    y = _exp_on_quarter(_shifted_left(rest, integer_bits))
    remainder = _wrapped(rest - a)
    for exponent, factor in EXP_OF_MINUS_POWERS.items():
        if integer_bits > exponent:
            bit = (remainder >> (fraction + exponent)) & 1
            y = np.where(bit != 0, _product(y, _constant(factor)), y)
    if integer_bits > 5:
        y = np.where(a < _constant(-(1 << (36 - integer_bits))), 0, y)
    return np.where(a == 0, _ONE, y)


def _exp_on_quarter(a: np.ndarray) -> np.ndarray:
    """exp on [-1/4, 0): four terms of the series around -1/8."""
    x = _wrapped(a + (1 << 12))
    x2 = _product(x, x)
    x3, x4 = _product(x2, x), _product(x2, x2)
    tail = _product(_wrapped(_divided(x4, 2) + x3), _constant(715827883))
    tail = _divided(_wrapped(tail + x2), 1)
    constant = _constant(1895147668)
    return np.clip(constant + _product(_wrapped(x + tail), constant), -(2**15), _ONE)


def _reciprocal(a: np.ndarray, bits: int, less: int) -> np.ndarray:
    """Computes 2 / (1 + a) as Q2.13, minus `less`, shifted by `bits`: 1 / (1 + a), or (1 - a) / (1 + a), as Q0.15."""
    total = a + _ONE
    half = (total + np.where(total >= 0, 1, -1)) // 2  # not negative, as a is not
    x = _wrapped(_constant(1515870810) + _product(half, _constant(-1010580540)))
    for _ in range(3):
        rest = _wrapped((1 << 13) - _product(half, x))
        x = _wrapped(x + _shifted_left(_product(x, rest), 2))
    return _shifted_left(_wrapped(x - less), bits)


def _constant(value: int) -> int:
    """A constant of 32 bits as one of 16."""
    return int(_divided(np.asarray(value, np.int64), 16))


def _product(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    """SaturatingRoundingDoublingHighMul of int16."""
    product = np.asarray(a, np.int64) * np.asarray(b, np.int64)
    nudged = product + np.where(product >= 0, 1 << 14, 1 - (1 << 14))
    return np.minimum(np.sign(nudged) * (np.abs(nudged) >> 15), _ONE)


def _divided(x: np.ndarray, bits: int) -> np.ndarray:
    """RoundingDivideByPOT: ties away from zero."""
    return np.sign(x) * ((np.abs(x) + (1 << (bits - 1))) >> bits)


def _shifted_left(x: np.ndarray, bits: int) -> np.ndarray:
    """SaturatingRoundingMultiplyByPOT of a positive exponent."""
    threshold = (1 << (15 - bits)) - 1
    return np.where(x > threshold, _ONE, np.where(x < -threshold, -(2**15), x << bits))


def _wrapped(x: np.ndarray) -> np.ndarray:
    """The int16 that remains in a register of 16 bits."""
    return ((x + 2**15) & 0xFFFF) - 2**15
