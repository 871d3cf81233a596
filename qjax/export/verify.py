"""Compares the fake-quantized forward with the graph, node by node.

Two questions per node. *Given the training forward's own input codes*, does the node give the training forward's
output codes? And: does the graph, run from its inputs, arrive at those codes? The first isolates a node; the
second is what a user of the graph sees.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.export.integer_graph import IntegerGraph, dequantize_output, outputs_of
from qjax.export.interpreter import run, run_node
from qjax.export.ir import REAL_DTYPE, Graph
from qjax.export.structure import join_arguments, split_arguments
from qjax.export.verify_report import NodeReport as NodeReport
from qjax.export.verify_report import OutputReport as OutputReport
from qjax.export.verify_report import RealReport as RealReport
from qjax.export.verify_report import Report as Report
from qjax.export.verify_report import cause_of, first_difference
from qjax.export.view import NodeView

Reference = Callable[..., tuple[Any, dict[str, Any]]]
"""The training forward, compiled: inputs -> (output, codes by label of the tensor)."""


def verify(
    graph: IntegerGraph,
    reference: Reference,
    batches: Iterable[tuple[Any, ...]],
    trained_for: str,
    converted: Callable[[tuple[Any, ...]], Graph | None],
) -> Report:
    """Run both on the same batches and count.

    Args:
      reference: gives the codes of every labelled tensor.
      trained_for: the name of the model's own target.
      converted: a batch -> what `convert` makes of the model now, for the graph's target; None where the target is not
        known. It is asked for only where something differs.
    """
    ir = graph.ir
    named = [node for node in ir.nodes if ir.tensors[node.output].quantization is not None]
    plain = [
        (position, name)
        for position, name in enumerate(ir.outputs)
        if ir.tensors[name].quantization is None and ir.tensors[name].dtype == REAL_DTYPE
    ]
    measured = [(i, name) for i, name in enumerate(ir.outputs) if ir.tensors[name].quantization or (i, name) in plain]

    @functools.partial(jax.jit, static_argnums=2)
    def compare(
        constants: Any, arrays: list[Any], rest: Any, output: Any, codes: dict[str, Any]
    ) -> tuple[dict[str, Any], Any, dict[str, Any], list[Any]]:
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
        values: list[Any] = [dequantize_output(ir, name, free[name]) for _, name in measured]
        distances = [_distance(leaves[i].astype(jnp.float32), v) for (i, _), v in zip(measured, values, strict=True)]
        same = jnp.argmax(leaves[0], -1) == jnp.argmax(free[ir.outputs[0]], -1)
        reals = {name: _apart(leaves[position].astype(jnp.float32), free[name]) for position, name in plain}
        return counts, jnp.sum(jnp.logical_not(same), dtype=jnp.int32), reals, distances

    totals: dict[str, np.ndarray] = {node.name: np.zeros(5, np.int64) for node in named}
    numbers: dict[str, tuple[int, int, float]] = {name: (0, 0, 0.0) for _, name in plain}
    apart = np.zeros((len(measured), 3))
    examples, predictions, predicted = 0, 0, 0
    first: tuple[Any, ...] = ()
    for batch in batches:
        first = first or batch
        arrays, rest = split_arguments(batch)
        counts, wrong, reals, distances = compare(graph.interpreter.constants, arrays, rest, *reference(*batch))
        size = next(int(np.shape(array)[0]) for array in arrays if np.ndim(array))
        examples += size
        predictions += int(wrong)
        predicted += int(np.prod([size if n is None else n for n in ir.tensors[ir.outputs[0]].shape[:-1]]))
        for row, (most, noise, signal) in zip(apart, distances, strict=True):
            row[:] = max(row[0], float(most)), row[1] + float(noise), row[2] + float(signal)
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
        NodeReport(
            node.name,
            NodeView(ir, node).kind,
            node.location,
            *(int(n) for n in totals[node.name]),
            cause=cause_of(node) if totals[node.name][1] else "",
        )
        for node in named
    )
    found = tuple(RealReport(name, *entry) for name, entry in numbers.items())
    outputs = tuple(
        OutputReport(name, *(float(number) for number in row)) for (_, name), row in zip(measured, apart, strict=True)
    )
    report = Report(reports, examples, predictions, found, predicted, outputs, graph.target, trained_for)
    now = None if report.exact else converted(first)
    return report if now is None else report.against(first_difference(ir, now))


def _apart(a: jax.Array, b: jax.Array) -> tuple[Any, Any, Any]:
    """How many numbers there are, how many differ (NaN equals itself), and the greatest difference."""
    differs = jnp.logical_not((a == b) | (jnp.isnan(a) & jnp.isnan(b)))
    most = jnp.max(jnp.where(differs, jnp.abs(a - b), jnp.zeros_like(a)), initial=0)
    return a.size, jnp.sum(differs, dtype=jnp.int32), most


def _distance(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The greatest absolute difference, the sum of squared differences, the sum of a's squares."""
    return jnp.max(jnp.abs(a - b), initial=0), jnp.sum(jnp.square(a - b)), jnp.sum(jnp.square(a))
