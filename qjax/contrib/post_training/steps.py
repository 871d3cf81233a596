"""The steps of `post_training` in order: each changes a fake-quantized model in place and describes what it did."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from flax import nnx

from qjax.api.calibrate import calibrate
from qjax.api.workflow import quantize_derived
from qjax.contrib.post_training import precision
from qjax.contrib.post_training.adaround import Options, learn
from qjax.contrib.post_training.bias_correction import correct
from qjax.contrib.post_training.brecq import rebuild
from qjax.contrib.post_training.caches import Units
from qjax.contrib.post_training.gptq import FEW, solve
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.migration import migrate
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.ranges import choose
from qjax.contrib.post_training.rotation import turn
from qjax.contrib.post_training.scoring import Unseen, size_of
from qjax.contrib.post_training.tables import row_scales, tables_of
from qjax.contrib.post_training.widths import recipe_with
from qjax.graph.state import Asked
from qjax.model.quantized_model import QuantizedModel
from qjax.recipe.recipe import Recipe
from qjax.training.scan_layers import quantizer_of

Effort = Literal["fast", "standard", "thorough"]


class Skipped(Exception):
    """A step has nothing to do in this model; the text gives the reason."""


@dataclasses.dataclass
class Work:
    """The data of the steps.

    model, recipe: what `qmodel` was made from; the model is not changed. qmodel: a step changes it in place, or
    replaces it, together with its reference, walk and recipe. reference: the model whose parameters, unquantized, are
    the float model's. fit: the batches that steps may use. held: the batches that judge them. steps: the names of all
    steps that run. wider: the activations to which a step gave more bits. unseen: what the last step measured on data
    that it left out, if it did. state: the argument that is a state. units: in which `qmodel`, `fit` and `held` hold
    it.
    """

    model: nnx.Module
    recipe: Recipe
    qmodel: QuantizedModel
    reference: QuantizedModel
    walk: Walk
    fit: list[tuple[Any, ...]]
    held: list[tuple[Any, ...]]
    steps: Sequence[str]
    progress: bool | None
    wider: tuple[str, ...] = ()
    unseen: Unseen | None = None
    state: Asked | None = None
    units: Units | None = None

    @classmethod
    def begun(
        cls,
        model: nnx.Module,
        recipe: Recipe,
        fit: list[tuple[Any, ...]],
        held: list[tuple[Any, ...]],
        steps: Sequence[str],
        progress: bool | None,
        *,
        judged: bool = True,
    ) -> "Work":
        """Quantize and calibrate a model. judged: see `quantize_derived`."""
        qmodel = quantize_derived(model, recipe, fit[0], judged=judged)
        calibrate(qmodel, fit, progress=progress)
        qmodel.eval()
        return cls(model, recipe, qmodel, nnx.clone(qmodel), Walk(qmodel, fit), fit, held, steps, progress)

    def copied(self) -> "Work":
        """A copy of the present state, which no later step changes."""
        return dataclasses.replace(self, qmodel=nnx.clone(self.qmodel), reference=nnx.clone(self.reference))


Step = Callable[[Work], tuple[str, Any]]
"""Changes `work.qmodel` in place; returns a short description of what it did, and the details."""


def _tables(work: Work) -> tuple[str, Any]:
    names = tables_of(work.qmodel)
    if not names:
        raise Skipped("no embedding table with one scale")
    # Use a model with the current parameters, and a recipe with the current widths.
    model = nnx.clone(work.model)
    nnx.update(model, nnx.state(work.reference.model))
    recipe = row_scales(work.qmodel, recipe_with(work.recipe, work.qmodel, work.wider))
    try:
        begun = Work.begun(model, recipe, work.fit, work.held, work.steps, work.progress, judged=False)
    except (ValueError, NotImplementedError) as error:
        raise Skipped(f"the model takes no scales of rows: {str(error).partition('. ')[0]}") from error
    work.recipe, work.qmodel, work.reference, work.walk = recipe, begun.qmodel, begun.reference, begun.walk
    rows = sum(work.qmodel.plan.by_name[name].shape[0] for name in names)
    return f"{rows:,} scales for {len(names)} tables", names


def _equalize(work: Work) -> tuple[str, Any]:
    return _migrate(work, norm=False)


def _rotate(work: Work) -> tuple[str, Any]:
    try:
        found = turn([work.qmodel, work.reference], work.walk, work.fit, progress=False)
    except ValueError as error:
        raise Skipped(str(error).partition(": ")[2]) from error
    widths = ", ".join(map(str, found.widths))
    return f"{len(found.widths)} residual streams of width {widths}", found


def _smooth(work: Work) -> tuple[str, Any]:
    return _migrate(work, norm=True)


def _migrate(work: Work, *, norm: bool) -> tuple[str, Any]:
    state = None if norm else work.state
    models = [work.qmodel, work.reference]
    found = migrate(models, work.walk, work.fit, norm=norm, state=state, progress=work.progress)
    if found.units is not None:
        work.units = found.units
        work.fit, work.held = ([found.units.arguments(args) for args in part] for part in (work.fit, work.held))
    if not found.moved and not found.kept:
        whys = Counter(found.left.values())
        most = whys.most_common(1)[0][0] if whys else "no layer has a quantized weight"
        raise Skipped(f"no pair of layers: {most}")
    if not found.moved:
        raise Skipped(f"{found.kept} pairs, all better as they are")
    return f"scales moved in {len(found.moved)} of {len(found.moved) + found.kept} pairs", found


def _ranges(work: Work) -> tuple[str, Any]:
    judged = _some(work.fit, 16, at_least=4)
    options = {"progress": work.progress}
    found = choose(work.qmodel, work.reference, work.walk, judged, work.fit, work.held, **options)
    if not found.tensors:
        raise Skipped(f"no other scale of {found.quantizers} activations is better")
    if len(work.fit) > 1:
        work.unseen = Unseen(found.before, found.after)
    return f"other scales for {len(found.tensors)} of {found.quantizers} activations", found


def _precision(work: Work, *, nearest: bool = False) -> tuple[str, Any]:
    if work.recipe.profile is not None:
        raise Skipped(f"the profile {work.recipe.profile} sets the widths")
    # GPTQ fits all but the last batches. On those that it fits, its weights look better than they are.
    last = _some(work.fit[::-1], 16)
    if nearest and not _rounds_later(work):
        raise Skipped("there is no other measure")
    solved = None if nearest else _solve_first(work, last)
    batches = _some(work.fit, 16) if solved is None else last
    options = {"solved": solved, "progress": work.progress}
    found = precision.choose(work.qmodel, work.reference, work.walk, batches, **options)
    work.wider = (*work.wider, *(t.name for t in found.tensors))
    if not found.tensors:
        whys = Counter(found.left.values()).most_common(1)
        raise Skipped(whys[0][0] if whys else "no tensor costs more than its share")
    weights = sum(t.kind == "weight" for t in found.tensors)
    names = ", ".join(t.name for t in found.tensors[:3]) + (", ..." if len(found.tensors) > 3 else "")
    return (
        f"more bits for {weights} weights, {len(found.tensors) - weights} activations of {found.quantizers}: {names}",
        found,
    )


def _solve_first(work: Work, batches: list[tuple[Any, ...]]) -> QuantizedModel | None:
    """A copy with weights by GPTQ, if that step comes later, has few bits to round to, and helps on these batches.

    GPTQ changes which tensors cost most.
    """
    if not _rounds_later(work):
        return None
    copy = nnx.clone(work.qmodel)
    solve(copy, work.reference, work.walk, work.fit, carried=False, progress=work.progress)
    truth = work.walk.outputs(Stream.of(work.reference, quantized=False), batches)
    before, after = (noise_of(truth, work.walk.outputs(Stream.of(q), batches)) for q in (work.qmodel, copy))
    return copy if after < before else None


def _rounds_later(work: Work) -> bool:
    bits = [quantizer_of(work.qmodel.plan.by_name, item.name).spec.bits for item in work.walk.items]
    return "gptq" in work.steps and min(bits, default=FEW + 1) <= FEW


def _demand_layers(work: Work) -> None:
    if not work.walk.items:
        raise Skipped("no dense layer or convolution uses its parameter without a transformation")


def _describe_codes(parts: Sequence[Any], kind: str) -> str:
    changed, weights = (sum(getattr(part, name) for part in parts) for name in ("changed", "weights"))
    return f"{changed:,} of {weights:,} codes in {len(parts)} {kind}"


def _gptq(work: Work, *, carried: bool = True) -> tuple[str, Any]:
    _demand_layers(work)
    found = solve(work.qmodel, work.reference, work.walk, work.fit, carried=carried, progress=work.progress)
    return _describe_codes(found.layers, "layers" if carried else "layers, each layer by itself"), found


def _adaround(work: Work) -> tuple[str, Any]:
    _demand_layers(work)
    options = Options(steps=1000, rate=1e-2, weight=1.0)
    found = learn(work.qmodel, work.reference, work.walk, work.fit, options, progress=work.progress)
    return _describe_codes(found.layers, "layers"), found


def _brecq(work: Work) -> tuple[str, Any]:
    _demand_layers(work)
    options = Options(steps=300, rate=2e-2, weight=1.0)
    found = rebuild(work.qmodel, work.reference, work.walk, work.fit, options, progress=work.progress)
    return _describe_codes(found.blocks, "blocks"), found


def _bias(work: Work) -> tuple[str, Any]:
    try:
        found = correct(work.qmodel, work.reference, work.walk, work.fit, progress=work.progress)
    except ValueError as error:
        raise Skipped(str(error).partition(": ")[2]) from error
    return f"{len(found.shifts)} biases moved", found


def _some(batches: list[tuple[Any, ...]], examples: int = 32, *, at_least: int = 1) -> list[tuple[Any, ...]]:
    """The first batches that contain that many examples."""
    kept: list[tuple[Any, ...]] = []
    for args in batches:
        if len(kept) >= at_least and sum(map(size_of, kept)) >= examples:
            break
        kept.append(args)
    return kept


TABLE: dict[str, Step] = {
    "equalize": _equalize,
    "rotate": _rotate,
    "smooth": _smooth,
    "precision": _precision,
    "tables": _tables,
    "ranges": _ranges,
    "gptq": _gptq,
    "adaround": _adaround,
    "brecq": _brecq,
    "bias": _bias,
}
# Outliers that do not matter dominate the least squares of the earlier steps, so a step that failed is tried without
# those. Little data can mislead GPTQ and whatever is measured after it.
AGAIN: dict[str, Step] = {
    "precision": functools.partial(_precision, nearest=True),
    "gptq": functools.partial(_gptq, carried=False),
}
"""What to try after a step was undone."""
STEPS = tuple(TABLE)
"""The names of the steps in order."""
EFFORTS: dict[str, tuple[str, ...]] = {
    "fast": ("precision", "bias"),
    "standard": ("equalize", "rotate", "smooth", "precision", "tables", "ranges", "gptq", "bias"),
    "thorough": STEPS,
}
