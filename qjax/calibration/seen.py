"""Checks during calibration whether the data of a tensor can determine a good scale, which its observer cannot tell.

An observer only records what determines a scale. It cannot detect three problems:

- Data that are a single number (a blank image, the zeros with which a model is initialised) define no scale.
- Channels of very different magnitude in one tensor (boxes in pixels next to scores between 0 and 1): the scale of the
  large ones leaves a code or two for the small ones.
- A constant that an operation inserts among codes can lie outside their range, see `qjax.tracing.joined`.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.affine import QParams
from qjax.ops.facts import End

Extremes = dict[str, jax.Array]
""""low" and "high" of a tensor, float32; "low2" and "high2" are those of each channel along axis 2."""

_MOST_CHANNELS = 4096
_FEW_CODES = 1
"""A channel counts as lost if its codes are at most this far apart."""
_MOST_OTHERS = 16
"""A channel is lost only if the whole tensor has more codes than this."""
_FEWEST_VALUES = 8
"""Channels with fewer values are not judged, because these may lie close together by chance."""
_STILL = 2.0**-10
"""A channel that varies less than this fraction of its largest number is constant in float, too."""


_NOTHING = 2.0**-21
"""A channel that varies less than this fraction of the tensor's largest number varies by rounding of float32 sums."""


@dataclasses.dataclass(frozen=True)
class Blind:
    """A quantizer whose data were a single number.

    number: that number. values: the parameters that calibration gave the quantizer, which show later whether anything
    else has set them since. location: the user's line.
    """

    name: str
    number: float
    values: tuple[float, ...]
    location: str | None


def extremes(x: jax.Array, leading: int, *, channels: Sequence[int] = (), finite: bool = True) -> Extremes:
    """The least and the greatest number of a tensor.

    Args:
      x: a float tensor; its first `leading` axes are those of scans, and are kept.
      channels: the axes along which the extremes of every channel are computed.
      finite: whether infinities are left out; NaN always is.
    """
    x = x.astype(jnp.float32)
    counted = jnp.isfinite(x) if finite else ~jnp.isnan(x)
    least, greatest = (jnp.where(counted, x, jnp.full_like(x, end)) for end in (jnp.inf, -jnp.inf))

    def along(*kept: int) -> tuple[jax.Array, jax.Array]:
        axes = tuple(axis for axis in range(x.ndim) if axis not in kept)
        return jnp.min(least, axis=axes, initial=jnp.inf), jnp.max(greatest, axis=axes, initial=-jnp.inf)

    found: Extremes = dict(zip(("low", "high"), along(*range(leading)), strict=True))
    for axis in {axis % max(1, x.ndim) for axis in channels if leading == 0 and axis < x.ndim} - {0}:
        if 1 < x.shape[axis] <= _MOST_CHANNELS:
            found[f"low{axis}"], found[f"high{axis}"] = along(axis)
    return found


def merge_extremes(before: Extremes, now: Extremes) -> Extremes:
    """The extremes of both; those whose shape has changed, because an axis has another length, are left out."""
    return {
        key: (jnp.minimum if key.startswith("low") else jnp.maximum)(before[key], value)
        for key, value in now.items()
        if key in before and before[key].shape == value.shape
    }


def nothing_seen(shapes: Mapping[str, Any]) -> Extremes:
    """The initial value for `merge_extremes`. shapes: of the extremes of one batch."""
    return {
        key: jnp.full(a.shape, jnp.inf if key.startswith("low") else -jnp.inf, jnp.float32) for key, a in shapes.items()
    }


def without_hidden(x: jax.Array, operand: Sequence[Extremes], hidden: Collection[End]) -> jax.Array:
    """A joined result in which numbers beyond an end of the range that its readers ignore are clipped to that end.

    NaN and infinity, which no range can contain, become zero. Numbers far beyond the data are limited to 2^14 times the
    data's size, so that observers need not cope with 1e38.
    """
    low = jnp.min(jnp.stack([each["low"] for each in operand]), axis=0)
    high = jnp.max(jnp.stack([each["high"] for each in operand]), axis=0)
    # The range of a quantizer always contains zero.
    low, high = (jnp.broadcast_to(a.reshape(a.shape + (1,) * (x.ndim - a.ndim)), x.shape) for a in (low, high))
    low, high = jnp.minimum(low, jnp.zeros_like(low)), jnp.maximum(high, jnp.zeros_like(high))
    far = jnp.maximum(-low, high) * np.float32(2.0**14)
    far = jnp.where((far > 0) & jnp.isfinite(far), far, jnp.full_like(far, 1e30))
    x = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
    return jnp.clip(x, low if "low" in hidden else -far, high if "high" in hidden else far)


