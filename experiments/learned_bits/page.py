"""The tables and the picture: the best accuracy within a number of lookup tables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.learned_bits.row import Row
from experiments.learned_bits.tasks import TASKS
from qjax.contrib.lab.machine import made_on
from qjax.export import files

START, END = "<!-- learned bits -->", "<!-- /learned bits -->"


def best(rows: Sequence[Row], budget: float) -> Row | None:
    """Of one training: the circuit within the budget that is best on the validation rows."""
    within = [row for row in rows if not row.error and row.tables <= budget]
    return max(within, key=lambda row: (row.valid, -row.tables), default=None)


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{np.mean(values):.1f}"
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.1f}"


def _table(rows: Sequence[Row], budgets: Sequence[int]) -> list[str]:
    lines = [
        "| tool | " + " | ".join(f"{budget:,}" for budget in budgets) + " | circuits | differ | seconds |",
        "| --- |" + " ---: |" * (len(budgets) + 3),
    ]
    for tool in dict.fromkeys(row.tool for row in rows):
        mine = [row for row in rows if row.tool == tool]
        seeds = sorted({row.seed for row in mine})
        cells: list[str] = []
        for budget in budgets:
            chosen = [best([row for row in mine if row.seed == seed], budget) for seed in seeds]
            tests = [row.test for row in chosen if row is not None]
            cells.append(_mean(tests) if len(tests) == len(seeds) else "")
        made = [row for row in mine if not row.error]
        seconds = np.mean([max(row.seconds for row in mine if row.seed == seed) for seed in seeds])
        cells += [str(len(made)), str(sum(not row.same for row in made)), f"{seconds:.0f}"]
        lines.append(f"| {tool} | " + " | ".join(cells) + " |")
    return lines


def text(rows: Sequence[Row]) -> str:
    """One table a task."""
    lines: list[str] = []
    for name in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == name]
        seeds = len({row.seed for row in mine})
        lines += ["", f"{name}, test accuracy in percent, {seeds} seeds; columns are lookup tables:", ""]
        lines += _table(mine, TASKS[name].budgets)
    return "\n".join(lines).strip()


def write(path: Path, rows: Sequence[Row]) -> None:
    """Put the tables between the marks of a page."""
    page = path.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    files.write(f"{before}{START}\n\n{text(rows)}\n\n{made_on()}\n\n{END}{after}".encode(), path)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Every circuit as a point: lookup tables and test accuracy."""
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row.task for row in rows))
    figure, all_axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 4), layout="constrained", squeeze=False)
    for axes, name in zip(all_axes[0], names, strict=True):
        for tool in ("qjax", "HGQ2", "qjax, per weight"):
            mine = [row for row in rows if row.task == name and not row.error]
            mine = [row for row in mine if row.tool.removesuffix(", rate 0.01") == tool]
            axes.scatter([row.tables for row in mine], [row.test for row in mine], s=12, label=tool, alpha=0.7)
        axes.set(title=name, xlabel="lookup tables (alkaid's estimate)", ylabel="test accuracy, %", xscale="log")
        axes.set_xticks([3_000, 5_000, 10_000, 20_000, 40_000], ["3,000", "5,000", "10,000", "20,000", "40,000"])
        axes.set_xticks([], minor=True)
        least = sorted(row.test for row in rows if row.task == name)
        axes.set_ylim(least[len(least) // 5] - 2, least[-1] + 0.5)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
