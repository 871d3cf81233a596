"""The rows as tables: means over seeds, and paired differences to the float model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.accuracy.row import Row
from qjax.lab.machine import made_on

PAGE = """# How accurate are networks after quantized training?

Answer: {answer}

`make accuracy ARGS="--rows out/accuracy/rows.jsonl --page docs/accuracy-trained.md"` makes this page. Every method
starts from the same trained float network. Data, order of batches, epochs and batch size are the same for all. The
last epoch counts. Nothing is selected on the 10,000 test images.

- **points**: accuracy minus the float network's, in percentage points, mean over seeds. The standard error follows
  where there are several seeds.
- **graph**: the same for the integer graph.
- **decisions**: test images for which graph and trained model choose different classes, worst seed.
- The first and the last layer have 8 bits. Weights of 2 bits are -1, 0 and 1.
- "float, trained on" is the control: the float network after the same further epochs.

{tables}
{machine}
"""


def _mean(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):+.2f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.2f}"


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| | epochs | points | graph | decisions | seeds | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in dict.fromkeys((row.method, row.epochs) for row in rows):
        mine = [row for row in rows if (row.method, row.epochs) == key]
        failed = [row for row in mine if row.error]
        if failed:
            lines.append(f"| {key[0]} | {key[1]} | {failed[0].error} | | | | |")
            continue
        points = [row.points for row in mine if row.points is not None]
        graphs = [row.graph_points for row in mine if row.graph_points is not None]
        decisions = [row.decisions for row in mine if row.decisions is not None]
        seconds = [row.seconds for row in mine if row.seconds is not None]
        cells = [key[0], str(key[1]), _mean(points), _mean(graphs) if graphs else "", str(max(decisions, default=""))]
        lines.append("| " + " | ".join([*cells, str(len(mine)), f"{np.mean(seconds):.0f}" if seconds else ""]) + " |")
    return lines


def text(rows: Sequence[Row]) -> str:
    """Tables by network and setting."""
    lines: list[str] = []
    for network in dict.fromkeys(row.network for row in rows):
        mine = [row for row in rows if row.network == network]
        floats = {row.seed: row.float_accuracy for row in mine if row.float_accuracy is not None}
        shown = ", ".join(f"{value:.2f}" for _, value in sorted(floats.items()))
        lines += [f"## {network}", "", f"Float: {shown} %.", ""]
        control = [row for row in mine if row.method == "float, trained on"]
        for setting in dict.fromkeys(row.setting for row in mine if row.setting != "float"):
            chosen = [*control, *(row for row in mine if row.setting == setting)]
            lines += [f"### {network}, {setting}", "", *_table(chosen), ""]
    return "\n".join(lines)


def _answer(rows: Sequence[Row]) -> str:
    """What a practitioner asks first, from the rows."""
    best: list[str] = []
    for setting in ("W8A8", "W4A4", "W2A2"):
        parts: list[str] = []
        for network in dict.fromkeys(row.network for row in rows):
            by_method: dict[str, list[float]] = {}
            for row in rows:
                if (row.network, row.setting) == (network, setting) and row.graph_points is not None and row.epochs:
                    by_method.setdefault(row.method, []).append(row.graph_points)
            if by_method:
                method = max(by_method, key=lambda name: float(np.mean(by_method[name])))
                parts.append(f"{network} {np.mean(by_method[method]):+.1f} ({method})")
        if parts:
            best.append(f"at {setting} the best graph is off the float network by {', '.join(parts)} points")
    return "; ".join(best) + "."


def write(path: Path, rows: Sequence[Row]) -> None:
    where = made_on()
    path.write_text(PAGE.format(answer=_answer(rows), tables=text(rows), machine=where))
