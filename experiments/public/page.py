"""The rows of `experiments.public` as a page for docs/."""

import argparse
from collections.abc import Mapping, Sequence

from experiments.public.row import OTHER_SIZE, Row
from qjax.contrib.lab.machine import machine

COLUMNS = (
    "model",
    "parameters",
    "nodes",
    "float nodes",
    "codes",
    "fake-quant: differ",
    "outputs",
    "exact: differ",
    "cosine",
    "seconds",
)

PAGE = """# Public models, converted unchanged

`python -m experiments.public --page {path}{options}` wrote this page. The models come from other projects, which
did not write them for qjax, and are used unchanged. They are small and have random weights. Each is quantized with
`qjax.Recipe()`, calibrated on two batches and converted, with its own inputs and outputs.

| column | meaning |
| --- | --- |
| nodes | number of nodes of the integer graph |
| float nodes | nodes whose output is not integer |
| codes | codes that were compared, over all nodes |
| fake-quant: differ | codes that the float32 training forward computes differently from the same input codes |
| outputs | output values that were compared, for a batch of {size} examples |
| exact: differ | outputs of `qjax.exact`, or of the graph for the first examples alone, that differ{without} |
| cosine | between the outputs of the graph and of the float model; the smallest if there are several |
| seconds | to quantize, calibrate and convert |

{tables}
{machine}
"""


CHECKOUTS: tuple[str, ...] = ("examples", "bonsai", "scenic")
"""The options that name the folder of a checkout."""


def cells(row: Row) -> list[str]:
    """A row's cells; a failing one keeps what was counted before it failed."""
    head = [row.name, f"{row.parameters:,}"]
    if not row.nodes:
        return [*head, *("" for _ in COLUMNS[2:])]
    exact = f"{row.exact_mismatches:,}" if row.exact or row.exact_mismatches else "-"
    counts = (row.nodes, row.float_nodes, row.compared, row.differ, row.outputs)
    return [*head, *(f"{n:,}" for n in counts), exact, f"{row.cosine:.4f}", f"{row.seconds:.0f}"]


def summary(rows: Sequence[Row]) -> str:
    """One line about all rows."""
    good = sum(not row.error for row in rows)
    return f"{good} of {len(rows)} convert; {sum(row.exact_mismatches for row in rows)} outputs differ."


def path_of(arguments: argparse.Namespace) -> str:
    """Where the page is written, within the project."""
    return "docs/public-models.md" if arguments.page is None else f"docs/{arguments.page.name}"


def options_of(arguments: argparse.Namespace) -> str:
    """The options that chose the models."""
    chosen = f" --collections {' '.join(arguments.collections)}" if arguments.collections else ""
    chosen += " --no-exact" if arguments.no_exact else ""
    return chosen + "".join(f" --{name} FOLDER" for name in CHECKOUTS if getattr(arguments, name, None) is not None)


def _without_folders(text: str, arguments: argparse.Namespace) -> str:
    """A message whose paths begin in the checkout."""
    for name in CHECKOUTS:
        if (folder := getattr(arguments, name, None)) is not None:
            text = text.replace(f"{folder}/", "")
    return text


def page(groups: Mapping[str, Sequence[Row]], missing: Sequence[str], arguments: argparse.Namespace) -> str:
    """The page; groups: title -> rows; missing: a line for each collection that was not there."""
    parts: list[str] = []
    for title, rows in groups.items():
        lines = [f"## {title}", "", summary(rows), ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
        failed = [f"- **{row.name}**, {_without_folders(row.error, arguments)}" for row in rows if row.error]
        if failed:
            lines += ["", "What fails, at which stage, and the first line of the error:", "", *failed]
        parts.append("\n".join(lines) + "\n")
    if missing:
        parts.append("Not run here:\n\n" + "\n".join(f"- {line}" for line in missing) + "\n")
    made = machine()
    return PAGE.format(
        path=path_of(arguments),
        options=options_of(arguments),
        size=OTHER_SIZE,
        without="; `-`: not run" if arguments.no_exact else "",
        tables="\n".join(parts),
        machine=f"Made on {made['cpu']}, {made['cores']} cores, jax {made['jax']}, flax {made['flax']}.",
    )
