"""Compares the fake-quantized forward with the graph, node by node.

There are two questions for each node. *Given the training forward's own input codes*, does the node compute the
training forward's output codes? And does the graph, run from its inputs, compute these codes? The first isolates a
node; the second is what a user of the graph sees.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.comparison.verify_report import InputReport as InputReport
from qjax.comparison.verify_report import NodeReport as NodeReport
from qjax.comparison.verify_report import OutputReport as OutputReport
from qjax.comparison.verify_report import RealReport as RealReport
from qjax.comparison.verify_report import Report as Report
from qjax.comparison.verify_report import cause_of, first_difference
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.batch_shapes import Sizes, batch_of, shapes_at
from qjax.graph.ir import REAL_DTYPE, UNCALIBRATED, Graph
from qjax.graph.node_view import NodeView
from qjax.graph.structure import split_arguments
from qjax.graph.unsupported import ConversionError
from qjax.ops import backend
from qjax.run.interpreter import run
from qjax.run.quantize_io import dequantize_output, inputs_of, outputs_of
from qjax.run.stepwise import Runner

Reference = Callable[..., tuple[Any, dict[str, Any]]]
"""The training forward, compiled: inputs -> (output, codes by label of the tensor)."""


def verify(
    graph: IntegerGraph,
    reference: Reference,
    batches: Iterable[tuple[Any, ...]],
    trained_for: str,
    converted: Callable[[tuple[Any, ...]], Graph | None],
) -> Report:
    """Run both on the same batches and count the differences.

    Args:
      reference: returns the codes of every labelled tensor.
      trained_for: the name of the model's own target.
      converted: a batch -> the graph that `convert` makes of the model now, for the graph's target; None if the target
        is unknown. It is called only if something differs.
    """
    ir = graph.ir
    named = [node for node in ir.nodes if ir.tensors[node.output].quantization is not None]
    plain = [
        (position, name)
        for position, name in enumerate(ir.outputs)
        if ir.tensors[name].quantization is None and ir.tensors[name].dtype == REAL_DTYPE
    ]
    measured = [(i, name) for i, name in enumerate(ir.outputs) if ir.tensors[name].quantization or (i, name) in plain]

    @jax.jit
    def summed(leaves: list[Any], free: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Any]]:
        values: list[Any] = [dequantize_output(ir, name, free[name]) for _, name in measured]
        distances = [_distance(leaves[i].astype(jnp.float32), v) for (i, _), v in zip(measured, values, strict=True)]
        same = jnp.argmax(leaves[0], -1) == jnp.argmax(free[ir.outputs[0]], -1)
        reals = {name: _apart(leaves[position].astype(jnp.float32), free[name]) for position, name in plain}
        return jnp.sum(jnp.logical_not(same), dtype=jnp.int32), reals, distances

    runs = _Runs(graph)
    totals: dict[str, np.ndarray] = {node.name: np.zeros(5, np.int64) for node in named}
    numbers: dict[str, tuple[int, int, float]] = {name: (0, 0, 0.0) for _, name in plain}
    most_apart = np.zeros(len(measured))
    sums: list[Any] = [0.0 for _ in measured]
    clipped = _Clipped(graph)
    examples, predictions, predicted = 0, 0, 0
    first: tuple[Any, ...] = ()
    shapes: dict[int, dict[str, Sizes]] = {}
    for batch in batches:
        arrays, _ = split_arguments(batch)
        output, codes = reference(*batch)
        _check_shapes(ir, codes)
        if not first:
            first = batch
            _check_names(ir, codes, functools.partial(converted, batch))
        quantized = graph.quantize(*batch)
        clipped.count(inputs_of(ir, batch))
        free, counts = runs(quantized if isinstance(quantized, tuple) else (quantized,), codes)
        wrong, reals, distances = summed(outputs_of(ir, output), free)
        size = next(int(np.shape(array)[0]) for array in arrays if np.ndim(array))
        examples += size
        predictions += int(wrong)
        rows = batch_of(ir, quantized if isinstance(quantized, tuple) else (quantized,))
        if rows not in shapes:
            shapes[rows] = shapes_at(ir, rows)
        predicted += int(np.prod(shapes[rows][ir.outputs[0]][:-1]))
        for index, (most, squares) in enumerate(distances):
            most_apart[index] = max(most_apart[index], float(most))
            sums[index] = sums[index] + np.asarray(squares, np.float64)
        for name, (count, differ, most) in numbers.items():
            size_of, differs, by = reals[name]
            numbers[name] = count + int(size_of), differ + int(differs), max(most, float(by))
        for node in named:
            local, local_max, whole, whole_max = counts[node.name]
            t = totals[node.name]
            t[0] += int(np.prod(shapes[rows][node.output]))
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
        OutputReport(name, float(most), *(tuple(row.tolist()) for row in squares))
        for (_, name), most, squares in zip(measured, most_apart, sums, strict=True)
    )
    report = Report(
        reports,
        examples,
        predictions,
        found,
        predicted,
        outputs,
        graph.target,
        trained_for,
        inputs=clipped.reports(),
        uncalibrated=tuple(ir.metadata.get(UNCALIBRATED, ())),
    )
    now = None if report.exact else converted(first)
    return report if now is None else report.against(first_difference(ir, now))


def _check_shapes(ir: Graph, codes: Mapping[str, Any]) -> None:
    """Raise ValueError where a tensor of the graph cannot be the model's tensor with the same name."""
    for label in codes:
        if label not in ir.tensors:
            continue
        shape, own = np.shape(codes[label]), ir.tensors[label].shape
        if len(shape) != len(own) or any(n is not None and n != m for n, m in zip(own, shape, strict=False)):
            raise ValueError(
                f"verify: expected the graph of this model, got one whose tensor {label!r} has the shape {own}, where "
                f"the model's has {shape}. Convert the model again."
            )


