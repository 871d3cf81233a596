"""The rows of `experiments.architectures`, as a table for a terminal and as a page for docs/."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from qjax.contrib.lab.machine import made_on


@dataclasses.dataclass
class Row:
    """What the table says about one architecture.

    equations: of the model's own jaxpr in evaluation mode. nodes: of the integer graph; float_nodes: those among them
    whose output is not integer. compared, mismatches, worst: codes of the fake-quantized forward given the same input
    codes, how many differ, by how many steps at most. exact_mismatches: outputs of the exact forward that differ from
    the graph's. error: stage and first line, where a stage failed.
    """

    name: str
    parameters: int = 0
    equations: int = 0
    nodes: int = 0
    float_nodes: int = 0
    compared: int = 0
    mismatches: int = 0
    worst: int = 0
    outputs: int = 0
    exact_mismatches: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """Of the processor, for the conversion alone; all threads together."""
    exact_seconds: float = 0.0
    """Of the first call of the exact forward inside jit: tracing and compiling it."""
    total_seconds: float = 0.0
    megabytes: float = 0.0
    error: str = ""
    report: str = ""


COLUMNS = (
    "architecture",
    "parameters",
    "equations",
    "nodes",
    "float nodes",
    "codes",
    "fake-quant: differ",
    "by at most",
    "outputs",
    "exact: differ",
    "convert, s",
    "compile exact, s",
    "peak MB",
)


def cells(row: Row) -> list[str]:
    """A row's cells; a failing one keeps what was counted before it failed."""
    head = [row.name, f"{row.parameters:,}", f"{row.equations:,}"]
    if not row.nodes:
        return [*head, *("" for _ in COLUMNS[4:]), f"{row.megabytes:,.0f}"]
    counts = (row.nodes, row.float_nodes, row.compared, row.mismatches, row.worst, row.outputs, row.exact_mismatches)
    seconds = (f"{row.seconds:.1f}", f"{row.exact_seconds:.1f}")
    return [*head, *(f"{n:,}" for n in counts), *seconds, f"{row.megabytes:,.0f}"]


def table_of(rows: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "architecture" else "right")
    for row in rows:
        table.add_row(*cells(row))
    return table


PAGE = """# Published architectures, converted

`python -m experiments.architectures --page docs/architectures.md` wrote this page. The models are in
`experiments/models`: plain Flax, as their authors or users would write them, with no code for qjax.

- Each model is built {size} and quantized with `qjax.Recipe({recipe})`.
- It is then calibrated on {count} random batches and trained for {steps} steps of Adam towards random outputs.
  Every loss is finite.
- It is converted to integers, and the graph is compared with the fake-quantized and the exact forward.

| column | meaning |
| --- | --- |
| equations | number of equations of the model's own jaxpr in evaluation mode |
| nodes | number of nodes of the integer graph |
| float nodes | nodes whose output is not integer |
| codes | codes that were compared, over all nodes |
| fake-quant: differ | codes that the float32 training forward computes differently from the same input codes |
| by at most | the largest of these differences, in steps |
| outputs | output values that were compared |
| exact: differ | outputs that differ between `qjax.exact` and the graph |
| convert, s | processor time of the conversion, over all threads |
| compile exact, s | processor time of the first call of the exact forward inside `jit` |
| peak MB | of the whole process, including JAX and XLA's compiler |

{table}
{errors}
{machine}
"""


def page(rows: list[Row], arguments: argparse.Namespace, missing: Sequence[str] = ()) -> str:
    """The page for docs/; missing: architectures that were not run."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    failed = [f"- **{row.name}**, {row.error}" for row in rows if row.error]
    errors = "\nWhat fails, at which stage, and the first line of the error:\n\n" + "\n".join(failed) + "\n"
    left_out = f"\nNot run here: {', '.join(missing)}.\n" if missing else ""
    return PAGE.format(
        size="at its published size" if arguments.full else "small (a block of each kind, a few channels)",
        recipe="" if arguments.target == "nearest_even" else f'target="{arguments.target}"',
        count=arguments.batches,
        steps=arguments.steps,
        table="\n".join(lines),
        errors=left_out + (errors if failed else ""),
        machine=made_on(),
    )


def write(path: Path, text: str) -> None:
    """Write a file at once: a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
