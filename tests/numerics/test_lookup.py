"""Tables of functions against mathematics in fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from qjax.numerics.lookup import lookup_table


@pytest.mark.parametrize("function", ["logistic", "tanh"])
@pytest.mark.parametrize(("scale", "zero"), [(0.1, 0), (0.013, -5), (1.7, 100), (2.0**-12, -128)])
def test_every_entry_is_the_nearest_code(function, scale, zero):
    step, y, z = (1 / 256, 256, -128) if function == "logistic" else (1 / 128, 128, 0)
    table = lookup_table(function, np.float32(scale), zero, np.float32(step), z)
    assert table.dtype == np.int32
    assert table.shape == (256,)
    for q, code in zip(range(-128, 128), table.tolist(), strict=True):
        x = float(np.float32(scale)) * (q - zero)
        real = 1 / (1 + math.exp(-x)) if function == "logistic" else math.tanh(x)
        steps = Fraction(real) * y + z
        # 2^-40 steps hold every error of the doubles: none of them decides a code
        assert abs(steps - math.floor(steps) - Fraction(1, 2)) > Fraction(1, 2**40)
        assert code == min(max(round(steps), -128), 127)


def test_ends_and_other_ranges():
    assert lookup_table("logistic", 1.0, 0, 1 / 256, 0, x_range=(-4, 4), y_range=(0, 255))[4] == 128
    wide = lookup_table("tanh", np.float32(1e30), 0, 1 / 128, 0)
    assert wide.tolist() == [-128] * 128 + [0] + [127] * 127


def test_errors():
    with pytest.raises(ValueError, match="expected a function among logistic, tanh, got 'gelu'"):
        lookup_table("gelu", 0.1, 0, 0.1, 0)
    with pytest.raises(ValueError, match="scales must be finite and positive"):
        lookup_table("tanh", 0.0, 0, 0.1, 0)
    with pytest.raises(ValueError, match="ranges must not be empty"):
        lookup_table("tanh", 0.1, 0, 0.1, 0, x_range=(1, 0))
