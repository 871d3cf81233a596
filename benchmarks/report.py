"""What a part found, as a table for a terminal or for a page."""

import dataclasses
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Result
from qjax.contrib.lab.machine import machine


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table: the first column is text, the others are numbers."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def show(self, title: str) -> None:
        """Print it, with the machine below."""
        table = Table(title=title, caption=where())
        for position, column in enumerate(self.columns):
            # names may take two lines, numbers never
            table.add_column(column, justify="right" if position else "left", no_wrap=bool(position))
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)

    def markdown(self) -> str:
        """The table and the machine."""
        lines = [self.columns, ["---", *["--:"] * (len(self.columns) - 1)], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{where()}\n"


def ratios(results: Sequence[Result]) -> Grid:
    """Medians, and the median and the quartiles of the ratio over pairs."""
    return Grid(("comparison", "ms", "reference, ms", "ratio", "quartiles"), [result.row() for result in results])


def where() -> str:
    """The machine and the versions, as a sentence."""
    found = machine()
    versions = f"Python {found['python']}, jax {found['jax']}, flax {found['flax']}"
    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f"{device.device_kind}; "
    return f"{accelerator}{found['cpu']}, {found['cores']} cores; {versions}."
