"""A histogram whose range grows with the data, with exact counts.

Bins are `[i * w, (i + 1) * w)` for consecutive integers i, and the width w is a power of two. When the data outgrow the
bins, the width doubles and neighbours (2i, 2i + 1) merge. Nothing is interpolated, so the counts are those of all the
data at the final width, whatever the batches and their order.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qjax.calibration.channels import batch_rows, batch_summary
from qjax.calibration.counter import Counter, add, scatter, to_host, zero_counter
from qjax.calibration.observer import BoundsObserver
from qjax.calibration.value_counts import Tally, counted, require_usable, zero_tally
from qjax.numerics.affine import QSpec

_MIN_EXPONENT = -126  # the narrowest bin is the smallest normal float32
_MANTISSA_BITS = 24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HistogramState:
    """One histogram per scale; P is the parameters' shape.

    lo, hi: float32 P, exact bounds so far (+inf and -inf before any data).
    exponent: int32 P, the bin width is `2**exponent`.
    first: int32 P, bin j covers `[(first + j) * 2**exponent, (first + j + 1) * 2**exponent)`.
    counts: P + (bins,), values in each bin.
    zeros: P, values that are exactly zero; they are in `counts` too.
    """

    lo: Array
    hi: Array
    exponent: Array
    first: Array
    counts: Counter
    zeros: Counter
    tally: Tally


@dataclass(frozen=True)
class HostHistogram:
    """The concrete histogram of one scale: `counts[j]` values in `[edges[j], edges[j + 1])`.

    counts: uint64 (bins,). edges: float64 (bins + 1,), exact. zeros: how many of them are exactly 0.
    first: the index of bin 0 in units of `width`.
    """

    lo: float
    hi: float
    width: float
    first: int
    counts: np.ndarray
    zeros: int

    @property
    def edges(self) -> np.ndarray:
        return (self.first + np.arange(self.counts.size + 1, dtype=np.float64)) * self.width


@dataclass(frozen=True)
class HistogramObserver(BoundsObserver):
    """Base class of the observers that read their range from a histogram.

    Args:
        bins: number of bins per scale, an even number from 16 to 65,536. The width is the least power of two that
            covers the range, so at least half of the bins are used.

    Values are taken as float32. A width is never below `2**-126`, nor below `2**-24` of the power of two above the
    largest magnitude, so data with a spread that small relative to their offset share bins. Counts are exact up to
    2**63 values in all; beyond that, `qparams` raises.
    """

    bins: int = field(default=2048, kw_only=True)

    def __post_init__(self) -> None:
        if not (16 <= self.bins <= 65536 and self.bins % 2 == 0):
            raise ValueError(f"bins: expected an even number from 16 to 65536, got {self.bins}; the default is 2048.")

    def init(self, spec: QSpec, shape: tuple[int, ...]) -> HistogramState:
        """A state that has seen nothing; `shape` is that of one batch's tensor."""
        params = spec.param_shape(shape)
        return HistogramState(
            lo=jnp.full(params, jnp.inf, jnp.float32),
            hi=jnp.full(params, -jnp.inf, jnp.float32),
            exponent=jnp.full(params, _MIN_EXPONENT, jnp.int32),
            first=jnp.zeros(params, jnp.int32),
            counts=zero_counter((*params, self.bins)),
            zeros=zero_counter(params),
            tally=zero_tally(),
        )

    def update(self, state: HistogramState, x: Array, spec: QSpec) -> HistogramState:
        """The state after one more batch; pure, for jit, vmap and scan."""
        rows, finite = batch_rows(x, spec)
        params, bins, n = state.lo.shape, self.bins, rows.shape[0]
        batch_lo, batch_hi, seen = batch_summary(x, spec)
        lo = jnp.minimum(state.lo.reshape(n), batch_lo)
        hi = jnp.maximum(state.hi.reshape(n), batch_hi)
        exponent, first = _grid(lo, hi, bins)

        old = Counter(state.counts.high.reshape(n, bins), state.counts.low.reshape(n, bins))
        old_exponent, old_first = state.exponent.reshape(n), state.first.reshape(n)
        merged = lax.cond(
            jnp.any((exponent != old_exponent) | (first != old_first)),
            lambda: scatter(old, _new_bins(old_exponent, old_first, exponent, first, bins)),
            lambda: old,
        )

        column = _floor_index(rows, exponent.reshape(n, 1)) - first.reshape(n, 1)
        # Only values that are not finite, which have weight 0, can lie outside.
        column = jnp.clip(column, 0, bins - 1)
        row = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32).reshape(n, 1), column.shape)
        batch = jnp.zeros((n, bins), jnp.uint32).at[row, column].add(finite.astype(jnp.uint32))
        counts = add(merged, batch)
        zeros = jnp.sum(finite & (rows == jnp.float32(0)), axis=1, dtype=jnp.uint32)
        return HistogramState(
            lo=lo.reshape(params),
            hi=hi.reshape(params),
            exponent=exponent.reshape(params),
            first=first.reshape(params),
            counts=Counter(counts.high.reshape(*params, bins), counts.low.reshape(*params, bins)),
            zeros=add(state.zeros, zeros.reshape(params)),
            tally=counted(state.tally, seen),
        )

    def histograms(self, state: HistogramState) -> list[HostHistogram]:
        """The concrete histograms, one per scale in row-major order of the parameters' shape.

        Raises:
            ValueError: no data was seen, or some of it was NaN or infinite.
        """
        require_usable(state.tally, self.name)
        counts = to_host(state.counts).reshape(-1, self.bins)
        zeros = to_host(state.zeros).reshape(-1)
        lo, hi = np.asarray(state.lo).reshape(-1), np.asarray(state.hi).reshape(-1)
        exponent, first = np.asarray(state.exponent).reshape(-1), np.asarray(state.first).reshape(-1)
        return [
            HostHistogram(
                lo=float(lo[i]),
                hi=float(hi[i]),
                width=2.0 ** int(exponent[i]),
                first=int(first[i]),
                counts=counts[i],
                zeros=int(zeros[i]),
            )
            for i in range(counts.shape[0])
        ]


