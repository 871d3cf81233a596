"""The table of a model's quantizers that `qmodel.summary()` prints."""

from typing import Any

import numpy as np

from qjax.numerics.affine import QParams, QSpec
from qjax.support.tables import Grid, Summary


def quantizer_table(plan: Any, qparams: dict[str, QParams]) -> Summary:
    """List every quantizer of a model, and every product without one: its place, codes and parameters."""
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
    """Describe which elements of a tensor share a scale."""
    parts = [] if spec.axis is None else [f"axis {spec.axis}"]
    parts += [] if spec.group_size is None else [f"groups of {spec.group_size}"]
    return ", ".join(parts) or "per tensor"


def _codes(spec: QSpec) -> str:
    return f"{'int' if spec.signed else 'uint'}{spec.bits} [{spec.qmin}, {spec.qmax}]"


def _rows_of(product: Any) -> list[list[str]]:
    """The rows of a product under `Dynamic` or a `WeightFormat`: its weight, and its activation if that has codes."""
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
