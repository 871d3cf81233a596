"""The quadratic form of a layer's error against the convolution itself, and random rounding against its expectation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab.learned_rounding import STUDY
from experiments.lab.roundings import OneLayer, patches, penalty
from qjax.contrib.lab.study import Settings


def layer_of(rng, channels=2):
    """A layer of 9 inputs, with what it was made from."""
    images = rng.random((3, 8, 8, 1), np.float32)
    kernel = rng.normal(size=(9, channels))
    scale = np.asarray([0.3, 0.7])
    x = patches(images)
    x_q = np.round(x * 16) / 16
    return images, kernel, scale, x, x_q, OneLayer.of(x, x_q, kernel, scale, -3, 3)


def test_patches_are_what_a_convolution_multiplies():
    images, kernel, *_ = layer_of(np.random.default_rng(0))
    with jax.enable_x64(True):
        expected = jax.lax.conv_general_dilated(
            jnp.asarray(images.astype(np.float64)),
            jnp.asarray(kernel.reshape(3, 3, 1, 2)),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    np.testing.assert_allclose((patches(images) @ kernel).reshape(3, 8, 8, 2), expected, rtol=1e-12, atol=1e-12)


def test_errors_are_sums_of_squares_and_the_best_is_the_least():
    rng = np.random.default_rng(1)
    _, kernel, scale, x, x_q, layer = layer_of(rng)
    codes = layer.random(50, rng)
    assert set(np.unique(codes - np.floor(kernel / scale))) >= {0, 1}
    assert codes.min() >= -3
    assert codes.max() <= 3
    expected = [np.sum((x @ kernel - x_q @ (c * scale)) ** 2, 0) for c in codes]
    np.testing.assert_allclose(layer.errors(codes), expected, rtol=1e-8)
    best = layer.best()
    assert np.all(best <= layer.errors(codes).min(0) + 1e-9)
    assert np.all(best <= layer.errors(np.clip(np.rint(kernel / scale), -3, 3)) + 1e-9)


def test_random_rounding_doubles_the_error_of_uniform_fractions():
    steps = (np.arange(20_000) + 0.5) / 20_000 * 4 - 2
    assert abs(penalty(steps, -3, 3, 20, np.random.default_rng(0)) - 10 * math.log10(2)) < 0.03
    # weights beyond the grid have no choice and do not count
    assert penalty(np.append(steps, [9.5] * 1000), -3, 3, 20, np.random.default_rng(0)) == penalty(
        steps, -3, 3, 20, np.random.default_rng(0)
    )


def test_predictions_are_of_what_is_measured():
    names = [p.name for p in STUDY.predict(Settings())]
    assert len(set(names)) == len(names) == 10
    assert names == [p.name for p in STUDY.predict(Settings(full=True))]
