"""The C library's float functions: what glibc 2.36 computed, and how near the truth that is."""

import zlib
from decimal import Decimal, localcontext

import numpy as np
import pytest

from qjax.numerics import libm

BITS = np.arange(0x2F000000, 0x42B00000, 9973).astype(np.int32)
"""Every 9,973rd float32 from 2^-33 to 88."""


@pytest.mark.parametrize(("name", "checksum"), [("expf", 393602632), ("tanhf", 1434846388)])
def test_bits_of_glibc(name, checksum):
    x = BITS.view(np.float32)
    x = np.concatenate([x, -x])
    y = getattr(libm, name)(x)
    assert y.dtype == np.float32
    assert zlib.crc32(y.tobytes()) == checksum


@pytest.mark.parametrize("name", ["expf", "tanhf"])
def test_within_two_ulps_of_the_truth(name):
    x = np.concatenate([sign * BITS[::300].view(np.float32) for sign in (1, -1)])
    y = getattr(libm, name)(x)
    with localcontext() as context:
        context.prec = 60
        for a, b in zip(x.tolist(), y.tolist(), strict=True):
            e = Decimal(a).exp() if name == "expf" else None
            truth = e if e is not None else 1 - 2 / ((2 * Decimal(a)).exp() + 1)
            assert abs(Decimal(b) - truth) <= 2 * Decimal(float(np.spacing(np.float32(abs(b))))), (a, b)


def test_ends():
    x = np.array([0.0, -0.0, 1e-40, -200.0, 22.0, 1e30], np.float32)
    assert libm.expf(x).tolist()[:4] == [1, 1, 1, 0]
    assert libm.expf(x)[5] == np.inf
    y = libm.tanhf(x)
    assert y.view(np.int32).tolist() == np.array([0.0, -0.0, 1e-40, -1, 1, 1], np.float32).view(np.int32).tolist()


def test_errors():
    with pytest.raises(ValueError, match=r"expf: expected finite float32 numbers\. Got dtype float64"):
        libm.expf(np.zeros(2))
    with pytest.raises(ValueError, match="tanhf: expected finite float32 numbers"):
        libm.tanhf(np.array([np.nan], np.float32))
