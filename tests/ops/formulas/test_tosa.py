"""TOSA's formulas against its specification in Python integers."""

import jax
import numpy as np
import pytest

from qjax.ops.formulas import Setting, get

RNG = np.random.default_rng(0)


def apply_scale_32(value: int, multiplier: int, shift: int) -> int:
    """The text of the specification, without double rounding."""
    return (value * multiplier + (1 << (shift - 1))) >> shift


def multiplier_and_shift(scale: float) -> tuple[int, int]:
    """MLIR's computeMultiplierAndShift for 32 bits: frexp, rounded half away."""
    mantissa, exponent = np.frexp(scale)
    multiplier = int(np.floor(float(mantissa) * 2**31 + 0.5))
    if multiplier == 2**31:
        multiplier, exponent = 2**30, exponent + 1
    return multiplier, 31 - int(exponent)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 9, 16, 17, 49, 64, 100, 255, 1000])
def test_average_pool(n):
    formula = get("tosa_average_pool")
    s = np.float32(0.1)
    constants = {
        **formula.prepare(Setting("average_pool", (s,), (np.int32(3),), s, np.int32(3), "int8", n)),
        "y_zero_point": np.int32(3),
    }
    k = 0 if n == 1 else (n - 1).bit_length()
    multiplier, shift = (((1 << 30) + 1) << k) // n, 30 + k
    assert (int(constants["multiplier"]), int(constants["shift"])) == (multiplier, shift)
    acc = np.unique(np.concatenate([RNG.integers(-255 * n, 255 * n + 1, 500), np.arange(-3 * n, 3 * n + 1)]))
    got = np.asarray(jax.jit(lambda a: formula.kernel([a], constants, {"dtype": "int8"}))(acc.astype(np.int32)))
    assert got.tolist() == [apply_scale_32(int(a), multiplier, shift) + 3 for a in acc]


@pytest.mark.parametrize("op", ["add", "subtract"])
@pytest.mark.parametrize("scales", [(0.1, 0.1, 0.2), (0.5, 0.25, 1.0), (0.013, 0.3, 0.29), (1.0, 2.0**-6, 0.7)])
@pytest.mark.sampled(4)
def test_add(op, scales):
    formula = get("tosa_add")
    first, second, y = (np.float32(s) for s in scales)
    setting = Setting(op, (first, second), (np.int32(0), np.int32(0)), y, np.int32(-5), "int8")
    constants = {**formula.prepare(setting), "y_zero_point": np.int32(-5)}
    twice = 2 * max(float(first), float(second))
    pairs = [multiplier_and_shift(float(s) / twice) for s in (first, second)]
    out = multiplier_and_shift(twice / (float(y) * 2**20))
    a, b = (v.ravel() for v in np.meshgrid(np.arange(-255, 256), np.arange(-255, 256, 3)))
    sign = 1 if op == "add" else -1
    expected = [
        apply_scale_32(apply_scale_32(int(p) << 20, *pairs[0]) + sign * apply_scale_32(int(q) << 20, *pairs[1]), *out)
        - 5
        for p, q in zip(a, b, strict=True)
    ]
    run = jax.jit(lambda p, q: formula.kernel([p, q], constants, {"dtype": "int8"}))
    assert np.asarray(run(a.astype(np.int32), b.astype(np.int32))).tolist() == expected
