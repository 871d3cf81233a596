"""Tables for people."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.numerics.affine import QParams


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


def quantizer_table(plan: Any, qparams: dict[str, QParams]) -> str:
    """Every quantizer of a model: where it stands, its codes, its parameters."""
    details = dict(plan.details)
    rows: list[list[str]] = []
    for name, q in plan.quantizers:
        kind, module, op, shape = details[name]
        spec, p = q.spec, qparams.get(name)
        codes = f"{'int' if spec.signed else 'uint'}{spec.bits} [{spec.qmin}, {spec.qmax}]"
        grain = (
            "per tensor"
            if spec.per_tensor
            else f"axis {spec.axis}" + (f", groups of {spec.group_size}" if spec.group_size else "")
        )
        dims = "x".join(str(n) for n in (shape if kind == "weight" else ("batch", *shape[1:])))
        scale, zero_point = ("follows the tensor", "") if p is None else (_span(p.scale), _span(p.zero_point))
        rows.append([name, kind, module or "-", op, dims, codes, grain, q.method, scale, zero_point])
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
    return table(header, rows)


def _span(values: Any) -> str:
    array = np.asarray(values)
    low, high = array.min(), array.max()
    text = "{:.4g}".format if array.dtype.kind == "f" else str
    return text(low) if low == high else f"{text(low)} .. {text(high)}"


def _numeric(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("%", "").replace("-", "").replace("e", "").isdigit()
