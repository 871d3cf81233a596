"""Formats tables for people: as text in a terminal, as HTML in a notebook."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.support import markup


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table that can be printed as text or HTML."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        return table(self.header, self.rows)


class Printed:
    """Base class of results that print as tables and lines, and display as HTML in a notebook."""

    def parts(self) -> list[Grid | str]:
        """The tables and lines, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(str(part) for part in self.parts())

    def _repr_html_(self) -> str:
        found = self.parts()
        return "".join(
            markup.table(part.header, part.rows) if isinstance(part, Grid) else markup.paragraph(part) for part in found
        )


class Summary(str):
    """The text of a table, which a notebook displays as HTML."""

    grid: Grid

    @classmethod
    def of(cls, grid: Grid) -> "Summary":
        """The text of a table, which keeps the table."""
        made = cls(str(grid))
        made.grid = grid
        return made

    def _repr_html_(self) -> str:
        return markup.table(self.grid.header, self.grid.rows)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns aligned with spaces; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [all(_numeric(row[i]) for row in cells[1:]) and len(cells) > 1 for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _numeric(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("%", "").replace("-", "").replace("e", "").isdigit()


def decibels_text(noise: float) -> str:
    """`-10 log10(noise)` for a table. noise: relative to the signal; "inf" if there is none."""
    return f"{-10 * np.log10(noise):.1f}" if noise > 0 else "inf"