def _power_of_two(exponent: Array) -> Array:
    """`2**exponent` as float32, exact for exponents in [-126, 127]; XLA's exp2 is not."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _floor_index(x: Array, exponent: Array) -> Array:
    """`floor(x / 2**exponent)` as int32, exact if the magnitude of the quotient is at most 2**24."""
    index = jnp.floor(x * _power_of_two(-exponent)).astype(jnp.int32)
    # A product below 2**-126 may be flushed to zero, and floor would then return 0 instead of -1.
    return jnp.where(x < 0, jnp.minimum(index, -1), index)


def _grid(lo: Array, hi: Array, bins: int) -> tuple[Array, Array]:
    """The least exponent at which `bins` bins cover [lo, hi], and the index of the first of them.

    Both depend on lo and hi alone, and the exponent never falls as the range grows, so the order of the batches cannot
    matter. The computation is in integers: the ends are multiples of the finest width allowed, where the larger one has
    24 bits and is exact, and are halved until they are close enough.
    """
    empty = lo > hi
    lo, hi = jnp.where(empty, 0.0, lo), jnp.where(empty, 0.0, hi)
    magnitude = jnp.maximum(jnp.abs(lo), jnp.abs(hi))
    field = (lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) & 0xFF
    finest = jnp.maximum(field - 126 - _MANTISSA_BITS, _MIN_EXPONENT)
    low, high = _floor_index(lo, finest), _floor_index(hi, finest)
    halvings = jnp.arange(_MANTISSA_BITS + 2, dtype=jnp.int32).reshape(-1, 1)
    span = (high.reshape(1, -1) >> halvings) - (low.reshape(1, -1) >> halvings)
    shift = jnp.sum(span >= bins, axis=0, dtype=jnp.int32)
    return finest + shift, low >> shift


def _new_bins(old_exponent: Array, old_first: Array, exponent: Array, first: Array, bins: int) -> Array:
    """The new bin of each old bin's count: int32 (rows, bins)."""
    old_index = old_first.reshape(-1, 1) + jnp.arange(bins, dtype=jnp.int32).reshape(1, -1)
    shift = jnp.clip(exponent - old_exponent, 0, 31).reshape(-1, 1)
    # Bins outside the new range hold no counts.
    return jnp.clip((old_index >> shift) - first.reshape(-1, 1), 0, bins - 1)
