"""Tables of paired timings, and the machine that made them."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Paired
from experiments.machine import machine


def show(title: str, results: Sequence[Paired]) -> None:
    """Print a table: medians, and the median and quartiles of the ratio over pairs."""
    where = machine()
    table = Table(
        title=title,
        caption=f"{where['cpu']}, {where['cores']} cores, jax {where['jax']}, python {where['python']}",
    )
    table.add_column("comparison")
    for column in ("ms", "reference ms", "ratio", "quartiles"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*result.row())
    Console().print(table)
