"""Chooses ranges of activations by the noise that they cause at the model's output.

An observer sees one tensor. Its exact range never clips, and its least squared error weighs all numbers equally. What
the model makes of a tensor is another matter: an outlier that a softmax or a ReLU ignores may be clipped, but one that
carries the output may not. Each quantizer of activations is therefore switched on alone, with several scales around its
present one, and the scale with the least noise at the model's output wins. LAPQ (Nahshan et al. 2019, arXiv 1911.07190)
and PTQ4ViT (Yuan et al. 2022, arXiv 2111.12293) choose scales by the loss and by the output in the same spirit.

The data that determined a range are never clipped by it, so no wider range would look better on them, but new inputs do
exceed it. Each batch is therefore judged with the range of all other batches (leave-one-out cross-validation; Stone
1974, JRSS B 36). The result is a factor by which the present scale is multiplied.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.post_training.layerwise_runner import Arguments, Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.simulated import Grid, grids_of, qparams_of, set_qparams, switched
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.support.batches import Batches, Inputs
from qjax.support.tables import decibels_text, table

FACTORS = ((0.84, 0.7, 0.59, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06, 0.03), (1.1, 1.25, 1.5, 2.0))
"""Factors on the present scale: narrower ones, and wider ones. Each list is followed as long as the noise falls."""

SHARE = 0.1
"""Quantizers with less than this fraction of the average noise are not changed."""

GAIN = 0.97
"""A scale is changed only if the noise falls below this fraction of its earlier value."""


@dataclasses.dataclass(frozen=True)
class Ranged:
    """One tensor whose range changed.

    Attributes:
      name: of its quantizer.
      factor: on its scale.
      before, after: its noise alone at the model's output, as in `Score`, on batches that its range left out.
    """

    name: str
    factor: float
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The result of `output_ranges`; `str()` is a table.

    Attributes:
      tensors: those that changed, greatest gain first.
      quantizers: how many were tried.
      before, after: noise of the model's output with all quantizers of activations, as in `Score`, on batches that the
        ranges left out; for a single batch, on that one.
    """

    tensors: tuple[Ranged, ...]
    quantizers: int
    before: float
    after: float

    def __str__(self) -> str:
        rows = [[t.name, f"{t.factor:.2f}", decibels_text(t.before), decibels_text(t.after)] for t in self.tensors]
        text = table(["tensor", "scale times", "alone, dB", "now"], rows)
        return f"{text}\n{len(self.tensors)} of {self.quantizers} tensors changed"


def output_ranges(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    progress: bool | None = None,
) -> Ranges:
    """Choose the scales of activations that cause the least noise at the model's output, in `qmodel` itself.

    Zero points do not change, so both ends of a range move by one factor. Each batch is judged with the ranges of all
    others, so that inputs beyond the calibrated range count. A single batch is judged with its own range.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters are the float model's; None is `qmodel` as it is.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch.

    Examples:
      ```python
      print(qjax.training.output_ranges(qmodel, batches))
      ```
    """
    check_quantized(qmodel, "output_ranges")
    kept = list(Batches(batches, inputs, "output_ranges").arguments())
    return choose(qmodel, reference or qmodel, Walk(qmodel, kept), kept, kept, progress=progress)


