"""Tables for people: text in a terminal, HTML in a notebook."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax import markup
from qjax.numerics.affine import QParams, QSpec


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table that can be text or HTML."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        return table(self.header, self.rows)


class Printed:
    """What prints as tables and lines, and shows itself as HTML in a notebook."""

    def parts(self) -> list[Grid | str]:
        """Tables and lines, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(str(part) for part in self.parts())

    def _repr_html_(self) -> str:
        found = self.parts()
        return "".join(
            markup.table(part.header, part.rows) if isinstance(part, Grid) else markup.paragraph(part) for part in found
        )


class Summary(str):
    """A table as a string that a notebook shows as HTML."""

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
    """Columns aligned with spaces; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [all(_numeric(row[i]) for row in cells[1:]) and len(cells) > 1 for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def quantizer_table(plan: Any, qparams: dict[str, QParams]) -> Summary:
    """Every quantizer of a model, and every product without one: its place, its codes, its parameters."""
    details = dict(plan.details)
    rows: list[list[str]] = []
    for name, q in plan.quantizers:
        kind, module, op, shape = details[name]
        spec, p = q.spec, qparams.get(name)
        codes = _codes(spec)
        dims = "x".join(str(n) for n in (shape if kind == "weight" else ("batch", *shape[1:])))
        scale, zero_point = ("follows the tensor", "") if p is None else (_span(p.scale), _span(p.zero_point))
        rows.append([name, kind, module or "-", op, dims, codes, grain(spec), q.estimator.name, scale, zero_point])
    for product in plan.products:
        rows += _rows_of(product)
    header = (
        "quantizer",
        "kind",
        "module",
        "op",
        "shape",
        "codes",
        "scales",
        "method",
        "scale",
        "zero point",
    )
    return Summary.of(Grid(header, rows))


def grain(spec: QSpec) -> str:
    """Which elements of a tensor share a scale."""
    parts = [] if spec.axis is None else [f"axis {spec.axis}"]
    parts += [] if spec.group_size is None else [f"groups of {spec.group_size}"]
    return ", ".join(parts) or "per tensor"


def _codes(spec: QSpec) -> str:
    return f"{'int' if spec.signed else 'uint'}{spec.bits} [{spec.qmin}, {spec.qmax}]"


def _rows_of(product: Any) -> list[list[str]]:
    """A product under `Dynamic` or a `WeightFormat`: its weight, and the activation where that has codes."""
    setting, method = product.setting, type(product.setting).__name__
    given = getattr(setting, "weights", setting)
    codes = _codes(given) if isinstance(given, QSpec) else given.name
    place = [product.module or "-", product.op]
    dims = "x".join(map(str, product.shape))
    rows = [[product.name, "weight", *place, dims, codes, product.scales, method, "follows the tensor", ""]]
    if given is not setting:
        name, scales = f"{product.name} (input)", f"per {setting.per}"
        codes = _codes(setting.activations)
        rows.append([name, "activation", *place, "-", codes, scales, method, "found at run time", ""])
    return rows


def _span(values: Any) -> str:
    array = np.asarray(values)
    low, high = array.min(), array.max()
    text = "{:.4g}".format if array.dtype.kind == "f" else str
    return text(low) if low == high else f"{text(low)} .. {text(high)}"


def _numeric(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("%", "").replace("-", "").replace("e", "").isdigit()


def decibels_text(noise: float) -> str:
    """`-10 log10(noise)` for a table; noise: a share of the signal, "inf" where there is none."""
    return f"{-10 * np.log10(noise):.1f}" if noise > 0 else "inf"
