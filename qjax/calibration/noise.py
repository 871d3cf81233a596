"""The noise of one quantizer: the signal-to-noise ratio of a sample of its input."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from qjax.calibration.channels import to_rows
from qjax.numerics.affine import QParams, QSpec

MOST = 4096
"""The most numbers of a tensor that are sampled."""

_HIDDEN = -1e4
"""Numbers up to this are masks for a softmax, not a signal."""


def least(spec: QSpec) -> float:
    """The signal-to-noise ratio in dB that a quantizer should reach: 10 from 4 bits on, and 6 less for each bit fewer.

    Uniform codes of a normal distribution within 4 standard deviations reach 6 * bits - 7 dB. Those who use 2 bits
    train with them.
    """
    return min(10.0, 6.0 * spec.bits - 14.0)


def thinned(x: jax.Array, leading: int) -> jax.Array:
    """At most `MOST` numbers of a tensor, evenly from all of its axes except the first ones, which are kept whole."""
    count = math.prod(x.shape[leading:])
    step = max(1, -(-count // MOST))
    while math.gcd(step, count) > 1:
        # If the steps had a common factor, they would reach only some of the channels.
        step += 1
    return jnp.reshape(x, (*x.shape[:leading], -1))[..., ::step].astype(jnp.float32)


def signal_and_noise(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, spec: QSpec) -> tuple[float, float]:
    """The sums of squares of numbers and of their quantization errors; scale and zero point broadcast to x."""
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint(x / scale) + zero_point, spec.qmin, spec.qmax)
        error = x - (codes - zero_point) * scale
    counted = np.isfinite(x) & np.isfinite(error) & (x > _HIDDEN)
    wide, lost = np.where(counted, x, 0).astype(np.float64), np.where(counted, error, 0).astype(np.float64)
    return float(np.sum(wide * wide)), float(np.sum(lost * lost))


def of_activation(x: np.ndarray, qparams: QParams) -> tuple[float, float]:
    """The sums for a sample from `thinned`; the parameters have the axes that were kept."""
    scale, zero_point = (np.asarray(a)[..., None] for a in (qparams.scale, qparams.zero_point))
    return signal_and_noise(x, scale, zero_point, qparams.spec)


def decibels(signal: float, noise: float) -> float:
    """The ratio in dB; infinite if there is no noise or no signal."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def of_weight(w: np.ndarray, qparams: QParams, shape: tuple[int, ...]) -> tuple[float, float]:
    """The sums of a weight of that shape; both may have axes of scans in front."""
    spec = qparams.spec
    parts = w.reshape(-1, *shape)
    scale, zero_point = (
        np.asarray(a).reshape(-1, *spec.param_shape(shape)) for a in (qparams.scale, qparams.zero_point)
    )
    signal = noise = 0.0
    for index, part in enumerate(parts):
        rows, own = to_rows(part, spec), index % len(scale)
        step = max(1, rows.shape[1] // max(1, MOST // rows.shape[0]))
        found = signal_and_noise(rows[:, ::step], scale[own].reshape(-1, 1), zero_point[own].reshape(-1, 1), spec)
        signal, noise = signal + found[0], noise + found[1]
    return signal, noise
