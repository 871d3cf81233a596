"""The study of the trainer's precision: emulated machines against numpy's own formats, formulas against counting."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import precision_theory as theory
from experiments.lab.machines import BFLOAT16, FLOAT16_SUMS, FLOAT32, TF32
from experiments.lab.trainer_forward import (
    first_inexact_bits,
    first_inexact_terms,
    integers,
    operands,
    outputs,
    scales,
)


def test_operands_are_those_of_the_formats() -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert np.array_equal(BFLOAT16.operand(jnp.asarray(x)), jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    normal = x[np.abs(x) > 1e-3]
    assert np.array_equal(TF32.operand(jnp.asarray(normal)), normal.astype(np.float16).astype(np.float32))
    assert np.array_equal(FLOAT32.operand(jnp.asarray(x)), x)


@pytest.mark.exhaustive
def test_running_sums_are_float16s() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-30, 31, shape).astype(np.float32) for shape in ((4, 50), (50, 3)))
    total = np.zeros((4, 3), np.float16)
    for k in range(50):
        # products of such integers are exact, and so is their float32 sum with a float16
        total = (total.astype(np.float32) + a[:, k, None] * b[None, k]).astype(np.float16)
    assert np.array_equal(FLOAT16_SUMS.dot(jnp.asarray(a), jnp.asarray(b)), total.astype(np.float32))


@pytest.mark.exhaustive
def test_running_sums_overflow() -> None:
    a = jnp.full((1, 5), 127.0)
    assert np.isinf(FLOAT16_SUMS.dot(a, a.T)).all()
    assert np.array_equal(FLOAT16_SUMS.dot(a[:, :4], a[:, :4].T), [[64512.0]])  # 64,516 to a multiple of 32


@pytest.mark.exhaustive
def test_integers_are_integers() -> None:
    x, w = operands(0, 16, 8)
    s_x, s_w, s_y = (np.float64(scale) for scale in scales(16))
    a, b = (np.clip(np.rint(np.asarray(v) / s), -127, 127).astype(int) for v, s in ((x, s_x), (w, s_w)))
    exact = np.clip(np.rint((a @ b) * (s_x * s_w / s_y)), -127, 127)
    assert np.array_equal(integers(x, w), exact)
    assert np.array_equal(outputs(x, w, BFLOAT16, "integer-valued"), exact)


@pytest.mark.exhaustive
def test_limits() -> None:
    assert first_inexact_bits(FLOAT32) == 17
    assert first_inexact_bits(BFLOAT16) == 10
    assert first_inexact_bits(TF32, symmetric=False) == 12
    assert 1040 * 127**2 < 2**24 < 1041 * 127**2
    assert first_inexact_terms(1045) == 1041


def test_paths_by_simulation() -> None:
    walks = np.cumsum(np.random.default_rng(2).normal(size=(4000, 400)), axis=1)
    area = np.sum(walks**2, axis=1)
    assert pytest.approx(np.mean(np.sqrt(area)) / np.sqrt(np.mean(area)), abs=0.03) == theory.PATH


@pytest.mark.exhaustive
def test_overflow_by_simulation() -> None:
    rng = np.random.default_rng(3)
    steps = rng.normal(scale=theory.SPREAD, size=(4000, 1024)) * rng.normal(scale=theory.SPREAD, size=(4000, 1024))
    share = np.mean(np.max(np.abs(np.cumsum(steps, axis=1)), axis=1) > 65520)
    assert theory.overflow(1024) == pytest.approx(share, abs=5 * (share / 4000) ** 0.5)


def test_operand_errors_by_rounding() -> None:
    scale = float(np.float32(0.0317))
    codes = np.arange(-127, 128)
    weights = np.exp(-((codes / theory.SPREAD) ** 2) / 2)
    values = (codes * np.float32(scale)).astype(np.float32)
    wrong = np.asarray(BFLOAT16.operand(jnp.asarray(values)), np.float64) - codes * np.float64(scale)
    expected = np.sqrt(np.sum(weights * wrong**2) / np.sum(weights * (codes * scale) ** 2))
    assert theory.operand_error(scale, 7) == pytest.approx(expected, rel=1e-3)


def test_a_simple_ratio_of_scales_makes_ties() -> None:
    assert theory.near_ties(4 / 127 / 8, 64) > 1e-3
    assert theory.near_ties(4 / 127 / 8 * 2**-0.1, 64) < 1e-5
