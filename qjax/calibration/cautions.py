"""Warnings of the calibration about tensors whose codes cannot be good, with their names and the cure."""

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qjax.calibration import noise
from qjax.calibration.learned import Quantizer
from qjax.calibration.seen import Blind, Lost
from qjax.numerics.affine import QParams
from qjax.support.user_frames import users_level

_WIDEST_STEP = 1.0
"""The widest good step of a softmax's input: neighbouring codes then differ by a factor of e in the result."""
_WIDEST_RANGE = 255.0
"""The widest plausible range of a softmax's input, because scores do not reach further."""


class Named(Protocol):
    """A tensor with a quantizer, as the tracing knows it."""

    @property
    def label(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def location(self) -> str | None: ...


def warn_of_noise(place: Named, q: Quantizer, powers: list[tuple[float, float]]) -> None:
    """Warn of a quantizer that loses too much of its input. powers: signal and noise of its tensors."""
    if q.fixed is not None or q.follows_tensor:
        return
    kept = noise.decibels(sum(signal for signal, _ in powers), sum(lost for _, lost in powers))
    if kept < noise.least(q.spec):
        where = f" ({place.location})" if place.location else ""
        warnings.warn(
            f"Quantizer {place.name!r}{where} keeps {kept:.1f} dB of its tensor's last batch; expected at least "
            f"{noise.least(q.spec):.0f} dB with {q.spec.bits} bits. Its range is too wide for most numbers: give it "
            "more "
            'bits, an observer that clips ("percentile", "mse"), or qjax.FLOAT. qjax.statistics shows its range.',
            stacklevel=users_level(),
        )


def warned_of_steps(place: Named, q: Quantizer, qparams: QParams) -> bool:
    """Warn of a softmax whose input has steps too wide to rank scores, usually because a mask widened its range."""
    step = float(np.max(np.asarray(qparams.scale)))
    # Few bits cause wide steps, too, but not such a range.
    if q.fixed is not None or step <= _WIDEST_STEP or step * (2**q.spec.bits - 1) <= _WIDEST_RANGE:
        return False
    where = f" ({place.location})" if place.location else ""
    warnings.warn(
        f"Quantizer {place.name!r}{where} has steps of {step:.3g}, and a softmax reads it: one step is a factor of "
        f"exp({step:.3g}). Numbers of a mask, such as -1e4 or -1e9, have widened its range. Pass the mask to the model "
        "as booleans or as 0 and 1, and apply it by jnp.where(mask, scores, -1e9) or scores + (1 - mask) * -1e9. If "
        "there "
        'is no mask, use more bits, or an observer that clips ("percentile", "mse").',
        stacklevel=users_level(),
    )
    return True


def warn_of_clipped_constant(place: Named, quantizer: str, low: float, high: float, qparams: QParams) -> None:
    """Warn of a result with numbers outside its operand's range, which cannot be widened that far."""
    least, greatest = float(np.min(_ends(qparams))), float(np.max(_ends(qparams)))
    number, end = (low, least) if least - low > high - greatest else (high, greatest)
    where = f" ({place.location})" if place.location else ""
    # With 16 bits the range may be 256 times as wide for the same steps.
    cure = f", give quantizer {quantizer!r} 16 bits" if abs(number) < 256 * (greatest - least) else ""
    warnings.warn(
        f"{place.label!r}{where} puts {number:.4g} among numbers whose codes reach from {least:.4g} to {greatest:.4g}, "
        f"so it becomes {end:.4g}: a range that included it would leave the other numbers too few codes. Choose a "
        f"constant nearer to the data{cure}, or insert it after the operations that follow.",
        stacklevel=users_level(),
    )


def warn_of_lost(place: Named, lost: Lost, *, output: bool) -> None:
    """Warn of tensors or channels that get only one or two codes from the shared scale."""
    where = f" ({place.location})" if place.location else ""
    what = "Output" if output else "Input" if place.kind == "input" else "Tensor"
    if lost.still:
        cure = "All channels hardly differ between examples: calibrate with data that differ as real data do"
    elif output:
        cure = "Return parts of different magnitude separately, so that each has its own scale"
    elif place.kind == "input":
        cure = "Scale the channels to a similar magnitude before the model, or pass them as separate arguments"
    else:
        cure = "Scale the parts to a similar magnitude before they are joined or normalized"
    warnings.warn(
        f"{what} {place.label!r}{where}: {lost.said}. {cure}; or give quantizer {place.name!r} 16 bits.",
        stacklevel=users_level(),
    )


def blind_message(blind: Sequence[Blind]) -> str:
    """Name the quantizers that saw a single number, and the cure."""

    def one(each: Blind) -> str:
        return f"{each.name!r}{f' ({each.location})' if each.location else ''} saw only {each.number:.6g}"

    shown = "; ".join(one(each) for each in blind[:3]) + (f"; and {len(blind) - 3} more" if len(blind) > 3 else "")
    count = "One quantizer has" if len(blind) == 1 else f"{len(blind)} quantizers have"
    zero = (
        " A branch that an untrained model initialises with zeros (a last batch norm of scale 0) shows more after some "
        "steps of training: calibrate again then."
    )
    return (
        f"{count} a range that comes from a single number, so codes of other data are clipped: {shown}. "
        f"Call qjax.calibrate(qmodel, batches) with real data.{zero if any(not each.number for each in blind) else ''}"
    )


def _ends(qparams: QParams) -> np.ndarray:
    scale, zero_point = np.asarray(qparams.scale, np.float64), np.asarray(qparams.zero_point, np.float64)
    return np.stack([(code - zero_point) * scale for code in (qparams.spec.qmin, qparams.spec.qmax)])
