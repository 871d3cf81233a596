"""The noise of one quantizer: the signal-to-noise ratio of a sample of its input."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from qjax.calibration.channels import to_rows
from qjax.numerics.affine import QParams, QSpec

MOST = 4096
"""How many numbers of a tensor are sampled."""

_HIDDEN = -1e4
"""Numbers up to this are masks in front of a softmax, not a signal."""


def least(spec: QSpec) -> float:
    """The decibels that a quantizer should keep: 10 from 4 bits on, for fewer what is left of 6 for each bit.

    Uniform codes of a normal distribution within 4 standard deviations have 6 bits - 7 decibels; 2 bits are for those
    who train with them.
    """
    return min(10.0, 6.0 * spec.bits - 14.0)


def thinned(x: jax.Array, leading: int) -> jax.Array:
    """At most `MOST` numbers of a tensor, evenly from all of its axes; its first axes stay."""
    count = math.prod(x.shape[leading:])
    step = max(1, -(-count // MOST))
    while math.gcd(step, count) > 1:
        # With a common factor the steps would reach only some of the channels.
        step += 1
    return jnp.reshape(x, (*x.shape[:leading], -1))[..., ::step].astype(jnp.float32)


def signal_and_noise(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, spec: QSpec) -> tuple[float, float]:
    """The sums of squares of numbers, and of what their codes lose; scale and zero point broadcast to x."""
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint(x / scale) + zero_point, spec.qmin, spec.qmax)
        error = x - (codes - zero_point) * scale
    counted = np.isfinite(x) & np.isfinite(error) & (x > _HIDDEN)
    wide, lost = np.where(counted, x, 0).astype(np.float64), np.where(counted, error, 0).astype(np.float64)
    return float(np.sum(wide * wide)), float(np.sum(lost * lost))


def of_activation(x: np.ndarray, qparams: QParams) -> tuple[float, float]:
    """The sums of a sample that `thinned` made; the parameters have the axes that stayed."""
    scale, zero_point = (np.asarray(a)[..., None] for a in (qparams.scale, qparams.zero_point))
    return signal_and_noise(x, scale, zero_point, qparams.spec)


def decibels(signal: float, noise: float) -> float:
    """Infinite where nothing is lost, or where there is nothing to lose."""
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
