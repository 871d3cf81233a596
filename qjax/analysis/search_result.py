"""The budget of a search, and the result of the search."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.analysis.effect import Effect, finite
from qjax.analysis.picture import BLUE, GREY, ORANGE, draw
from qjax.analysis.space import Candidate
from qjax.export.files import StrPath
from qjax.numerics.qspec import known_fields
from qjax.recipe.recipe import Recipe
from qjax.support.tables import Grid, Printed


@known_fields()
@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits for `qjax.search`; at least one must be given, and the result meets all of them.

    Args:
      size: bytes of all weights, each with as many bits as its codes (32 in float). Scales, biases and layers that the
        recipe keeps in float are not counted.
      mac_bits: the sum over layers of multiplications per example x bits of the weight x bits of the input.
        Multiplications are counted from the traced shapes: outputs times weights per output.
      metric_drop: how far the metric may fall below the float model's. The smallest model within this drop is chosen.

    Examples:
      >>> import qjax
      >>> print(qjax.Budget(size=100_000, metric_drop=0.01))
      100,000 bytes and a metric drop of 0.01
    """

    size: float | None = None
    mac_bits: float | None = None
    metric_drop: float | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if all(value is None for value in given.values()):
            raise ValueError(f"Budget: expected at least one of {', '.join(given)}, got none.")
        for name, value in given.items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"Budget: {name}: expected a number, got {value!r}.")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"Budget: {name}: expected a finite number of 0 or more, got {value!r}.")

    def __str__(self) -> str:
        units = {"size": "{:,.12g} bytes", "mac_bits": "{:,.12g} MACs x bits", "metric_drop": "a metric drop of {:g}"}
        given = [(text, getattr(self, name)) for name, text in units.items()]
        return " and ".join(text.format(value) for text, value in given if value is not None)


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """One layer. bits: the choice. input_bits: of its input. macs: per example. candidates: their costs alone."""

    name: str
    op: str
    bits: Candidate
    input_bits: int
    parameters: int
    macs: int
    mac_bits: int
    candidates: Mapping[str, Effect]


@dataclasses.dataclass(frozen=True)
class Point:
    """A choice for the whole model: what it uses, the predicted sum of its parts' effects, and the measured effect."""

    name: str
    size: int
    mac_bits: int
    predicted: Effect
    measured: Effect


@dataclasses.dataclass(frozen=True)
class SearchResult(Printed):
    """The result of `search`. `str()` is a table.

    recipe: quantizes the model as chosen. predicted: the sum of the effects of each layer alone and of the rest.
    measured: the effect of the model quantized with the recipe. size: bytes of weights. by: the figure that was added
    up. uniform: the same number of bits for all layers. tried: every choice that was measured, several with
    `metric_drop`. optimal: whether it is certain that no combination within the limits has a smaller sum. loss, metric:
    the float model's.
    """

    recipe: Recipe
    layers: tuple[LayerChoice, ...]
    predicted: Effect
    measured: Effect
    size: int
    mac_bits: int
    budget: Budget
    by: str
    uniform: tuple[Point, ...]
    tried: tuple[Point, ...]
    optimal: bool
    loss: float | None
    metric: float | None
    examples: int

    def parts(self) -> list[Grid | str]:
        """The layers' table, the points' table, and summary lines."""
        names = [str(point.name) for point in self.uniform]
        header = ["layer", "op", "bits", "input bits", "parameters", "MACs", *(f"{name} bits, dB" for name in names)]
        rows = [
            [
                row.name,
                row.op,
                row.bits,
                "-" if row.bits == "float" else row.input_bits,
                f"{row.parameters:,}",
                f"{row.macs:,}",
                *(_decibels(row.candidates[name].sqnr) for name in names),
            ]
            for row in self.layers
        ]
        asked = [name for name in ("loss", "metric") if getattr(self, name) is not None]
        columns = ["", "bytes", "MACs x bits", "predicted, dB", "measured, dB"]
        columns += [f"{name} change, {kind}" for name in asked for kind in ("predicted", "measured")]
        chosen = Point("chosen", self.size, self.mac_bits, self.predicted, self.measured)
        points = [
            [
                point.name if point is chosen else f"all {point.name} bits",
                f"{point.size:,}",
                f"{point.mac_bits:,}",
                _decibels(point.predicted.sqnr),
                _decibels(point.measured.sqnr),
                *(f"{getattr(e, name):+.4g}" for name in asked for e in (point.predicted, point.measured)),
            ]
            for point in (chosen, *self.uniform)
        ]
        text = f"budget: {self.budget}; {self.examples} examples"
        if not self.optimal:
            text += "\nthe frontier was thinned: the sum is not proven to be the least"
        return [Grid(header, rows), "", Grid(columns, points), text]

    def to_json(self) -> str:
        """The result as JSON; an infinite ratio is null. Of the recipe it contains the layers' bits only."""
        document = {
            "budget": dataclasses.asdict(self.budget),
            "by": self.by,
            "examples": self.examples,
            "loss": finite(self.loss),
            "metric": finite(self.metric),
            "size": self.size,
            "mac_bits": self.mac_bits,
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
            "optimal": self.optimal,
            "layers": [
                {
                    **{f.name: getattr(row, f.name) for f in dataclasses.fields(row)},
                    "candidates": {name: effect.to_json() for name, effect in row.candidates.items()},
                }
                for row in self.layers
            ],
            "uniform": [_point(point) for point in self.uniform],
            "tried": [_point(point) for point in self.tried],
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def plot(self, path: StrPath) -> None:
        """Plot the bits of every layer, and size against SQNR next to uniform bits; needs matplotlib."""

        def panels(figure: Any) -> None:
            left, right = figure.subplots(1, 2)
            places = np.arange(len(self.layers))
            bits = [32 if row.bits == "float" else row.bits for row in self.layers]
            left.barh(places, bits, color=[GREY if row.bits == "float" else BLUE for row in self.layers])
            left.set_yticks(places, [row.name for row in self.layers])
            left.set(xlabel="bits of the weights (32: float)", title="chosen")
            left.invert_yaxis()
            known = [point for point in self.uniform if math.isfinite(point.measured.sqnr)]
            sizes, ratios = [p.size for p in known], [p.measured.sqnr for p in known]
            right.plot(sizes, ratios, "o-", color=GREY, label="uniform bits")
            for point in known:
                right.annotate(point.name, (point.size, point.measured.sqnr))
            if math.isfinite(self.measured.sqnr):
                right.plot([self.size], [self.measured.sqnr], "D", color=ORANGE, label="chosen")
            right.set(xlabel="bytes of weights", ylabel="SQNR of the output, dB", xscale="log")
            right.legend()

        draw(path, (11.0, max(3.5, 1.2 + 0.28 * len(self.layers))), panels)


def _point(point: Point) -> dict[str, Any]:
    effects = {"predicted": point.predicted.to_json(), "measured": point.measured.to_json()}
    return {"name": point.name, "size": point.size, "mac_bits": point.mac_bits, **effects}


def _decibels(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf" if value > 0 else "-"
