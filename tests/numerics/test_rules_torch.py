"""PyTorch's rules, and OpenVINO's, against numpy's float32 operations, from scales and a real bias.

The fused one is compared with fractions.
"""

from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from qjax.numerics import Real, get_rule, requantize
from tests.numerics.float32 import nearest

F32 = np.float32
ONE = F32(1)
RULES = ("torch_fbgemm", "torch_qnnpack", "torch_onednn", "torch_onednn_conv", "openvino")
ROWS, CHANNELS = 1500, 32


def rint(y: np.ndarray, *, indefinite: bool) -> np.ndarray:
    assert y.dtype == F32
    whole = np.rint(y.astype(np.float64))
    outside = (whole < -(2.0**31)) | (whole >= 2.0**31)
    clipped = np.clip(whole, -(2.0**31), 2.0**31 - 1)
    return np.where(outside & indefinite, -(2.0**31), clipped).astype(np.int64)


def fused(b: np.ndarray, step: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """fma(b, step, float32(acc)) in fractions, for distinct values."""
    product = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(b, step, strict=True)]
    out = np.empty(acc.shape, F32)
    for c in range(acc.shape[1]):
        values, where = np.unique(acc[:, c].astype(F32), return_inverse=True)
        out[:, c] = np.array([float(nearest(product[c] + Fraction(float(v)))) for v in values], F32)[where]
    return out


def expected(rule: str, acc: np.ndarray, s_x: Any, s_w: np.ndarray, s_y: Any, b: np.ndarray, zero_point: int) -> Any:
    p = (s_x * s_w).astype(F32)
    if rule == "torch_fbgemm":
        if s_w.ndim:
            value = acc.astype(F32) + b / p
        else:
            value = fused(b, np.broadcast_to(ONE / p, b.shape), acc)
        return rint(value * (p / s_y), indefinite=True) + zero_point
    if rule == "torch_qnnpack":
        bias = np.clip(np.rint((b * (ONE / p)).astype(np.float64)), -(2.0**31), 2.0**31 - 1).astype(np.int64)
        value = (acc.astype(np.int64) + bias + 2**31) % 2**32 - 2**31
        return rint(value.astype(F32) * (p * (ONE / s_y)), indefinite=True) + zero_point
    if rule == "openvino":
        exact = [Fraction(float(s_x)) * Fraction(float(w)) / Fraction(float(s_y)) for w in np.atleast_1d(s_w)]
        e = np.array([float(nearest(value)) for value in exact], F32)
        return rint(acc.astype(F32) * e + (b * (ONE / s_y) + F32(zero_point)), indefinite=False)
    weight = s_w if rule == "torch_onednn_conv" else ONE / (ONE / s_w)
    real = acc.astype(F32) * (ONE / (ONE / s_x) * weight) + b
    return rint(real * (ONE / s_y) + F32(zero_point), indefinite=False)


def setting(seed: int, per_channel: bool) -> tuple[np.ndarray, Any, np.ndarray, Any, np.ndarray, int]:
    """Accumulators of which a bias cancels many, so that its last bits are seen; ties; results beyond int32."""
    rng = np.random.default_rng(seed)
    low = rng.integers(20, 24)
    acc = rng.integers(-(2**low), 2**low, (ROWS, CHANNELS)).astype(np.int32)
    acc[:8] = np.array([2**31 - 1, -(2**31), 0, 1, -1, 2**30, -(2**24) - 1, 2**25 + 2], np.int32)[:, None]
    s_x = F32(np.exp2(rng.uniform(-8, -2)))
    s_w = np.asarray(np.exp2(rng.uniform(-8, -6, CHANNELS if per_channel else ())), F32)
    p = (s_x * s_w).astype(F32)
    b = (rng.normal(size=CHANNELS) * 2.0**low * p).astype(F32)
    s_y = F32(p.max() * rng.uniform(0.3, 3))
    if seed % 3 == 1:
        s_x, s_w, s_y = F32(2.0**-4), np.exp2(np.round(np.log2(s_w))).astype(F32), F32(2.0 ** rng.integers(-8, -3))
        b = (np.rint(rng.normal(size=CHANNELS) * 1000) * s_x * s_w).astype(F32)
        acc[8:] = rng.integers(-4000, 4000, acc[8:].shape)
    elif seed % 3 == 2:
        s_y = F32(p.max() * 2.0**-9)
    else:
        # the bias meets its negative, give or take a few steps
        steps = -np.rint(b.astype(np.float64) / p)
        acc[8:] = np.clip(steps + rng.integers(-60, 60, acc[8:].shape), -(2**31), 2**31 - 1)
    return acc, s_x, s_w, s_y, b, int(rng.integers(0, 256))


@pytest.mark.parametrize("seeds", [3, pytest.param(9, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("rule", "per_channel"),
    # each rule once; per tensor one has a fused bias, which takes fractions
    [
        pytest.param(rule, each, marks=[] if each == (i % 2 == 1) else pytest.mark.exhaustive)
        for i, rule in enumerate(RULES)
        for each in (False, True)
    ],
)
def test_from_scales(rule, per_channel, seeds):
    of_scales = get_rule(rule).of_scales
    assert of_scales is not None
    seen = 0

    @jax.jit
    def traced(acc, s_x, s_w, s_y, b, zero_point):
        constants = of_scales(s_x, s_w, s_y, b, per_channel)
        return requantize(acc, constants, rule=rule, zero_point=zero_point, qmin=0, qmax=255), constants

    for seed in range(seeds):
        acc, s_x, s_w, s_y, b, zero_point = setting(seed, per_channel)
        with np.errstate(over="ignore"):
            want = np.clip(expected(rule, acc, s_x, s_w, s_y, b, zero_point), 0, 255)
        y, inside = traced(acc, s_x, s_w, s_y, b, np.int32(zero_point))
        np.testing.assert_array_equal(y, want)
        host = of_scales(s_x, s_w, s_y, b, per_channel)
        for field, value in host._asdict().items():
            np.testing.assert_array_equal(getattr(inside, field), value, err_msg=field)
        seen += int(((want > 0) & (want < 255)).sum())
    assert seen > 40_000 * seeds / 9


def test_a_bias_may_be_a_real():
    s_x, s_w, s_y = F32(0.1), np.array([0.02, 0.03], F32), F32(0.5)
    b = np.array([1.25, -7.5])
    for rule in RULES:
        of_scales = get_rule(rule).of_scales
        assert of_scales is not None
        pair = (of_scales(s_x, s_w, s_y, bias, True) for bias in (Real.of(b), b.astype(F32)))
        for one, other in zip(*pair, strict=True):
            np.testing.assert_array_equal(one, other)


def test_one_scale_and_one_scale_per_channel_differ():
    """FBGEMM multiplies by a reciprocal and adds in one step, or divides and adds in two."""
    acc, s_x, s_w, s_y, b, zero_point = setting(0, False)
    of_scales = get_rule("torch_fbgemm").of_scales
    assert of_scales is not None
    both = [
        requantize(acc, of_scales(s_x, s_w, s_y, b, per_channel), rule="torch_fbgemm", zero_point=zero_point, qmax=255)
        for per_channel in (False, True)
    ]
    assert np.any(np.asarray(both[0]) != np.asarray(both[1]))


def test_overflow():
    acc = np.array([2**31 - 1, -(2**31)], np.int32)
    for rule in RULES:
        want = [127, -128] if "onednn" in rule or rule == "openvino" else [-128, -128]
        assert requantize(acc, 2.0, rule=rule).tolist() == want, rule
