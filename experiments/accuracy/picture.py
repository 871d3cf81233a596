"""The page's picture: points against float by setting, one panel a network."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from experiments.accuracy.row import Row
from qjax.export import files

matplotlib.use("Agg")  # draws to files; works without a display

from matplotlib import pyplot as plt

LOWEST = -8.0
"""Points below are drawn at the lower edge."""


def draw(rows: Sequence[Row], settings: Sequence[str], points: Callable[[Row], float | None], path: Path) -> None:
    """Write it; settings: from left to right. points: what of a row is drawn."""
    found = [(row, value) for row in rows if row.setting != "float" and (value := points(row)) is not None]
    networks = list(dict.fromkeys(row.network for row, _ in found))
    methods = list(dict.fromkeys(row.method for row, _ in found))
    colours = plt.get_cmap("tab20")
    figure, grid = plt.subplots(
        1, max(len(networks), 1), figsize=(2 + 4.5 * max(len(networks), 1), 4), squeeze=False, layout="constrained"
    )
    for axes, network in zip(grid.flat, networks, strict=False):
        for index, method in enumerate(methods):
            mine = [(row.setting, value) for row, value in found if (row.network, row.method) == (network, method)]
            means = {
                at: float(np.mean([value for of, value in mine if of == setting]))
                for at, setting in enumerate(settings)
                if any(of == setting for of, _ in mine)
            }
            if means:
                shown = [max(mean, LOWEST) for mean in means.values()]
                axes.plot(list(means), shown, marker="o", markersize=4, label=method, color=colours(index % 20))
        axes.axhline(0, color="#8a8a8a", linewidth=0.8)
        axes.set(title=network, ylabel="points against float", ylim=(LOWEST - 0.3, 1.2))
        axes.set_xticks(range(len(settings)), settings)
    if networks:
        handles = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(drawn.getvalue(), path)
