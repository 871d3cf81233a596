"""The integer softmax against its definition in Python's integers, and against the real function."""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.integer_softmax import exponentials, shares

SCALES = [0.11, 2.0**-8, 1e-6, 3.0, 30.0]


def table_of(scale: float, count: int) -> list[int]:
    with localcontext() as context:
        context.prec = 50
        step = Decimal(float(np.float32(scale)))
        return [int(((-step * d).exp() * 2**30).to_integral_value(ROUND_HALF_EVEN)) for d in range(count)]


def row_by_definition(codes: list[int], table: list[int], mask: list[bool] | None, empty: str) -> list[int]:
    """One row in Python's integers."""
    taking = [True] * len(codes) if mask is None else mask
    if not any(taking):
        if empty == "zero":
            return [0] * len(codes)
        taking, codes = [True] * len(codes), [0] * len(codes)
    top = max(c for c, t in zip(codes, taking, strict=True) if t)
    e = [table[top - c] if t else 0 for c, t in zip(codes, taking, strict=True)]
    total = sum(e)
    j = max(0, total.bit_length() - 31)
    reciprocal = round(Fraction(2**61, round(Fraction(total, 2**j))))
    return [round(Fraction(v * reciprocal, 2 ** (31 + j))) for v in e]


def rows(rng: np.random.Generator, count: int, length: int, dtype: str = "int8") -> np.ndarray:
    """Random ones, equal ones, and one code above the others."""
    info = np.iinfo(dtype)
    found = rng.integers(info.min, info.max + 1, (count, length))
    found[0], found[1], found[2] = info.min, info.max, info.min
    found[2, 0] = info.max
    found[3:5] = rng.integers(0, 3, (2, length))
    return found.astype(dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.sampled(2)
def test_exponentials_are_correctly_rounded(scale):
    want = table_of(scale, 256)
    host = exponentials(np.float32(scale), 256)
    assert list(host) == want[: len(host)]
    assert not any(want[len(host) :])
    assert list(jax.jit(lambda s: exponentials(s, 256))(np.float32(scale))) == want
    batched = jax.vmap(lambda s: exponentials(s, 256))(jnp.asarray([scale, 1.0], jnp.float32))
    assert list(batched[0]) == want


@pytest.mark.parametrize("length", [1, 3, 512])
@pytest.mark.parametrize("scale", SCALES[::2])
@pytest.mark.sampled(3)
def test_equals_its_definition(scale, length):
    rng = np.random.default_rng(length)
    codes, table = rows(rng, 8, length), table_of(scale, 256)
    want = [row_by_definition(row, table, None, "uniform") for row in codes.tolist()]
    constant = exponentials(np.float32(scale), 256)
    assert np.array_equal(shares(codes, constant, (1,)), want)
    assert np.array_equal(jax.jit(lambda c, t: shares(c, t, (1,)))(codes, constant), want)
    # over two axes in front
    turned = codes.reshape(8, length, 1).transpose(1, 2, 0)
    assert np.array_equal(shares(turned, constant, (0, 1)).transpose(2, 0, 1).reshape(8, length), want)


@pytest.mark.parametrize("empty", ["uniform", "zero"])
def test_masks(empty):
    rng = np.random.default_rng(5)
    codes, table = rows(rng, 12, 21), table_of(0.07, 256)
    mask = rng.random((12, 21)) < 0.5
    mask[2], mask[7], mask[8] = False, False, True
    want = [row_by_definition(r, table, m, empty) for r, m in zip(codes.tolist(), mask.tolist(), strict=True)]
    constant = exponentials(np.float32(0.07), 256)
    assert np.array_equal(shares(codes, constant, (1,), mask, empty), want)
    assert np.array_equal(jax.jit(lambda *a: shares(a[0], a[1], (1,), a[2], empty))(codes, constant, mask), want)
    assert set(want[2]) == ({round(Fraction(2**30, 21))} if empty == "uniform" else {0})


@pytest.mark.parametrize(("dtype", "scale", "length"), [("int8", 0.05, 300), ("int16", 2e-4, 200), ("int8", 0.2, 4)])
def test_error_against_reals(dtype, scale, length):
    """|2^30 P - p| <= 1 + P (n + 1) / 2."""
    rng = np.random.default_rng(7)
    codes = rows(rng, 6, length, dtype)
    # as many halves lost in the table as there are: the same far code n - 1 times
    codes[5], codes[5, 0] = codes[5, 1], np.iinfo(dtype).max
    info = np.iinfo(dtype)
    got = shares(codes, exponentials(np.float32(scale), int(info.max) - int(info.min) + 1), (1,))
    with localcontext() as context:
        context.prec = 40
        step = Decimal(float(np.float32(scale)))
        for row, found in zip(codes.tolist(), got.tolist(), strict=True):
            powers = [(step * (c - max(row))).exp() for c in row]
            total = sum(powers)
            for power, p in zip(powers, found, strict=True):
                real = power / total
                assert abs(real * 2**30 - p) <= 1 + real * (length + 1) / 2


def test_refuses_a_scale():
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="finite and positive"):
            exponentials(np.float32(scale), 256)