def _check_names(ir: Graph, codes: Mapping[str, Any], converted: Callable[[], Graph | None]) -> None:
    """Raise ValueError where codes of the model have no counterpart: tensors are matched by their names.

    converted: makes the graph of the model as it is now. It leaves out what nothing reads, for instance an additive
    mask that every softmax applies as a selection instead.
    """
    missing = _missing(ir, codes)
    if missing:
        try:
            now = converted()
        except ConversionError:
            # The graph of another model may have a state that this one does not have.
            now = None
        missing = missing if now is None else [label for label in missing if label not in _missing(now, codes)]
    if missing:
        raise ValueError(
            f"verify: expected the graph of this model, got one with no tensor for {len(missing)} of the model's "
            f"{len(codes)}, such as {missing[0]!r}. verify matches tensors by their names. Convert the model again; to "
            "compare two graphs, use qjax.compare."
        )


def _missing(ir: Graph, codes: Mapping[str, Any]) -> list[str]:
    """The tensors of the model that neither a graph nor a device kernel inside it has."""
    fused = [node for node in ir.nodes if node.op == backend.NAME]
    known = {*ir.tensors, *(m.tensor for node in fused for m in backend.members_of(node.attributes).values())}
    # A graph has either a tensor of a loop for each iteration, or one for all of them.
    return [x for x in codes if not known & {x, f"{x}[0]", x.rpartition("[")[0]}]


