"""Draws the curves of a training run as SVG charts, which need no script, and tabulates first and last values."""

import dataclasses
import math
from collections.abc import Sequence

from qjax.reporting.document import Table
from qjax.support.markup import text
from qjax.training.log import TrainingLog

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 12, 30
_NOTES = {
    "scale": "Each line is a quantizer: its scale divided by its first scale, on a logarithmic axis.",
    "oscillating": "Each line is a weight: the share of its elements that turn back more than 0.005 times per step.",
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over training steps.

    lines: (name, points); points that are not finite are left out. logarithmic: whether the vertical axis is.
    """

    title: str
    note: str
    lines: Sequence[tuple[str, Points]]
    logarithmic: bool = False


def charts_of(log: TrainingLog) -> list[Chart]:
    """One chart for all scales, one for all oscillations, and one for each other scalar."""
    groups: dict[str, list[tuple[str, Points]]] = {}
    for name, points in log.curves.items():
        prefix, _, rest = name.partition("/")
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        if not finite:
            continue
        if prefix in _NOTES and rest:
            groups.setdefault(prefix, []).append((rest, finite))
        else:
            groups.setdefault(name, []).append((name, finite))
    found: list[Chart] = []
    for title, lines in groups.items():
        if title == "scale":
            lines = [(name, [(step, value / points[0][1]) for step, value in points]) for name, points in lines]
        found.append(Chart(title, _NOTES.get(title, ""), lines, logarithmic=title == "scale"))
    return sorted(found, key=lambda chart: list(_NOTES).index(chart.title) if chart.title in _NOTES else -1)


def table_of(log: TrainingLog) -> Table:
    """First, last, least and greatest value of every curve, greatest change first."""
    rows: list[tuple[str, ...]] = []
    order: list[float] = []
    for name, points in log.curves.items():
        values = [value for _, value in points]
        first, last = values[0], values[-1]
        ratio = last / first if first else math.nan
        order.append(-abs(math.log(ratio)) if ratio > 0 and math.isfinite(ratio) else 0.0)
        rows.append((name, *(f"{value:.6g}" for value in (first, last, ratio, min(values), max(values)))))
    rows = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
    header = ("scalar", "first", "last", "last / first", "least", "greatest")
    return Table("Training: what was logged", header, rows, [None] * len(rows))


def svg(chart: Chart) -> str:
    """The chart as an SVG element; every line has its name as a tooltip."""
    points = [point for _, line in chart.lines for point in line]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    if chart.logarithmic and low > 0:
        low, high = math.log(low), math.log(high)
    room = (high - low or max(abs(high), 1e-12)) * 0.05
    low, high = low - room, high + room
    first, last = min(steps), max(steps)

    def place(step: int, value: float) -> str:
        if chart.logarithmic and min(values) > 0:
            value = math.log(value)
        across = (step - first) / ((last - first) or 1)
        up = (value - low) / (high - low)
        x = _LEFT + across * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline points="{" ".join(place(*point) for point in line)}" fill="none" stroke="var(--link)" '
        f'stroke-width="1.5" stroke-opacity="{1 if len(chart.lines) == 1 else 0.55}"><title>{text(name)}: '
        f"{line[0][1]:.4g} to {line[-1][1]:.4g}</title></polyline>"
        for name, line in chart.lines
    )
    bottom, left = _HEIGHT - _BOTTOM, _LEFT
    labels = [
        (left - 6, _TOP + 10, "end", f"{max(values):.4g}"),
        (left - 6, bottom, "end", f"{min(values):.4g}"),
        (left, _HEIGHT - 10, "start", f"step {first:,}"),
        (_WIDTH - _RIGHT, _HEIGHT - 10, "end", f"{last:,}"),
    ]
    words = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="var(--muted)" font-size="12">{text(label)}</text>'
        for x, y, anchor, label in labels
    )
    axes = f'<path d="M{left},{_TOP} V{bottom} H{_WIDTH - _RIGHT}" fill="none" stroke="var(--line)" stroke-width="1"/>'
    summary = f"{chart.title}: {len(chart.lines)} lines over steps {first} to {last}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{text(summary)}">'
        f"{axes}{words}{lines}</svg>"
    )


def section(charts: Sequence[Chart]) -> str:
    """The section of the page with these charts; empty if there are none."""
    if not charts:
        return ""
    figures = "".join(
        f'<figure style="flex: 1 1 420px; margin: 0"><h3>{text(chart.title)}</h3>'
        + (f'<p class="note">{text(chart.note)}</p>' if chart.note else "")
        + svg(chart)
        + "</figure>"
        for chart in charts
    )
    return (
        '<section aria-labelledby="training-title"><h2 id="training-title">Training</h2>'
        f'<div style="display: flex; flex-wrap: wrap; gap: 16px">{figures}</div></section>'
    )
