"""Time and memory of a quantization-aware step, and time of the integer graph, against batch, width and depth.

A perceptron of equal layers; one of its three sizes grows, the others stay. Time and memory should be linear in batch
and depth, and in the square of the width: the last columns divide by that.
`python -m benchmarks scaling`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from flax import nnx

import qjax
from benchmarks.report import Grid
from benchmarks.steps import RECIPE, Perceptron, step_of
from benchmarks.timing import paired

mpl.use("Agg")  # draws to files; works without a display

from matplotlib import pyplot as plt

BASE = {"batch": 256, "width": 256, "depth": 4}
SIZES = {"batch": (64, 128, 256, 512, 1024), "width": (128, 256, 512, 1024), "depth": (2, 4, 8, 16)}


@dataclasses.dataclass(frozen=True)
class Point:
    """One size: medians in milliseconds, and temporary arrays of the step in MB."""

    axis: str
    size: int
    step_ms: float
    graph_ms: float
    megabytes: float

    @property
    def work(self) -> int:
        """What the time should be proportional to."""
        return self.size**2 if self.axis == "width" else self.size


def scaling(seconds: float) -> Iterator[Point]:
    """Every size of every axis."""
    for axis, sizes in SIZES.items():
        for size in sizes:
            chosen = {**BASE, axis: size}
            widths = (chosen["width"],) * (chosen["depth"] + 1)
            x = jax.random.normal(jax.random.key(0), (chosen["batch"], chosen["width"]))
            qmodel = qjax.quantize(Perceptron(widths, rngs=nnx.Rngs(0)), RECIPE, x)
            qmodel.eval()
            graph = qjax.convert(qmodel, x)
            codes: Any = graph.quantize(x)
            step = step_of(qmodel, x)
            times = paired("", step, lambda graph=graph, codes=codes: graph.run(codes), seconds=seconds)
            step_ms, graph_ms = (1e3 * float(np.median(side)) for side in (times.subject, times.reference))
            yield Point(axis, size, step_ms, graph_ms, step.megabytes)


def table(points: Sequence[Point]) -> Grid:
    """Times and memory, and the same divided by the work."""
    columns = ("axis", "size", "step, ms", "graph, ms", "step, MB", "step, us / work", "graph, us / work", "KB / work")
    rows: list[tuple[str, ...]] = []
    for p in points:
        per = [1e3 * value / p.work for value in (p.step_ms, p.graph_ms)] + [1024 * p.megabytes / p.work]
        values = (f"{p.step_ms:.2f}", f"{p.graph_ms:.3f}", f"{p.megabytes:.1f}", *(f"{value:.3g}" for value in per))
        rows.append((p.axis, str(p.size), *values))
    return Grid(columns, rows)


def picture(path: Path, points: Sequence[Point]) -> None:
    """Time and memory against each size, with a line of slope one (two for the width) through the last point."""
    figure, rows = plt.subplots(1, len(SIZES), figsize=(13, 4), layout="constrained")
    for axes, (axis, group) in zip(np.ravel(rows), itertools.groupby(points, lambda p: p.axis), strict=True):
        found = list(group)
        sizes = [p.size for p in found]
        for name, values in (
            ("step, ms", [p.step_ms for p in found]),
            ("graph, ms", [p.graph_ms for p in found]),
            ("step, MB", [p.megabytes for p in found]),
        ):
            (line,) = axes.loglog(sizes, values, marker="o", label=name)
            ideal = [values[-1] * p.work / found[-1].work for p in found]
            axes.loglog(sizes, ideal, linestyle=":", color=line.get_color(), linewidth=1)
        axes.set(xlabel=axis, xticks=sizes, xticklabels=map(str, sizes))
        axes.minorticks_off()
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