class _Runs:
    """Runs a graph in both ways, node by node; equal nodes are compiled once, and shared with `compare`."""

    def __init__(self, graph: IntegerGraph) -> None:
        self.ir = graph.ir
        self.runner = Runner(graph.ir, "", graph.interpreter.constants)
        # If there are float tensors, a node that is compiled alone may round differently than in the whole graph.
        floats = any(tensor.dtype == REAL_DTYPE and tensor.value is None for tensor in graph.ir.tensors.values())
        self.whole = jax.jit(functools.partial(run, graph.ir)) if floats else None
        self.constants = graph.interpreter.constants

    def __call__(
        self, inputs: Sequence[Any], codes: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """The graph's outputs; and for each node how many codes differ, and by how much at most.

        Two counts and two distances: on the training forward's own inputs, then when run from the graph's inputs.
        """
        ir, left = self.ir, self.runner.readers()
        free: dict[str, Any] = {**dict(zip(ir.inputs, inputs, strict=True)), **self.runner.data}
        forced = dict(free)
        whole = None if self.whole is None else self.whole(self.constants, list(inputs))
        counts: dict[str, tuple[int, ...]] = {}
        for node in ir.nodes:
            got = self.runner.output(node, [jnp.asarray(forced[name]) for name in node.inputs])
            if whole is not None:
                own = whole[node.output]
            elif all(forced[name] is free[name] for name in node.inputs):
                own = got
            else:
                own = self.runner.output(node, [jnp.asarray(free[name]) for name in node.inputs])
            wanted = codes.get(node.output)
            # A node that only moves codes has no quantizer, so its expected codes follow from its inputs.
            counts[node.name] = _counts(got, own, got if wanted is None else wanted)
            free[node.output] = own
            if wanted is None:
                forced[node.output] = got
            else:
                # As long as nothing differs, keep the same array, so that the next node needs to run only once.
                forced[node.output] = own if counts[node.name][2] == 0 else wanted.astype(got.dtype)
            for name in node.inputs:
                left[name] -= 1
                if left[name] == 0 and name not in self.runner.data:
                    del free[name], forced[name]
        return {name: free[name] for name in ir.outputs}, counts


def _counts(got: jax.Array, free: jax.Array, wanted: jax.Array) -> tuple[int, ...]:
    """Count in numpy, because compiled counts would be one more program for every shape."""
    expected = np.asarray(wanted).astype(np.int32)
    local = _differences(got, expected)
    return *local, *(local if free is got else _differences(free, expected))


def _differences(codes: jax.Array, expected: np.ndarray) -> tuple[int, int]:
    """How many codes differ, and by how much at most."""
    found = np.asarray(codes).astype(np.int32)
    if np.array_equal(found, expected):
        return 0, 0
    distances = np.abs(found - expected)
    return int(np.count_nonzero(distances)), int(np.max(distances, initial=0))


def _apart(a: jax.Array, b: jax.Array) -> tuple[Any, Any, Any]:
    """The number of elements, how many differ (NaN equals itself), and the greatest difference."""
    differs = jnp.logical_not((a == b) | (jnp.isnan(a) & jnp.isnan(b)))
    most = jnp.max(jnp.where(differs, jnp.abs(a - b), jnp.zeros_like(a)), initial=0)
    return a.size, jnp.sum(differs, dtype=jnp.int32), most


def _distance(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greatest absolute difference, and per channel the sums of squares of the difference and of a, [2, n]."""
    rows = [jnp.reshape(x, (-1, x.shape[-1] if x.ndim > 1 else 1)) for x in (a - b, a)]
    return jnp.max(jnp.abs(a - b), initial=0), jnp.stack([jnp.sum(jnp.square(x), axis=0) for x in rows])


class _Clipped:
    """Counts the numbers of each input that lie more than half a step from every code."""

    def __init__(self, graph: IntegerGraph) -> None:
        self.ir = graph.ir
        self.counts = {name: np.zeros(2, np.int64) for name in graph.ir.inputs if graph.ir.tensors[name].quantization}
        self.ends = dict.fromkeys(self.counts, (np.inf, -np.inf))

    def count(self, inputs: Sequence[Any]) -> None:
        for name, array in zip(self.ir.inputs, inputs, strict=True):
            x = np.asarray(array)
            if name in self.counts and x.size and jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(np.float64)
                least, greatest, half = self._range(name)
                outside = np.count_nonzero((x < least - half) | (x > greatest + half))
                self.counts[name] += np.asarray([x.size, outside], np.int64)
                low, high = self.ends[name]
                self.ends[name] = min(low, float(x.min())), max(high, float(x.max()))

    def _range(self, name: str) -> tuple[float, float, float]:
        """The least and the greatest number that has a code, and half a step."""
        q = self.ir.tensors[name].quantization
        assert q is not None
        scale = float(np.max(np.asarray(q.scale)))
        zero_point = float(np.ravel(np.asarray(q.zero_point))[0])
        return (q.qmin - zero_point) * scale, (q.qmax - zero_point) * scale, scale / 2

    def reports(self) -> tuple[InputReport, ...]:
        return tuple(
            InputReport(name, int(count[0]), int(count[1]), *self.ends[name], *self._range(name)[:2])
            for name, count in self.counts.items()
        )
