"""The integer logarithm of a sum of exponentials against its definition in Python's integers, and against reals."""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import jax
import numpy as np
import pytest

from qjax.numerics.integer_logsumexp import log_sums, logarithms
from qjax.numerics.integer_softmax import exponentials
from tests.numerics.test_integer_softmax import rows, table_of

SCALES = [0.11, 1e-6, 3.0]


def logs_of() -> list[int]:
    with localcontext() as context:
        context.prec = 50
        entries = [(Decimal(1024 + i) / 1024).ln() * 2**30 for i in range(1025)]
        return [int(entry.to_integral_value(ROUND_HALF_EVEN)) for entry in entries]


def row_by_definition(codes: list[int], table: list[int], logs: list[int]) -> int:
    """One row in Python's integers."""
    total = sum(table[max(codes) - c] for c in codes)
    j = total.bit_length() - 31
    rest = (total >> j) - 2**30
    index, fraction = rest >> 20, rest % 2**20
    with localcontext() as context:
        context.prec = 50
        two = int((Decimal(2).ln() * 2**40).to_integral_value(ROUND_HALF_EVEN))
    found = logs[index] + ((logs[index + 1] - logs[index]) * fraction >> 20) + (j * two >> 10)
    return (found + 16) >> 5


def test_logarithms_are_correctly_rounded():
    assert list(logarithms()) == logs_of()


@pytest.mark.parametrize("length", [1, 3, 512])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.sampled(3)
def test_equals_its_definition(scale, length):
    codes, table = rows(np.random.default_rng(length), 8, length), table_of(scale, 256)
    want = [row_by_definition(row, table, logs_of()) for row in codes.tolist()]
    constants = exponentials(np.float32(scale), 256), logarithms()
    greatest, got = log_sums(codes, *constants, (1,))
    assert np.array_equal(got[:, 0], want)
    assert np.array_equal(greatest[:, 0], codes.max(1))
    traced = jax.jit(lambda c: log_sums(c, *constants, (1,)))(codes)
    assert np.array_equal(traced[0], greatest)
    assert np.array_equal(traced[1], got)
    # over two axes in front
    turned = codes.reshape(8, length, 1).transpose(1, 2, 0)
    assert np.array_equal(log_sums(turned, *constants, (0, 1))[1][0, 0], want)


@pytest.mark.parametrize(
    ("dtype", "scale", "length"),
    [("int8", 0.05, 300), ("int16", 2e-4, 200), ("int8", 0.2, 4), ("int8", 1e-6, 4093), ("int16", 3e-5, 2)],
)
def test_error_against_reals(dtype, scale, length):
    """|2^-25 l - L| <= 2^-22 + (n - 1) / (2^31 - n)."""
    codes = rows(np.random.default_rng(7), 40, length, dtype)
    # as many halves lost in the table as there are: the same far code n - 1 times
    codes[5], codes[5, 0] = codes[5, -1], np.iinfo(dtype).max
    info = np.iinfo(dtype)
    table = exponentials(np.float32(scale), int(info.max) - int(info.min) + 1)
    _, got = log_sums(codes, table, logarithms(), (1,))
    with localcontext() as context:
        context.prec = 40
        step, bound = Decimal(float(np.float32(scale))), Decimal(2) ** -22 + Decimal(length - 1) / (2**31 - length)
        powers = {d: (-step * d).exp() for d in range(int(codes.max()) - int(codes.min()) + 1)} if length > 999 else {}
        for row, found in zip(codes.tolist(), got[:, 0].tolist(), strict=True):
            top = max(row)
            real = sum((powers.get(top - c) or (step * (c - top)).exp() for c in row), Decimal(0)).ln()
            assert abs(Decimal(found) / 2**25 - real) <= bound
