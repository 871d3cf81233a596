"""Post-training quantization in one call: several steps, each measured, and undone if it does not help.

A step changes parameters, scales or bit widths of the fake-quantized model, but never its arithmetic, so the graph that
`convert` makes is as exact as ever.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.api.workflow import convert
from qjax.assign.backend import target_of
from qjax.contrib.post_training.caches import units_of
from qjax.contrib.post_training.report import PostTrainingReport, StepReport
from qjax.contrib.post_training.scoring import Batch, Judge, Scorer, size_of
from qjax.contrib.post_training.steps import AGAIN, EFFORTS, STEPS, TABLE, Effort, Skipped, Step, Work
from qjax.contrib.post_training.widths import recipe_with
from qjax.contrib.profiles import ProfileError
from qjax.graph.state import Asked
from qjax.graph.unsupported import ConversionError
from qjax.model.quantized_model import QuantizedModel
from qjax.recipe.recipe import Recipe
from qjax.support.batches import Batches, Inputs, arguments_of, brief
from qjax.support.transfers import with_transfers


@with_transfers
def post_training(
    model: nnx.Module,
    recipe: Recipe,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    loss: Scorer | None = None,
    metric: Scorer | None = None,
    effort: Effort = "standard",
    steps: Sequence[str] | None = None,
    state: Asked | None = None,
    progress: bool | None = None,
) -> QuantizedModel:
    """Quantize a float model without training, as accurately as the calibration data allow.

    It quantizes and calibrates as `qjax.quantize` and `qjax.calibrate` do, and then takes one step after another (see
    `STEPS` and docs/accuracy.md). Some of the batches are held out. The model is judged on them after each step, and a
    step that made it worse is undone. The report, `qmodel.post_training_report`, lists what each step achieved, and why
    it was undone. If the result's true forward is not better than that of plain calibration, the plainly calibrated
    model is returned. The model is in evaluation mode.

    Args:
      model: the float model; it is not changed.
      recipe: as for `quantize`. Single weights and activations may get more bits (step "precision", see
        `qjax.training.widen`).
      batches: calibration data, which stay in memory: a list of arrays, or of tuples of the call's arguments; with
        `inputs`, a list of anything. A few hundred examples are enough. The last quarter is held out; of a single
        batch, its last examples.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      loss, metric: `(output, batch) -> number`, a mean over the batch; a greater metric is better. A step is judged by
        the loss if there is one, otherwise by the metric if that changes by more than one example, otherwise by the
        noise of the outputs.
      effort: "fast" calibrates, widens and corrects biases; "standard" takes every step that runs in a few minutes for
        ten million parameters on two cores; "thorough" adds the slow ones.
      steps: names from `STEPS` instead, which are taken in the order of `STEPS`.
      state: as for `convert`, a cache: the step "equalize" moves factors between it and the weights, see
        `qjax.training.equalize`. The result may hold its cache in other units. Noise is then that of all other outputs.
      progress: whether to show progress on stderr; None shows it on a terminal only.

    Raises:
      ValueError: there is no batch; data, parameters or outputs hold NaN; a step does not exist or the target does not
        allow it; there is no such state; a loss or metric is not a number.

    Examples:
      ```python
      qmodel = qjax.post_training(model, recipe, batches)
      print(qmodel.post_training_report)  # each step, and what it gained
      ```
    """
    names = _choose_steps(steps, effort)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"post_training: expected a qjax.Recipe, got {brief(recipe)}. The order is (model, recipe, batches)."
        )
    target = target_of(recipe.target)
    fixed = not target.mixed_widths and not target.wide_weights and getattr(recipe.weights, "bits", 8) >= 8
    if steps is not None and "precision" in steps and fixed:
        raise ValueError(
            f"post_training: step 'precision' mixes tensors of 8 and 16 bits, which the kernels of target "
            f"{target.name!r} do not support. Leave it out, or give all activations 16 bits."
        )
    started = time.perf_counter()
    everything = list(Batches(batches, inputs, "post_training"))
    _check_finite(everything)
    fit, held, seen = split(everything, inputs)

    clock = time.perf_counter()
    to_fit, to_judge = ([args for _, args in part] for part in (fit, held))
    work = Work.begun(model, recipe, to_fit, to_judge, names, progress)
    work.state = state
    judge = Judge(held, loss, metric, None if state is None else units_of(work.qmodel, state, to_fit[0]))
    judge.prepare(work.walk, work.reference, model)
    best = judge.simulated(work.walk, work.qmodel)
    said = f"{len(work.qmodel.plan.quantizers)} quantizers"
    rows = [StepReport("calibrated", best, time.perf_counter() - clock, True, said)]
    plain = nnx.clone(work.qmodel)
    converts = _obstacle(work.qmodel, fit[0][1]) is None

    for name in names:
        tries: list[Step] = [TABLE[name], *([AGAIN[name]] if name in AGAIN else [])]
        for retry, step in enumerate(tries):
            clock, before = time.perf_counter(), work.copied()
            try:
                said, details = step(work)
            except Skipped as reason:
                if retry:
                    break  # the row of the first attempt describes what happened
                rows.append(StepReport(name, best, time.perf_counter() - clock, None, str(reason)))
                break
            score = judge.simulated(work.walk, work.qmodel, work.units)
            unseen, work.unseen = work.unseen, None
            kept = judge.better(score, best, unseen)
            # A step may grow sums beyond int32, but a model that converted before it must still convert.
            refused = _obstacle(work.qmodel, fit[0][1]) if kept and converts else None
            if not kept or refused is not None:
                why = judge.why(score, best, unseen) if refused is None else f"convert would refuse it: {refused}"
                work, said, kept = before, f"{said}; {why}", False
            rows.append(StepReport(name, score, time.perf_counter() - clock, kept, said, details))
            if kept:
                best = score
                break

    final = judge.true(work.qmodel, work.units)
    # The search uses a score that leaves some roundings out. If that score is no better in the end than plain
    # calibration's, compare the scores of the true forward.
    if any(row.kept for row in rows[1:]) and not judge.better(final, rows[0].score):
        first = judge.true(plain)
        if not judge.better(final, first):
            work.qmodel, final = plain, first
            rows.append(StepReport("all", first, 0.0, False, "plain calibration is better by the true forward"))
    result = work.qmodel
    wider = work.wider if result is not plain else ()
    result.post_training_report = PostTrainingReport(
        steps=tuple(rows),
        final=final,
        recipe=recipe_with(recipe if result is plain else work.recipe, result, wider),
        float_loss=judge.float_score.loss,
        float_metric=judge.float_score.metric,
        held_out=judge.examples,
        seen=seen,
        examples=sum(size_of(args) for _, args in everything),
        seconds=time.perf_counter() - started,
    )
    return result


def _obstacle(qmodel: QuantizedModel, args: tuple[Any, ...]) -> str | None:
    """Why `convert` refuses the model, by itself or by the rules of the recipe's profile; None if it does not."""
    try:
        convert(qmodel, args)
    except (ConversionError, ProfileError) as error:
        return str(error).splitlines()[0]
    return None


