"""Chooses the quantization parameters of a weight from the weight itself."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax.calibration.channels import to_rows
from qjax.calibration.observer import refuse_tiny
from qjax.jaxprs.evaluator import run_in_numpy
from qjax.numerics.affine import QParams, QSpec, choose_qparams, dequantize, quantize

WeightMethod = Literal["minmax", "mse", "lsq"]

_STEPS = 128
_SMALLEST_STEP = 8
_SMALL = 1 << 16
"""Up to so many elements, numpy computes quantized values of a weight faster than XLA compiles a program for them."""


def weight_qparams(w: Any, spec: QSpec, method: WeightMethod = "minmax") -> QParams:
    """Choose scale and zero point for the weight `w` on the host; the same input always gives the same bits.

    Args:
        w: a concrete floating array of any shape to which `spec` applies; taken as float32.
        spec: the codes, and the axes or groups with separate scales.
        method: one of these.
            "minmax": the exact range. Best at 8 bits.
            "mse": per scale, the range times i/128, i from 128 down to 8, with the least sum of
                `(w - dequantize(quantize(w)))**2`; of equal ones the widest. An asymmetric spec then moves
                each end separately over the same factors. Matters at 2 to 4 bits.
            "lsq": `2 * mean|w| / sqrt(qmax)`, the initial scale of Esser et al. 2020 (arXiv 1902.08153),
                section 2.1; symmetric specs only.

    Raises:
        ValueError: the method is unknown; `w` is empty or contains NaN or infinity; "lsq" with an asymmetric spec.
        TypeError: `w` is not floating.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> w = np.float32([[0.7, -0.1], [0.2, 1.4]])
      >>> print(qjax.calibration.weight_qparams(w, qjax.QSpec(bits=4, axis=-1)).scale)
      [0.1 0.2]
    """
    w = _check_weight(w)
    rows, shape = to_rows(w, spec), spec.param_shape(w.shape)
    lo, hi = rows.min(axis=1).reshape(shape), rows.max(axis=1).reshape(shape)
    refuse_tiny(lo, hi, spec)
    if method == "minmax":
        return choose_qparams(lo, hi, spec)
    if method == "mse":
        return choose_qparams(*_least_squares(w, lo, hi, spec), spec)
    if method == "lsq":
        return _lsq(rows, shape, spec)
    raise ValueError(f"unknown method {method!r}. Expected 'minmax', 'mse' or 'lsq'.")


def squared_error(w: np.ndarray, qparams: QParams) -> np.ndarray:
    """Per scale, the float64 sum of squared differences between `w` and its quantized value."""
    restored = (_restored_in_numpy if w.size <= _SMALL else _dequantize_compiled)(w, qparams)
    difference = np.subtract(w, np.asarray(restored), dtype=np.float64)
    rows = to_rows(np.square(difference, out=difference), qparams.spec)
    return rows.sum(axis=1).reshape(qparams.scale.shape)


def _dequantize(w: Any, qparams: QParams) -> jax.Array:
    return dequantize(quantize(w, qparams), qparams)


# One pass over the memory of a weight, where a search would otherwise make a hundred.
_dequantize_compiled = jax.jit(_dequantize)
_restored_in_numpy = run_in_numpy(_dequantize)


@functools.cache
def _choose_unchecked(spec: QSpec) -> Callable[[np.ndarray, np.ndarray], QParams]:
    """`choose_qparams` without its checks; the same bits."""
    return run_in_numpy(lambda lo, hi: choose_qparams(lo, hi, spec))


def _least_squares(w: np.ndarray, lo: np.ndarray, hi: np.ndarray, spec: QSpec) -> tuple[np.ndarray, np.ndarray]:
    """The clipped range of least squared error, per scale."""
    # Zero is always representable, so an end on the far side of zero cannot clip.
    lo, hi = np.minimum(lo, np.float32(0)), np.maximum(hi, np.float32(0))

    def search(clip: Callable[[np.float32], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        best_lo, best_hi = clip(np.float32(1))
        best = squared_error(w, choose_qparams(best_lo, best_hi, spec))
        for i in range(_STEPS - 1, _SMALLEST_STEP - 1, -1):
            new_lo, new_hi = clip(np.float32(i / _STEPS))
            error = squared_error(w, _choose_unchecked(spec)(new_lo, new_hi))
            better = error < best
            best_lo, best_hi = np.where(better, new_lo, best_lo), np.where(better, new_hi, best_hi)
            best = np.where(better, error, best)
        return best_lo, best_hi

    lo, hi = search(lambda factor: (lo * factor, hi * factor))
    if not spec.symmetric:
        lo, hi = search(lambda factor: (lo, hi * factor))
        lo, hi = search(lambda factor: (lo * factor, hi))
    return lo, hi


def _lsq(rows: np.ndarray, shape: tuple[int, ...], spec: QSpec) -> QParams:
    if not spec.symmetric:
        raise ValueError(f"method 'lsq' expected a symmetric spec. Got {spec}; use 'minmax' or 'mse'.")
    scale = 2.0 * np.abs(rows.astype(np.float64)).mean(axis=1) / np.sqrt(float(spec.qmax))
    # A row of zeros has no scale of its own, so choose_qparams decides.
    fallback = np.asarray(choose_qparams(np.zeros(1), np.zeros(1), spec).scale)
    scale = np.where(scale > 0.0, scale, fallback).astype(np.float32).reshape(shape)
    return QParams(jnp.asarray(scale), jnp.zeros(shape, jnp.int32), spec)


def _check_weight(w: Any) -> np.ndarray:
    w = np.asarray(w)
    # ml_dtypes' bfloat16 has kind "V" in numpy.
    if not np.issubdtype(w.dtype, np.floating) and w.dtype.name not in ("bfloat16",):
        raise TypeError(f"weight_qparams expected a floating weight. Got {w.dtype}.")
    w = w.astype(np.float32)
    if w.size == 0:
        raise ValueError(
            f"weight_qparams expected at least one element. Got shape {w.shape}: remove the layer of width 0."
        )
    bad = int(w.size - np.isfinite(w).sum())
    if bad:
        raise ValueError(f"weight_qparams expected finite weights. Got {bad} of {w.size} that are NaN or infinite.")
    return w
