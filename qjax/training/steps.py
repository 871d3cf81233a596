"""The steps of `post_training`, in their order: each changes a fake-quantized model in place and says what it did."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from qjax.qmodel import QuantizedModel
from qjax.training.adaround import Options, learn
from qjax.training.bias_correction import correct
from qjax.training.gptq import solve
from qjax.training.judging import size_of
from qjax.training.migration import migrate
from qjax.training.precision import widen
from qjax.training.walk import Walk

Effort = Literal["fast", "standard", "thorough"]


class Skipped(Exception):
    """A step that has nothing to do in this model; the text says why."""


@dataclasses.dataclass
class Work:
    """What a step works on.

    qmodel: a step changes it in place. reference: the model whose parameters, unquantized, are the float model's.
    fit: the batches that steps may look at.
    """

    qmodel: QuantizedModel
    reference: QuantizedModel
    walk: Walk
    fit: list[tuple[Any, ...]]
    effort: Effort
    progress: bool | None


Step = Callable[[Work], tuple[str, Any]]
"""Changes `work.qmodel` in place; returns what it did in a few words, and the details."""


def _equalize(work: Work) -> tuple[str, Any]:
    return _migrated(work, norm=False)


def _smooth(work: Work) -> tuple[str, Any]:
    return _migrated(work, norm=True)


def _migrated(work: Work, *, norm: bool) -> tuple[str, Any]:
    found = migrate([work.qmodel, work.reference], work.walk, work.fit, norm=norm, progress=work.progress)
    if not found.moved and not found.kept:
        whys = Counter(found.left.values())
        most = whys.most_common(1)[0][0] if whys else "no layer has a quantized weight"
        raise Skipped(f"no pair of layers: {most}")
    if not found.moved:
        raise Skipped(f"{found.kept} pairs, all better as they are")
    return f"scales moved in {len(found.moved)} of {len(found.moved) + found.kept} pairs", found


def _precision(work: Work) -> tuple[str, Any]:
    found = widen(work.qmodel, work.reference, work.walk, _some(work.fit), progress=work.progress)
    if not found.tensors:
        raise Skipped("no activation costs more than its share")
    names = ", ".join(t.name for t in found.tensors[:3]) + (", ..." if len(found.tensors) > 3 else "")
    return f"16 bits for {len(found.tensors)} of {found.quantizers} tensors: {names}", found


def _gptq(work: Work) -> tuple[str, Any]:
    if not work.walk.items:
        raise Skipped("no dense layer or convolution uses its parameter without a transformation")
    found = solve(work.qmodel, work.reference, work.walk, work.fit, progress=work.progress)
    changed, weights = (sum(getattr(layer, name) for layer in found.layers) for name in ("changed", "weights"))
    return f"{changed:,} of {weights:,} codes in {len(found.layers)} layers", found


def _adaround(work: Work) -> tuple[str, Any]:
    if not work.walk.items:
        raise Skipped("no dense layer or convolution uses its parameter without a transformation")
    options = Options(steps=400, rate=1e-2, batch=32, weight=1.0)
    found = learn(work.qmodel, work.reference, work.walk, work.fit, options, progress=work.progress)
    changed, weights = (sum(getattr(layer, name) for layer in found.layers) for name in ("changed", "weights"))
    return f"{changed:,} of {weights:,} codes in {len(found.layers)} layers", found


def _bias(work: Work) -> tuple[str, Any]:
    try:
        found = correct(work.qmodel, work.reference, work.walk, work.fit, progress=work.progress)
    except ValueError as error:
        raise Skipped(str(error).partition(": ")[2]) from error
    return f"{len(found.shifts)} biases moved", found


def _some(batches: list[tuple[Any, ...]], examples: int = 32) -> list[tuple[Any, ...]]:
    """The first batches with so many examples."""
    kept: list[tuple[Any, ...]] = []
    for args in batches:
        if kept and sum(map(size_of, kept)) >= examples:
            break
        kept.append(args)
    return kept


TABLE: dict[str, Step] = {
    "equalize": _equalize,
    "smooth": _smooth,
    "precision": _precision,
    "gptq": _gptq,
    "adaround": _adaround,
    "bias": _bias,
}
STEPS = tuple(TABLE)
"""The steps in their order."""
EFFORTS: dict[str, tuple[str, ...]] = {
    "fast": ("precision", "bias"),
    "standard": ("equalize", "smooth", "precision", "gptq", "bias"),
    "thorough": STEPS,
}