# ---------------------------------------------------------------------- input


def _choose_steps(steps: Sequence[str] | None, effort: Any) -> list[str]:
    if effort not in EFFORTS:
        raise ValueError(f"post_training: effort: expected one of {', '.join(map(repr, EFFORTS))}, got {effort!r}.")
    wanted = EFFORTS[effort] if steps is None else steps
    if isinstance(wanted, str):
        raise TypeError(f"post_training: steps: expected a list of names, got {wanted!r}. Write [{wanted!r}].")
    unknown = [name for name in wanted if name not in TABLE]
    if unknown:
        raise ValueError(
            f"post_training: steps: expected some of {', '.join(STEPS)}, got {', '.join(map(repr, unknown))}."
        )
    return [name for name in STEPS if name in wanted]


def _check_finite(batches: Sequence[Batch]) -> None:
    for index, (_, args) in enumerate(batches):
        for leaf in jax.tree.leaves(args):
            if isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating):
                bad = int(jnp.sum(~jnp.isfinite(leaf)))
                if bad:
                    raise ValueError(
                        f"post_training: expected finite calibration data, got {bad} NaN or infinite numbers of "
                        f"{leaf.size} in batch {index}. Remove them, or find what produced them."
                    )


def split(batches: list[Batch], inputs: Inputs | None) -> tuple[list[Batch], list[Batch], bool]:
    """(batches for the steps, held-out batches, whether these are the same)."""
    if len(batches) > 1:
        count = max(1, len(batches) // 4)
        return batches[:-count], batches[-count:], False
    (batch, args) = batches[0]
    size = size_of(args)
    if size < 2:
        return batches, batches, True
    # Equal quarters have one shape, which compiles once, and the ranges of three of them can be judged on the fourth.
    ends = [size * k // 4 for k in range(5)] if size % 4 == 0 else [0, size - max(1, size // 4), size]
    parts: list[Batch] = []
    for rows in itertools.starmap(slice, itertools.pairwise(ends)):

        def cut(x: Any, rows: slice = rows) -> Any:
            return x[rows] if getattr(x, "ndim", 0) and x.shape[0] == size else x

        part = jax.tree.map(cut, batch)
        parts.append((part, arguments_of(part if inputs is None else inputs(part), "post_training")))
    return parts[:-1], parts[-1:], False
