"""gemmlowp's int8 sigmoid and tanh: tables that TFLite Micro computed."""

import math
import zlib
from fractions import Fraction

import numpy as np
import pytest

from qjax.numerics.gemmlowp import gemmlowp_table
from qjax.numerics.gemmlowp_functions import exp_on_negative_values
from qjax.numerics.lookup import lookup_table
from tests.numerics.exact import gemmlowp_rdbpot, gemmlowp_srdhm

# CRC-32 of the 256 codes, and every 37th code, from tflite-micro 0.dev20261023
TABLES = [
    ("logistic", 0.0625, 0, 957784732, [-128, -127, -120, -62, 71, 121, 127]),
    ("logistic", 0.05, -7, 3259854297, [-127, -124, -106, -31, 75, 118, 126]),
    ("logistic", 0.001, 100, 3757894461, [-15, -12, -10, -7, -5, -3, 0]),
    ("logistic", 0.5, 3, 2776451430, [-128, -128, -128, -128, 127, 127, 127]),
    ("logistic", 4.0, 0, 765027583, [-128, -128, -128, -128, 127, 127, 127]),
    ("tanh", 0.0625, 0, 126315298, [-128, -128, -128, -101, 109, 127, 127]),
    ("tanh", 0.05, -7, 4269553314, [-128, -128, -126, -59, 112, 127, 127]),
    ("tanh", 0.001, 100, 503361302, [-29, -24, -20, -15, -10, -6, -1]),
    ("tanh", 0.5, 3, 3360741633, [-128, -128, -128, -128, 127, 127, 127]),
]


@pytest.mark.parametrize(("function", "scale", "zero_point", "checksum", "some"), TABLES)
def test_tables_of_tflite_micro(function, scale, zero_point, checksum, some):
    table = gemmlowp_table(function, np.float32(scale), zero_point)
    assert table.dtype == np.int32
    assert table[::37].tolist() == some
    assert zlib.crc32(table.astype(np.int8).tobytes()) == checksum


# (function, scale, zero point, input code, TFLite Micro's code, the correctly rounded one)
@pytest.mark.parametrize(
    ("function", "scale", "zero_point", "code", "theirs", "nearest"),
    [
        ("logistic", 4.0, 85, 84, -128, -123),  # the input would leave Q4.27
        ("logistic", 2.0**-9, -86, -90, -1, 0),
        ("tanh", 2.0**-12, -57, -73, -1, 0),
    ],
)
def test_not_correctly_rounded(function, scale, zero_point, code, theirs, nearest):
    output = (2.0**-8, -128) if function == "logistic" else (2.0**-7, 0)
    assert gemmlowp_table(function, scale, zero_point)[code + 128] == theirs
    assert lookup_table(function, scale, zero_point, *output)[code + 128] == nearest


def exponential(x: int, integer_bits: int) -> int:
    """gemmlowp's exp_on_negative_values on one number, its constants from their definitions."""
    if x == 0:
        return 2**31 - 1
    fraction = 31 - integer_bits
    quarter = 1 << (fraction - 2)
    rest = (x & (quarter - 1)) - quarter
    a = (rest << integer_bits) + 2**28
    constant, third = round(math.exp(-1 / 8) * 2**31), round(Fraction(2**31, 3))
    a2 = gemmlowp_srdhm(a, a)
    a3, a4 = gemmlowp_srdhm(a2, a), gemmlowp_srdhm(a2, a2)
    tail = gemmlowp_srdhm(gemmlowp_rdbpot(a4, 2) + a3, third) + a2
    y = constant + gemmlowp_srdhm(a + gemmlowp_rdbpot(tail, 1), constant)
    for exponent in range(-2, integer_bits):
        if (rest - x) >> (fraction + exponent) & 1:
            y = gemmlowp_srdhm(y, round(math.exp(-(2.0**exponent)) * 2**31))
    return y


def test_exponentials_to_the_last_bit():
    x = -np.random.default_rng(5).integers(0, 2**31, 2000).astype(np.int64) >> np.arange(2000) % 20
    x[:3] = -1, 0, -(2**31)
    want = [exponential(int(v), 5) for v in x]
    assert exp_on_negative_values(x.astype(np.int32), 5).tolist() == want


def test_errors():
    with pytest.raises(ValueError, match=r"expected logistic or tanh\. Got 'relu'"):
        gemmlowp_table("relu", 0.1, 0)
    with pytest.raises(ValueError, match=r"scale must be finite and positive\. Got 0\.0"):
        gemmlowp_table("tanh", 0.0, 0)
