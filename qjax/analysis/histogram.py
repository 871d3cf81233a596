"""Histograms over the grid of a quantizer: of the values that it receives, and of the codes that it produces.

Both have the same axis, in steps: code `c` covers `[c - 1/2, c + 1/2)`. With up to 32 codes, every code has its own
bar, and the values have eight bars for each code. Wider grids combine neighbouring codes into at most 128 bars.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.affine import QSpec

_FINE_LEVELS = 32
_BARS = 128
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts over equally wide bars, in steps of the scale from the least code.

    after: how many codes fall into each bar, from the least code on. width: codes per bar.
    before: how many values fall into each bar. before_width: the width of these bars. before_start: where they begin,
    below the least code; the first and the last bar also count everything beyond them.
    """

    after: tuple[int, ...]
    width: int
    before: tuple[int, ...]
    before_width: float
    before_start: float


def _layout(levels: int) -> tuple[int, float, int, int]:
    """(codes per bar, width of a bar of values, number of bars on the grid, number of bars on each side of it)."""
    if levels <= _FINE_LEVELS:
        return 1, 1 / _PARTS, levels * _PARTS, max(_PARTS, levels)
    group = -(-levels // _BARS)
    bars = -(-levels // group)
    return group, float(group), bars, max(2, bars // 8)


def fine_counts(x: jax.Array, scale: jax.Array, zero_point: jax.Array, spec: QSpec) -> jax.Array:
    """int32 [bars]: counts of the values before a quantizer. x: float32. scale, zero_point: broadcast against x."""
    _, width, bars, margin = _layout(spec.levels)
    steps = x / scale + (zero_point - np.int32(spec.qmin)).astype(jnp.float32) + np.float32(0.5)
    # Float codes saturate here, so infinities and far outliers fall into the last bar.
    index = jnp.floor(jnp.nan_to_num(steps) * np.float32(1 / width)) + np.float32(margin)
    index = jnp.clip(index, np.float32(0), np.float32(bars + 2 * margin - 1)).astype(jnp.int32)
    return jnp.bincount(index.reshape(-1), length=bars + 2 * margin)


def merged(counts: np.ndarray, before: np.ndarray) -> Histogram:
    """The histogram of all codes and of `fine_counts`."""
    levels = counts.size
    group, width, bars, margin = _layout(levels)
    if before.size != bars + 2 * margin:
        raise ValueError(
            f"histogram: expected {bars + 2 * margin} bars of values for {levels} codes, got {before.size}."
        )
    after = np.add.reduceat(counts, np.arange(0, levels, group))
    return Histogram(tuple(after.tolist()), group, tuple(before.tolist()), width, -0.5 - margin * width)
