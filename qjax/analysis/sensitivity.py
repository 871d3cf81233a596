"""Measures the cost of quantizing each layer alone, and of quantizing all layers but that one."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from qjax.analysis.effect import Effect, Score, finite, measure
from qjax.analysis.layers import Layer, layers_of
from qjax.analysis.picture import BLUE, ORANGE, draw
from qjax.analysis.switched import SwitchedModel
from qjax.calibration import track
from qjax.export.files import StrPath
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.support.batches import Batches, Inputs
from qjax.support.tables import Grid, Printed
from qjax.support.transfers import with_transfers


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """One layer, or one activation that belongs to none.

    name: the layer's, or the quantizer's. kind: which of the two. op: what computes it. quantizers: those that were
    switched. bits: of the weight (of the activation if there is no weight). activation_bits: of the layer's inputs and
    outputs. parameters: numbers in the weight. alone: with only these quantizers on. without: with all but these on.
    Both are compared with the float model.
    """

    name: str
    kind: str
    op: str
    quantizers: tuple[str, ...]
    bits: int
    activation_bits: tuple[int, ...]
    parameters: int
    alone: Effect
    without: Effect


@dataclasses.dataclass(frozen=True)
class Sensitivity(Printed):
    """The result of `sensitivity`; `str()` is a table, costliest row first.

    rows: in that order. all: with every quantizer on. loss, metric: the float model's own, None if not asked for.
    """

    rows: tuple[SensitivityRow, ...]
    all: Effect
    loss: float | None
    metric: float | None
    examples: int

    def __getitem__(self, name: str) -> SensitivityRow:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No row {name!r}. Rows: {', '.join(row.name for row in self.rows)}.")

    def parts(self) -> list[Grid | str]:
        """A table and a summary line."""
        asked = [name for name in ("loss", "metric") if getattr(self, name) is not None]
        header = ["layer", "op", "bits", "activations", "alone, dB", *(f"{name} change" for name in asked)]
        header += ["all but it, dB", *(f"{name} change" for name in asked)]
        rows = [
            [
                row.name,
                row.op,
                row.bits,
                ", ".join(map(str, row.activation_bits)) or "-",
                *_cells(row.alone, asked),
                *_cells(row.without, asked),
            ]
            for row in self.rows
        ]
        whole = f"everything quantized: {_decibels(self.all.sqnr)} dB"
        for name in asked:
            whole += f", {name} {getattr(self, name):.6g} {getattr(self.all, name):+.6g}"
        return [Grid(header, rows), f"{whole}; {self.examples} examples"]

    def to_json(self) -> str:
        """The result as JSON; an infinite ratio (nothing differed) is null."""
        rows = [
            {
                **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
                "alone": row.alone.to_json(),
                "without": row.without.to_json(),
            }
            for row in self.rows
        ]
        document = {
            "examples": self.examples,
            "loss": finite(self.loss),
            "metric": finite(self.metric),
            "all": self.all.to_json(),
            "rows": rows,
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def plot(self, path: StrPath) -> None:
        """Plot a bar for each row, quantized alone and left out alone; needs matplotlib."""

        def bars(figure: Any) -> None:
            left, right = figure.subplots(1, 2, sharey=True)
            places = np.arange(len(self.rows))
            for axes, which, colour, title in (
                (left, "alone", BLUE, "only it quantized"),
                (right, "without", ORANGE, "all but it quantized"),
            ):
                ratios = [getattr(row, which).sqnr for row in self.rows]
                axes.barh(places, [ratio if math.isfinite(ratio) else 0.0 for ratio in ratios], color=colour)
                axes.set(title=title, xlabel="SQNR of the output, dB")
            if math.isfinite(self.all.sqnr):
                right.axvline(self.all.sqnr, color="black", linewidth=0.8, linestyle="--")
            left.set_yticks(places, [row.name for row in self.rows])
            left.invert_yaxis()

        draw(path, (10.0, 1.2 + 0.28 * len(self.rows)), bars)


@with_transfers
def sensitivity(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    loss: Score | None = None,
    metric: Score | None = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Measure the cost of quantizing each layer alone, and of quantizing all layers but it, against the float model.

    A layer is whatever owns a quantized weight: the weight, the tensors that it reads, and the one that it produces
    (after bias, batch norm and relu). Activations that belong to no layer, such as the result of an addition, have rows
    of their own. One compilation serves all rows (`analysis.switched`), and each row costs one forward per batch. The
    model runs in evaluation mode and is not changed. "Float" is the model with its present parameters, not with those
    from before its training.

    Args:
      qmodel: the quantized model; it is not changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      loss, metric: `(output, batch) -> number`, a mean over the batch's examples; larger metrics are better. Their
        changes become columns.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch, or nothing to compare: a model without float outputs needs a loss or a metric.

    Examples:
      ```python
      print(qjax.sensitivity(qmodel, batches))  # the costliest layer first
      ```
    """
    check_quantized(qmodel, "sensitivity")
    model = SwitchedModel(qmodel)
    pairs = iter(track(Batches(batches, inputs, "sensitivity"), "sensitivity: batch", enabled=progress, compiles=True))
    first = next(pairs)
    drafts = _rows(qmodel, layers_of(qmodel, first[1]))
    everything = frozenset(model.names)
    sets = [everything]
    for draft in drafts:
        sets += [frozenset(draft.quantizers), everything - frozenset(draft.quantizers)]

    measured = measure(model, sets, itertools.chain([first], pairs), loss=loss, metric=metric)
    rows = [
        dataclasses.replace(draft, alone=measured.effects[1 + 2 * i], without=measured.effects[2 + 2 * i])
        for i, draft in enumerate(drafts)
    ]
    rows.sort(key=lambda row: (-(math.inf if math.isnan(row.alone.noise) else row.alone.noise), row.name))
    return Sensitivity(tuple(rows), measured.effects[0], measured.loss, measured.metric, measured.examples)


def _rows(qmodel: QuantizedModel, layers: tuple[Layer, ...]) -> list[SensitivityRow]:
    """Rows that contain every quantizer at least once; their effects are measured later."""
    quantizers, details = dict(qmodel.plan.quantizers), dict(qmodel.plan.details)
    unknown = Effect(math.nan)
    rows = [
        SensitivityRow(
            layer.name,
            "layer",
            layer.op,
            tuple(dict.fromkeys((layer.weight, *layer.inputs, *layer.outputs))),
            quantizers[layer.weight].spec.bits,
            tuple(quantizers[name].spec.bits for name in dict.fromkeys((*layer.inputs, *layer.outputs))),
            layer.parameters,
            unknown,
            unknown,
        )
        for layer in layers
    ]
    covered = {name for row in rows for name in row.quantizers}
    for name, q in quantizers.items():
        if name not in covered:
            rows.append(
                SensitivityRow(name, "activation", details[name][2], (name,), q.spec.bits, (), 0, unknown, unknown)
            )
    return rows


def _cells(effect: Effect, asked: list[str]) -> list[str]:
    return [_decibels(effect.sqnr), *(f"{getattr(effect, name):+.4g}" for name in asked)]


def _decibels(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf" if value > 0 else "-"