def flat_values(values: Mapping[str, Any]) -> tuple[float, ...]:
    """All numbers of a quantizer as one tuple, in the order of their names."""
    return tuple(float(x) for key in sorted(values) for x in np.ravel(np.asarray(values[key], np.float32)))


def single_number(seen: Sequence[Mapping[str, np.ndarray]]) -> float | None:
    """The single number that a quantizer has seen, or None; for a quantizer in scans, in any iteration."""
    low = np.min([np.asarray(each["low"]) for each in seen], axis=0)
    high = np.max([np.asarray(each["high"]) for each in seen], axis=0)
    alone = np.ravel(low >= high)
    return float(np.ravel(low)[np.argmax(alone)]) if alone.any() else None


def beyond(result: Mapping[str, np.ndarray], operand: Sequence[Mapping[str, np.ndarray]], qparams: QParams) -> bool:
    """Whether a joined result exceeds both the numbers of its operand and the range of the operand's codes."""
    scale, zero_point = np.asarray(qparams.scale, np.float64), np.asarray(qparams.zero_point, np.float64)
    spec = qparams.spec
    if not spec.per_tensor:
        scale, zero_point = np.max(scale), np.ravel(zero_point)[0]
    least, greatest = ((code - zero_point) * scale for code in (spec.qmin, spec.qmax))
    low, high = np.asarray(result["low"], np.float64), np.asarray(result["high"], np.float64)
    shown = [np.min([e["low"] for e in operand], axis=0), np.max([e["high"] for e in operand], axis=0)]
    under = (low < np.minimum(shown[0], 0)) & (low < least - scale / 2)
    over = (high > np.maximum(shown[1], 0)) & (high > greatest + scale / 2)
    return bool(np.any(under | over))


class Lost(NamedTuple):
    """Something with only one or two codes. said: its description. still: whether all channels are nearly constant."""

    said: str
    still: bool = False


def lost_tensors(
    seen: Mapping[str, Mapping[str, np.ndarray]], qparams: QParams, counts: Mapping[str, int]
) -> dict[str, Lost]:
    """Find tensors and channels that get one or two codes although their numbers vary, by label.

    Such a tensor is small compared with others on the same scale, or such channels compared with others of the tensor.

    Args:
      seen: the extremes of the tensors that share the quantizer, by label.
      counts: how many numbers of each of them were seen.
    """
    if np.size(qparams.scale) != 1:
        return {}
    step, spec = float(np.reshape(qparams.scale, ())), qparams.spec
    zero_point = float(np.reshape(np.asarray(qparams.zero_point), ()))

    def span(low: Any, high: Any) -> np.ndarray:
        ends = [
            np.clip(np.rint(np.asarray(x, np.float64) / step) + zero_point, spec.qmin, spec.qmax) for x in (low, high)
        ]
        return ends[1] - ends[0]

    def lost(low: Any, high: Any) -> np.ndarray:
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        moves = high - low > np.maximum(_STILL * np.maximum(np.abs(low), np.abs(high)), _NOTHING * largest)
        return moves & (span(low, high) <= _FEW_CODES)

    low, high = (np.asarray([ends[key] for ends in seen.values()]) for key in ("low", "high"))
    if not seen or not span(low.min(), high.max()) > _MOST_OTHERS:
        return {}
    largest = max(-float(low.min()), float(high.max()))
    why = f"never leave one or two codes, because the scale that they share has steps of {step:.4g}"
    found: dict[str, Lost] = {}
    for label, ends in seen.items():
        if lost(ends["low"], ends["high"]):
            found[label] = Lost(f"its values move from {float(ends['low']):.4g} to {float(ends['high']):.4g} but {why}")
            continue
        for axis in sorted(int(key.removeprefix("low")) for key in ends if key.startswith("low") and key != "low"):
            low, high = ends[f"low{axis}"], ends[f"high{axis}"]
            if counts[label] // np.size(low) < _FEWEST_VALUES:
                continue
            channels = np.flatnonzero(lost(low, high))
            if channels.size:
                shown = ", ".join(map(str, channels[:4])) + (", ..." if channels.size > 4 else "")
                spread = float(np.max(high[channels] - low[channels]))
                found[label] = Lost(
                    f"the values of {channels.size} of {np.size(low)} channels along axis {axis} ({shown}) move by "
                    f"{spread:.4g} at most and {why}",
                    bool(np.all(span(low, high) <= _MOST_OTHERS)),
                )
    return found
