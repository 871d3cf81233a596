"""Searches bits per layer within a budget: measures layer by layer, chooses exactly, and checks the choice."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from flax import nnx

from qjax.analysis.effect import Effect, Measured, Score, measure
from qjax.analysis.knapsack import Combination, Frontier, Option, frontier
from qjax.analysis.layers import FLOAT_BITS, layers_of
from qjax.analysis.search_result import Budget, LayerChoice, Point, SearchResult
from qjax.analysis.space import Candidate, Space
from qjax.analysis.switched import SwitchedModel
from qjax.api.calibrate import calibrate
from qjax.api.workflow import quantize_derived
from qjax.calibration import track
from qjax.model.quantized_model import QuantizedModel
from qjax.recipe.recipe import Recipe
from qjax.support.batches import Batches, Inputs, arguments_of
from qjax.support.transfers import with_transfers

__all__ = ["Budget", "Candidate", "LayerChoice", "Point", "SearchResult", "search"]

By = Literal["noise", "loss", "metric"]


@with_transfers
def search(
    model: nnx.Module,
    recipe: Recipe,
    sample: Any,
    batches: Iterable[Any],
    *,
    budget: Budget,
    candidates: Sequence[Candidate] = (2, 4, 8, 16, "float"),
    calibration: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
    loss: Score | None = None,
    metric: Score | None = None,
    by: By | None = None,
    activations: bool | None = None,
    progress: bool | None = None,
) -> SearchResult:
    """Choose bits for every layer within a budget, after float training and before any quantized training.

    1. For each number of bits the model is quantized once, and each layer's cost is measured with only its quantizers
       on (`sensitivity`): noise of the output, or the change of a loss or metric.
    2. The costs are added, and the cheapest combination within the budget is found by exact dynamic programming
       (`analysis.knapsack`). The cost of the rest of the model, which is not varied, is measured alone and added too.
    3. The model is quantized with the chosen recipe, and its cost is measured. `measured` differs from `predicted`
       where the errors of layers do not simply add up.

    With `budget.metric_drop`, the result is the smallest combination on the frontier of size and cost whose *measured*
    metric has dropped by no more than that. It is found by bisection, each step of which quantizes and measures. The
    result always keeps within the drop. It is the smallest if, along the frontier, a combination with a larger sum of
    costs never has the better metric.

    Args:
      model: the float model; it is not changed.
      recipe: everything that is not chosen: the target, scales, observers, bits of the activations that no layer reads.
        Layers whose weights it overrides, or that it keeps in float, are not varied.
      sample: as for `quantize`.
      batches: the data on which costs are measured; they stay in memory. A list of arrays, or of tuples of the call's
        arguments; with `inputs`, a list of anything.
      budget: the limits, see `Budget`.
      candidates: bits from 2 to 16, and "float". A float layer has no cost here and counts 32 bits; the converted
        graph, if there is one, does not hold integers only. A weight that shares its module with another has no
        "float" candidate.
      calibration: batches for `calibrate`, in the form of `sample`; None calibrates on the sample alone.
      inputs, loss, metric: as for `sensitivity`.
      by: which figure to add up; None is the loss if there is one, otherwise the noise. An improvement counts as 0.
      activations: whether a layer's bits also apply to the tensors that it reads; layers that read the same tensor are
        then chosen together. None: if the budget counts them, that is, if it has `mac_bits`.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: no combination is within the budget; the message names the least one.

    Examples:
      ```python
      result = qjax.search(
          model, recipe, x, batches, budget=qjax.Budget(size=160), candidates=(4, 8)
      )
      print(result)  # the bits of each layer, and what they cost
      qmodel = qjax.quantize(model, result.recipe, x)
      ```
    """
    chosen_by = _check_arguments(budget, candidates, loss, metric, by)
    work = _Work(
        model,
        sample,
        list(Batches(batches, inputs, "search")),
        None if calibration is None else list(Batches(calibration, None, "search: calibration").arguments()),
        loss=loss,
        metric=metric,
    )
    args = arguments_of(sample, "search")
    varied = budget.mac_bits is not None if activations is None else activations
    space = Space(work.quantized(recipe), recipe, args, tuple(candidates), activations=varied)

    limits = _limits(space, budget)

    # ------------------------------------------------------------------ what each candidate costs
    bits = [c for c in candidates if c != "float"]
    costs: dict[tuple[int, Candidate], Effect] = {}
    uniform: list[Point] = []
    fixed = Effect(0.0)
    for index, candidate in enumerate(track(bits, "search: bit width", enabled=progress)):
        qmodel = work.quantized(space.recipe_of(dict.fromkeys(space.units, candidate)))
        switched = SwitchedModel(qmodel)
        everything = frozenset(switched.names)
        rest = everything.difference(*(unit.quantizers for unit in space.units))
        measured = work.measured(switched, [everything, rest, *(unit.quantizers for unit in space.units)])
        costs.update({(i, candidate): effect for i, effect in enumerate(measured.effects[2:])})
        fixed = measured.effects[1] if index == 0 else fixed
        whole: dict[int, Candidate] = dict.fromkeys(range(len(space.units)), candidate)
        uniform.append(
            Point(str(candidate), *_spending(space, whole), _predict(fixed, costs, whole), measured.effects[0])
        )
    nothing = Effect(0.0, None if loss is None else 0.0, None if metric is None else 0.0)
    costs.update({(i, "float"): nothing for i in range(len(space.units))})

    # ------------------------------------------------------------------ the choice
    options = [
        [Option(*space.cost(unit, c), _cost(costs[i, c], chosen_by)) for c in unit.candidates]
        for i, unit in enumerate(space.units)
    ]
    counts = (limits[0] is not None or budget.metric_drop is not None, limits[1] is not None)
    found = frontier(options, size=limits[0], mac_bits=limits[1], by=counts)
    if not found.combinations:
        raise ValueError(
            f"search: each limit of {budget} can be met alone, but not both together. Allow more, or give candidates "
            "of "
            "fewer bits."
        )

    def choice_of(combination: Combination) -> dict[int, Candidate]:
        return {i: space.units[i].candidates[pick] for i, pick in enumerate(combination.picks)}

    tried: dict[tuple[int, ...], tuple[Point, QuantizedModel, Recipe]] = {}

    def tried_out(combination: Combination) -> tuple[Point, QuantizedModel, Recipe]:
        if combination.picks not in tried:
            choice = choice_of(combination)
            chosen = space.recipe_of({space.units[i]: c for i, c in choice.items()})
            qmodel = work.quantized(chosen)
            switched = SwitchedModel(qmodel)
            effect = work.measured(switched, [frozenset(switched.names)]).effects[0]
            point = Point(f"tried {len(tried) + 1}", *_spending(space, choice), _predict(fixed, costs, choice), effect)
            tried[combination.picks] = point, qmodel, chosen
        return tried[combination.picks]

    if budget.metric_drop is None:
        best = min(found.combinations, key=lambda c: (c.cost, c.size, c.mac_bits, c.picks))
    else:
        drop = budget.metric_drop
        best = _smallest(found, lambda c: -float(tried_out(c)[0].measured.metric or 0.0), drop)
    point, qmodel, chosen = tried_out(best)

    # ------------------------------------------------------------------ the report
    choice = choice_of(best)
    inputs_of = {layer.weight: layer.inputs for layer in layers_of(qmodel, args)}
    specs = {name: q.spec for name, q in qmodel.plan.quantizers}
    rows: list[LayerChoice] = []
    for i, unit in enumerate(space.units):
        for layer in unit.layers:
            in_bits = [specs[name].bits for name in inputs_of.get(layer.weight, ())]
            width = FLOAT_BITS if choice[i] == "float" else int(choice[i])
            read = FLOAT_BITS if choice[i] == "float" else max(in_bits, default=FLOAT_BITS)
            effects = {str(c): costs[i, c] for c in unit.candidates}
            rows.append(
                LayerChoice(
                    name=layer.name,
                    op=layer.op,
                    bits=choice[i],
                    input_bits=read,
                    parameters=layer.parameters,
                    macs=layer.macs,
                    mac_bits=layer.macs * width * read,
                    candidates=effects,
                )
            )
    return SearchResult(
        recipe=chosen,
        layers=tuple(rows),
        predicted=point.predicted,
        measured=point.measured,
        size=point.size,
        mac_bits=point.mac_bits,
        budget=budget,
        by=chosen_by,
        uniform=tuple(uniform),
        tried=tuple(entry[0] for entry in tried.values()),
        optimal=found.exact,
        loss=work.loss_of_float,
        metric=work.metric_of_float,
        examples=work.examples,
    )


class _Work:
    """Quantizes and measures, always on the same data."""

    def __init__(
        self,
        model: nnx.Module,
        sample: Any,
        batches: list[tuple[Any, tuple[Any, ...]]],
        calibration: list[Any] | None,
        **scores: Any,
    ) -> None:
        self.model, self.sample, self.calibration = model, sample, calibration
        self.batches, self.scores = batches, scores
        self.loss_of_float: float | None = None
        self.metric_of_float: float | None = None
        self.examples = 0

    def quantized(self, recipe: Recipe) -> QuantizedModel:
        qmodel = quantize_derived(self.model, recipe, self.sample)
        if self.calibration is not None:
            calibrate(qmodel, self.calibration, progress=False)
        return qmodel

    def measured(self, switched: SwitchedModel, sets: Sequence[frozenset[str]]) -> Measured:
        found = measure(switched, sets, self.batches, what="search", **self.scores)
        self.loss_of_float, self.metric_of_float, self.examples = found.loss, found.metric, found.examples
        return found


def _check_arguments(budget: Any, candidates: Sequence[Any], loss: Any, metric: Any, by: Any) -> By:
    if not isinstance(budget, Budget):
        raise TypeError(f"search: budget: expected a qjax.Budget, got {type(budget).__name__}.")
    for candidate in candidates:
        fits = candidate == "float" or (type(candidate) is int and 2 <= candidate <= 16)
        if not fits:
            raise ValueError(f'search: candidates: expected bits from 2 to 16, or "float", got {candidate!r}.')
    if len(set(candidates)) != len(candidates) or not any(type(c) is int for c in candidates):
        raise ValueError(
            f"search: candidates: expected distinct ones, with at least one number of bits, got {tuple(candidates)!r}."
        )
    if budget.metric_drop is not None and metric is None:
        raise ValueError("search: a budget with metric_drop needs metric=, a function (output, batch) -> number.")
    chosen = by or ("loss" if loss is not None else "noise")
    if chosen not in ("noise", "loss", "metric"):
        raise ValueError(f"search: by: expected 'noise', 'loss' or 'metric', got {by!r}.")
    if (chosen == "loss" and loss is None) or (chosen == "metric" and metric is None):
        raise ValueError(f"search: by={chosen!r} needs {chosen}=, a function (output, batch) -> number.")
    return chosen


def _cost(effect: Effect, by: By) -> float:
    """The cost that is added up; it is never negative, because a lucky rounding is not worth looking for."""
    value = effect.noise if by == "noise" else effect.loss if by == "loss" else -(effect.metric or 0.0)
    value = float(value or 0.0)
    return math.inf if math.isnan(value) else max(0.0, value)


def _spending(space: Space, choice: Mapping[int, Candidate]) -> tuple[int, int]:
    """(bytes of weights, MACs x bits) of the whole model, including the layers that are not varied."""
    parts = [space.fixed_cost(), *(space.cost(space.units[i], c) for i, c in choice.items())]
    return -(-sum(size for size, _ in parts) // 8), sum(macs for _, macs in parts)


def _predict(fixed: Effect, costs: Mapping[tuple[int, Candidate], Effect], choice: Mapping[int, Candidate]) -> Effect:
    """The sums of the effects that the parts have alone."""
    parts = [fixed, *(costs[i, c] for i, c in choice.items())]

    def total(name: str) -> float | None:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else math.fsum(values)

    return Effect(total("noise") or 0.0, total("loss"), total("metric"))


def _limits(space: Space, budget: Budget) -> tuple[int | None, int | None]:
    """The limits for the varied layers; raises, and names the least possible figures, if they cannot be met."""
    size, mac_bits = space.fixed_cost()
    taken = [[space.cost(unit, candidate) for candidate in unit.candidates] for unit in space.units]
    least = [sum(min(cost[axis] for cost in unit) for unit in taken) for axis in (0, 1)]
    least = [least[0] + size, least[1] + mac_bits]
    limits = (
        None if budget.size is None else math.floor(8 * budget.size),
        None if budget.mac_bits is None else math.floor(budget.mac_bits),
    )
    if any(limit is not None and limit < needed for limit, needed in zip(limits, least, strict=True)):
        raise ValueError(
            f"search: no choice is within the budget of {budget}. The least size is {-(-least[0] // 8):,} bytes, the "
            f"least product {least[1]:,} MACs x bits. Allow more, or give candidates of fewer bits."
        )
    return (
        None if limits[0] is None else limits[0] - size,
        None if limits[1] is None else limits[1] - mac_bits,
    )


def _smallest(found: Frontier, drop_of: Any, allowed: float) -> Combination:
    """The smallest combination whose measured drop is allowed, by bisection along the frontier of size and cost."""
    line: list[Combination] = []
    for combination in sorted(found.combinations, key=lambda c: (c.size, c.cost, c.mac_bits, c.picks)):
        if not line or combination.cost < line[-1].cost:
            line.append(combination)
    last = drop_of(line[-1])
    if not last <= allowed:
        raise ValueError(
            f"search: expected a metric that drops by at most {allowed:g}, but even the best combination's drops by "
            f"{last:.6g}. Allow more, or give candidates or a recipe of more bits."
        )
    low, high = -1, len(line) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if drop_of(line[middle]) <= allowed else (middle, high)
    return line[high]
