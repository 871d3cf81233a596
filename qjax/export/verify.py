"""Compares the fake-quantized forward with the graph, node by node.

Two questions per node. *Given the training forward's own input codes*, does the node give the training forward's
output codes? And: does the graph, run from its inputs, arrive at those codes? The first isolates a node; the
second is what a user of the graph sees.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.export.integer_graph import IntegerGraph, outputs_of
from qjax.export.interpreter import run, run_node
from qjax.export.ir import REAL_DTYPE
from qjax.export.structure import join_arguments, split_arguments
from qjax.export.view import NodeView
from qjax.summary import table

Reference = Callable[..., tuple[Any, dict[str, Any]]]
"""The training forward, compiled: inputs -> (output, codes by label of the tensor)."""


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """Counts over all batches.

    local: outputs that differ although the node was given the training forward's input codes; local_max: by how
    many steps at most. end_to_end, end_to_end_max: the same for the graph run from its inputs.
    """

    name: str
    op: str
    location: str | None
    compared: int
    local: int
    local_max: int
    end_to_end: int
    end_to_end_max: int


@dataclasses.dataclass(frozen=True)
class RealReport:
    """An output that leaves as real numbers, because it was left in floats: how many differ, and by how much."""

    name: str
    compared: int
    differ: int
    by_at_most: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`. `str(report)` is a table; `report.exact` is whether nothing differs at all.

    predictions: how many final predictions (argmax over the last axis of the first output) differ.
    reals: the outputs that stand on no grid.
    """

    nodes: tuple[NodeReport, ...]
    examples: int
    predictions: int
    reals: tuple[RealReport, ...] = ()

    @property
    def exact(self) -> bool:
        """No code of any node differs, and no real output."""
        codes = all(node.local == 0 and node.end_to_end == 0 for node in self.nodes)
        return codes and all(real.differ == 0 for real in self.reals)

    @property
    def compared(self) -> int:
        """Codes compared, over all nodes."""
        return sum(node.compared for node in self.nodes)

    @property
    def local(self) -> int:
        """Codes that differ where the inputs agree, over all nodes."""
        return sum(node.local for node in self.nodes)

    @property
    def local_max(self) -> int:
        """The largest such difference, in steps."""
        return max((node.local_max for node in self.nodes), default=0)

    @property
    def output_mismatches(self) -> int:
        """Codes of the graph's last node that differ end to end."""
        return self.nodes[-1].end_to_end if self.nodes else 0

    def __str__(self) -> str:
        header = (
            "node",
            "op",
            "compared",
            "differ, same inputs",
            "by at most",
            "differ, end to end",
            "by at most",
        )
        rows = [(n.name, n.op, n.compared, n.local, n.local_max, n.end_to_end, n.end_to_end_max) for n in self.nodes]
        return (
            table(header, rows)
            + f"\n{self.examples} examples; {self.local} of {self.compared} codes differ where a node's inputs agree; "
            + f"{self.predictions} predictions differ"
            + "".join(
                f"\nreal output {r.name}: {r.differ} of {r.compared} numbers differ, by at most {r.by_at_most:.3g}"
                for r in self.reals
            )
        )


def verify(graph: IntegerGraph, reference: Reference, batches: Iterable[tuple[Any, ...]]) -> Report:
    """Run both on the same batches and count. `reference` gives the codes of every labelled tensor."""
    ir = graph.ir
    named = [node for node in ir.nodes if ir.tensors[node.output].quantization is not None]
    plain = [
        (position, name)
        for position, name in enumerate(ir.outputs)
        if ir.tensors[name].quantization is None and ir.tensors[name].dtype == REAL_DTYPE
    ]

    @functools.partial(jax.jit, static_argnums=2)
    def compare(
        constants: Any, arrays: list[Any], rest: Any, output: Any, codes: dict[str, Any]
    ) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        inputs = join_arguments(arrays, rest)
        quantized = graph.quantize(*inputs)
        quantized = quantized if isinstance(quantized, tuple) else (quantized,)
        free = run(ir, constants, quantized)
        forced: dict[str, Any] = dict(zip(ir.inputs, quantized, strict=True))
        for tensor in ir.constants():
            forced[tensor.name] = tensor.value
        counts: dict[str, Any] = {}
        for node in ir.nodes:
            arguments = [jnp.asarray(forced[name]) for name in node.inputs]
            got = run_node(ir, node, constants[node.name], arguments)
            wanted = codes.get(node.output)
            if wanted is None:
                # a node that moves codes has no quantizer of its own: its value follows from its inputs
                forced[node.output] = got
                wanted = got.astype(jnp.int32)
            else:
                forced[node.output] = wanted.astype(got.dtype)
            local = jnp.abs(got.astype(jnp.int32) - wanted)
            whole = jnp.abs(free[node.output].astype(jnp.int32) - wanted)
            counts[node.name] = [
                jnp.sum(local != 0, dtype=jnp.int32),
                jnp.max(local, initial=0),
                jnp.sum(whole != 0, dtype=jnp.int32),
                jnp.max(whole, initial=0),
            ]
        leaves = outputs_of(ir, output)
        same = jnp.argmax(leaves[0], -1) == jnp.argmax(free[ir.outputs[0]], -1)
        reals = {name: _apart(leaves[position].astype(jnp.float32), free[name]) for position, name in plain}
        return counts, jnp.sum(jnp.logical_not(same), dtype=jnp.int32), reals

    totals: dict[str, np.ndarray] = {node.name: np.zeros(5, np.int64) for node in named}
    numbers: dict[str, tuple[int, int, float]] = {name: (0, 0, 0.0) for _, name in plain}
    examples, predictions = 0, 0
    for batch in batches:
        arrays, rest = split_arguments(batch)
        counts, wrong, reals = compare(graph.interpreter.constants, arrays, rest, *reference(*batch))
        size = next(int(np.shape(array)[0]) for array in arrays if np.ndim(array))
        examples += size
        predictions += int(wrong)
        for name, (count, differ, most) in numbers.items():
            size_of, differs, by = reals[name]
            numbers[name] = count + int(size_of), differ + int(differs), max(most, float(by))
        for node in named:
            local, local_max, whole, whole_max = (int(c) for c in counts[node.name])
            t = totals[node.name]
            t[0] += int(np.prod([size if n is None else n for n in ir.tensors[node.output].shape]))
            t[1] += local
            t[2] = max(t[2], local_max)
            t[3] += whole
            t[4] = max(t[4], whole_max)
    if examples == 0:
        raise ValueError("verify: expected at least one batch with an example, got none.")
    reports = tuple(
        NodeReport(node.name, NodeView(ir, node).kind, node.location, *(int(n) for n in totals[node.name]))
        for node in named
    )
    found = tuple(RealReport(name, *entry) for name, entry in numbers.items())
    return Report(reports, examples, predictions, found)


def _apart(a: jax.Array, b: jax.Array) -> tuple[Any, Any, Any]:
    """How many numbers there are, how many differ (NaN equals itself), and the greatest difference."""
    differs = jnp.logical_not((a == b) | (jnp.isnan(a) & jnp.isnan(b)))
    most = jnp.max(jnp.where(differs, jnp.abs(a - b), jnp.zeros_like(a)), initial=0)
    return a.size, jnp.sum(differs, dtype=jnp.int32), most