def choose(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[Arguments],
    seen: Sequence[Arguments],
    held: Sequence[Arguments] = (),
    *,
    progress: bool | None = None,
) -> Ranges:
    """`output_ranges` along a walk that has been compiled already, judged on the first few of the batches `seen`.

    held: batches that determined no range. They count only in `Ranges.before` and `after`.
    """
    kinds = {name: detail[0] for name, detail in qmodel.plan.details}
    reals, known = Stream.of(reference, quantized=False), grids_of(qmodel)
    names = [n for n, q in qmodel.plan.quantizers if kinds[n] != "weight" and q.fixed is None and "scale" in known[n]]
    grids = left_out(qmodel, walk, reals, names, len(batches), seen)

    def scaled(factors: Mapping[str, float], folds: Sequence[dict[str, Grid]]) -> list[dict[str, Grid]]:
        return [{**fold, **{name: _scaled(fold[name], f) for name, f in factors.items()}} for fold in folds]

    def alone(names: Collection[str], factor: float) -> dict[str, float]:
        changed, what = scaled(dict.fromkeys(names, factor), grids), f"ranges times {factor:g}: batch"
        return walk.alone(reals, changed, names, batches, what=what, progress=progress)

    before = alone(names, 1.0)
    tried = [name for name in names if before[name] * len(names) > SHARE * sum(before.values())]
    best: dict[str, tuple[float, float]] = {name: (1.0, before[name]) for name in tried}
    for factors in FACTORS:
        falling, last = list(tried), before
        for factor in factors:
            found = alone(falling, factor)
            falling = [name for name in falling if found[name] < last[name]]
            for name in falling:
                if found[name] < best[name][1]:
                    best[name] = factor, found[name]
            last = found
    changed = [Ranged(n, factor, before[n], noise) for n, (factor, noise) in best.items() if noise < GAIN * before[n]]
    changed.sort(key=lambda t: t.after - t.before)

    # With the weights off, because GPTQ chooses their codes again later, and few bits would hide the effect of a range.
    others = {name: grid for name, grid in switched(known, ()).items() if kinds[name] == "weight"}

    def together(factors: Mapping[str, float], batches: Sequence[Arguments], folds: Sequence[dict[str, Grid]]) -> float:
        pairs = zip(scaled(factors, folds), batches, strict=True)
        found = [walk.outputs(Stream(reals.parameters, {**fold, **others}), [args])[0] for fold, args in pairs]
        return noise_of(walk.outputs(reals, batches), found)

    chosen: dict[str, float] = {}
    least = together({}, batches, grids)
    for t in changed:
        noise = together({**chosen, t.name: t.factor}, batches, grids)
        if noise < least:
            chosen[t.name], least = t.factor, noise
    changed = [t for t in changed if t.name in chosen]

    judged = [*batches, *held], [*grids, *([known] * len(held))]
    result = Ranges(tuple(changed), len(tried), together({}, *judged), together(chosen, *judged))
    for t in changed:
        qparams = qparams_of(qmodel, t.name)
        scale = np.asarray(qparams.scale, np.float32) * np.float32(t.factor)
        set_qparams(qmodel, t.name, dataclasses.replace(qparams, scale=scale))
    return result


def left_out(
    qmodel: QuantizedModel, walk: Walk, reals: Stream, names: Sequence[str], count: int, seen: Sequence[Arguments]
) -> list[dict[str, Grid]]:
    """For each of the first `count` batches, the numbers that all quantizers would have from the other batches alone.

    An end of a range shrinks as the least or the greatest number does without the batch, whatever the observer.
    """
    known = grids_of(qmodel)
    if len(seen) < 2:
        return [known] * count
    ends = [walk.ranges(reals, [args]) for args in seen]
    folds: list[dict[str, Grid]] = []
    for index in range(count):
        others = [own for position, own in enumerate(ends) if position != index]
        fold = dict(known)
        for name in names:
            if name in ends[0]:
                parts = [_reach(own[name] for own in some) for some in (others, ends)]
                fold[name] = _shrink(known[name], *parts, symmetric=qmodel.plan.by_name[name].spec.symmetric)
        folds.append(fold)
    return folds


Ends = tuple[np.ndarray, np.ndarray]


def _reach(ends: Iterable[Ends]) -> Ends:
    """How far tensors reach below and above zero."""
    low, high = zip(*ends, strict=True)
    return np.maximum(-np.stack(low).min(axis=0), 0.0), np.maximum(np.stack(high).max(axis=0), 0.0)


def _shrink(grid: Grid, others: Ends, every: Ends, *, symmetric: bool) -> Grid:
    """The grid of a range whose ends shrink in the ratio of `others` to `every`."""
    below, above = (np.where(b > 0, a / np.where(b > 0, b, 1.0), 1.0) for a, b in zip(others, every, strict=True))
    scale, low, high = (np.asarray(grid[key], np.float32) for key in ("scale", "low", "high"))
    if symmetric:
        mine, whole = (np.maximum(*pair) for pair in (others, every))
        kept = np.where(mine > 0, mine, whole)
        return _scaled(grid, np.where(whole > 0, kept / np.where(whole > 0, whole, 1.0), 1.0))
    steps = high - low
    new = (high * above - low * below) * scale / steps
    # A tensor that is zero in all other batches would have no range.
    new = np.where(new > 0, new, scale).astype(np.float32)
    least = np.clip(np.round(low * below * scale / new), -steps, 0.0).astype(np.float32)
    return {**grid, "scale": new, "low": least, "high": least + steps}


def _scaled(grid: Mapping[str, Any], factor: Any) -> Grid:
    return {**grid, "scale": grid["scale"] * np.asarray(factor, np.float32)}
