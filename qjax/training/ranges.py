"""Ranges of activations by what they do to the model's output.

An observer sees one tensor. Its exact range never clips, and its least squared error counts all numbers alike. What
the model makes of a tensor is another matter: an outlier that a softmax or a relu ignores may be clipped, and one that
carries the output may not. So each quantizer of activations is switched on alone, with a few scales around its present
one, and the scale with the least noise at the model's output is kept. LAPQ (Nahshan et al. 2019, arXiv 1911.07190) and
PTQ4ViT (Yuan et al. 2022, arXiv 2111.12293) choose scales by the loss and by the output in the same spirit.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.batches import Batches, Inputs
from qjax.qmodel import QuantizedModel, check_quantized
from qjax.summary import decibels_text, table
from qjax.training.simulated import Grid, grids_of, qparams_of, set_qparams
from qjax.training.walk import Stream, Walk

FACTORS = {False: (0.84, 0.7, 0.59, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06, 0.03), True: (1.19, 1.41)}
"""Of the present scale: narrower ones, and wider ones. Each list is followed for as long as the noise falls."""

SHARE = 0.1
"""Quantizers with less than this part of the average noise stay as they are."""

GAIN = 0.97
"""A scale is changed only if the noise falls below this part of its earlier value."""


@dataclasses.dataclass(frozen=True)
class Ranged:
    """One tensor.

    Attributes:
      name: of its quantizer.
      factor: of its scale.
      before, after: what it alone did to the model's output, as in `Score`.
    """

    name: str
    factor: float
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The result of `output_ranges`; `str()` is a table.

    Attributes:
      tensors: those that changed, the one with the greatest gain first.
      quantizers: how many were tried.
    """

    tensors: tuple[Ranged, ...]
    quantizers: int

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
    """Choose the scales of activations for the least noise at the model's output, in `qmodel` itself.

    Zero points stay, so both ends of a range move by one factor.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything. They are kept.
      inputs: what of a batch the model is called with: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters are the float model's; None is `qmodel` as it is.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).

    Raises:
      ValueError: no batch.
    """
    check_quantized(qmodel, "output_ranges")
    kept = list(Batches(batches, inputs, "output_ranges").arguments())
    return choose(qmodel, reference or qmodel, Walk(qmodel, kept), kept, progress=progress)


def choose(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    progress: bool | None = None,
) -> Ranges:
    """`output_ranges` along a walk that is compiled already."""
    kinds = {name: detail[0] for name, detail in qmodel.plan.details}
    reals, grids = Stream.of(reference, quantized=False), grids_of(qmodel)
    names = [n for n, q in qmodel.plan.quantizers if kinds[n] != "weight" and q.fixed is None and "scale" in grids[n]]

    def alone(names: Collection[str], factor: float) -> dict[str, float]:
        changed = {**grids, **{name: _scaled(grids[name], factor) for name in names}}
        return walk.alone(reals, changed, names, batches, what=f"ranges times {factor:g}: batch", progress=progress)

    before = alone(names, 1.0)
    tried = [name for name in names if before[name] * len(names) > SHARE * sum(before.values())]
    best: dict[str, tuple[float, float]] = {name: (1.0, before[name]) for name in tried}
    for factors in FACTORS.values():
        falling, last = list(tried), before
        for factor in factors:
            found = alone(falling, factor)
            falling = [name for name in falling if found[name] < last[name]]
            for name in falling:
                if found[name] < best[name][1]:
                    best[name] = factor, found[name]
            last = found
    tensors: list[Ranged] = []
    for name, (factor, noise) in best.items():
        if noise < GAIN * before[name]:
            qparams = qparams_of(qmodel, name)
            scale = np.asarray(qparams.scale, np.float32) * np.float32(factor)
            set_qparams(qmodel, name, dataclasses.replace(qparams, scale=scale))
            tensors.append(Ranged(name, factor, before[name], noise))
    return Ranges(tuple(sorted(tensors, key=lambda t: t.after - t.before)), len(tried))


def _scaled(grid: Mapping[str, Any], factor: float) -> Grid:
    return {**grid, "scale": grid["scale"] * np.float32(factor)}
