"""Compares how two graphs quantize their float inputs, and explains why the codes differ."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax.comparison.causes import Key, differing_fields
from qjax.comparison.exact_values import Ratio, compare_halves
from qjax.comparison.findings import Finding
from qjax.graph.ir import Graph, Quantization
from qjax.graph.rounding_phrases import QUANTIZATIONS
from qjax.run.quantize_io import quantize_inputs
from qjax.run.stepwise import Runner

INPUT_TEXTS = {
    "tie": "exact ties of x / s: {n}",
    "float32": "values so near a tie that the float32 steps of one of the two carry them onto or over it: {n}",
    "grid": "different grids: {n}",
    "other": "values that are not finite: {n}",
}
"""Kind of cause -> a clause about n codes."""


def input_codes(ir: Graph, batch: Sequence[Any]) -> list[Any]:
    """The codes that a graph computes from a batch; codes are returned unchanged."""
    made: list[Any] = []
    for name, x in zip(ir.inputs, batch, strict=True):
        codes = ir.tensors[name].quantization is not None and not jnp.issubdtype(x.dtype, jnp.floating)
        made.append(x if codes else quantize_inputs(ir.replace(inputs=(name,)), [x])[0])
    return made


def input_findings(name: str, a: Runner, b: Runner) -> list[Finding]:
    """List the differences in how the two graphs quantize an input."""
    found: list[Finding] = []
    if a.ir.quantization != b.ir.quantization:
        texts = [f"{g.label} {QUANTIZATIONS[g.ir.quantization]} ({g.ir.quantization})" for g in (a, b)]
        found.append(Finding("method", "; ".join(texts)))
    return found + [
        Finding("grid", f"{what} of {name!r} differ here") for what in differing_fields(*_grids(name, a, b))
    ]


def _grids(name: str, a: Runner, b: Runner) -> tuple[Quantization, Quantization]:
    left, right = a.ir.tensors[name].quantization, b.ir.tensors[name].quantization
    assert left is not None
    assert right is not None
    return left, right


def classify_input(
    name: str, graphs: tuple[Runner, Runner], x: np.ndarray, mine: np.ndarray, theirs: np.ndarray
) -> Counter[Key]:
    """Why codes of float inputs differ: the exact quotient x / s is a tie, or float32 steps decide."""
    grids, mask = _grids(name, *graphs), mine != theirs
    if differing_fields(*grids):
        return Counter({("grid", ""): int(np.sum(mask))})
    values = x[mask].astype(np.float32)
    finite = np.isfinite(values)
    found: Counter[Key] = Counter({("other", ""): int(np.sum(~finite))})
    scale = np.broadcast_to(np.asarray(grids[0].scale), x.shape)[mask][finite]
    zero_point = np.broadcast_to(np.asarray(grids[0].zero_point), x.shape)[mask][finite]
    if scale.size:
        quotient = Ratio.of(values[finite]) / Ratio.of(scale)
        tie = np.abs(compare_halves(quotient, mine[mask][finite].astype(np.int64) - zero_point)) == 1
        found["tie", ""], found["float32", ""] = int(np.sum(tie)), int(np.sum(~tie))
    return +found
