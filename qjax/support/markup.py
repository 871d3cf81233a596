"""Produces HTML for people: escaped text and tables. Notebooks show the results of qjax with these."""

from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_SHOWN = 200
"""The most rows of a table in a notebook."""


def text(value: Any) -> str:
    """Any value as escaped HTML text."""
    return escape(str(value), quote=True)


def numeric(value: str) -> bool:
    """Whether a cell is a number, possibly with a sign, a percent sign or separators, to be aligned to the right."""
    kept = value.replace(",", "").replace(".", "").replace("%", "").replace("-", "").replace("+", "").replace("e", "")
    return kept.isdigit() or value in ("-", "inf", "-inf")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A table; one with more than 200 rows ends in a line that counts the rest."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(numeric(row[i]) for row in cells) for i in range(len(header))]
    align = ["right" if r else "left" for r in right]
    parts = [f'<table style="{_STYLE}">']
    if caption:
        parts.append(f'<caption style="text-align:left">{text(caption)}</caption>')
    heads = "".join(
        f'<th scope="col" style="text-align:{a};padding:2px 8px">{text(name)}</th>'
        for name, a in zip(header, align, strict=True)
    )
    parts.append(f"<thead><tr>{heads}</tr></thead><tbody>")
    for row in cells[:_SHOWN]:
        inner = "".join(
            f'<td style="text-align:{a};padding:2px 8px">{text(cell)}</td>' for cell, a in zip(row, align, strict=True)
        )
        parts.append(f"<tr>{inner}</tr>")
    parts.append("</tbody></table>")
    if len(cells) > _SHOWN:
        parts.append(paragraph(f"{len(cells) - _SHOWN} more rows: print(...) shows them all."))
    return "".join(parts)


def paragraph(content: str) -> str:
    """Lines of text as a paragraph; empty for an empty text."""
    lines = "<br>".join(text(line) for line in content.splitlines())
    return f"<p>{lines}</p>" if lines else ""
