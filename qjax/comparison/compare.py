"""Compares two graphs of one model node by node: where they diverge first, by how much, and why.

Two targets make two graphs of one model. For each node there are three questions. Which outputs differ on *the same*
input codes (what arises here)? Which differ because the inputs do (what arrives)? Which differ when each graph runs
from its own inputs? The outputs of the first kind are then explained one by one, see `causes`.

Nodes run one at a time, each jitted by itself, and tensors are dropped after their last reader, so the peak of memory
is that of two forwards, not of all activations.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.assign.partition import device_of, group_like
from qjax.comparison.causes import Key, Side, classify, differing_fields, explain, findings, summary
from qjax.comparison.exact_values import Ratio, compare_halves
from qjax.comparison.findings import Finding
from qjax.comparison.result import Cause, Comparison, Difference, NodeComparison
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.kernels import prepare
from qjax.graph.node_view import NodeView
from qjax.graph.rounding_phrases import QUANTIZATIONS
from qjax.run.interpreter import check_shapes
from qjax.run.quantize_io import inputs_of, quantize_inputs
from qjax.run.stepwise import Env, Runner
from qjax.support.batches import Batches, Inputs, brief
from qjax.support.progress import track
from qjax.support.transfers import with_transfers

# ----------------------------------------------------------------------------------------------------------------------
# Checks that two graphs are two conversions of one model, and pairs their nodes.


def check_signature(left: Graph, right: Graph) -> None:
    """Raise a ValueError unless both graphs have the same inputs and outputs."""
    if left.inputs != right.inputs or len(left.outputs) != len(right.outputs):
        raise ValueError(
            f"compare: the graphs come from different models: inputs {', '.join(left.inputs)} and {len(left.outputs)} "
            f"outputs against inputs {', '.join(right.inputs)} and {len(right.outputs)} outputs. Convert one model "
            "under two targets: qjax.convert(qmodel, sample, target=...)."
        )
    problems = [text for name in left.inputs for text in _problems(left.tensors[name], right.tensors[name])]
    for mine, theirs in zip(left.outputs, right.outputs, strict=True):
        problems += _problems(left.tensors[mine], right.tensors[theirs])
    _raise_for(problems)


def pairs(a: Graph, b: Graph) -> dict[str, tuple[Node, Node]]:
    """The nodes in both graphs by name, in a's order; a ValueError unless the two of each pair have one form."""
    others = {node.name: node for node in b.nodes}
    paired = {node.name: (node, others[node.name]) for node in a.nodes if node.name in others}
    if a.nodes and not paired:
        raise ValueError(
            "compare: expected two graphs of one model, got graphs without a common node: "
            f"a has {_first(a)}, ...; b has {_first(b)}, ..."
        )
    problems: list[str] = []
    for name, (mine, theirs) in paired.items():
        if mine.op != theirs.op or len(mine.inputs) != len(theirs.inputs):
            what = [f"{node.op} of {len(node.inputs)} tensors" for node in (mine, theirs)]
            problems.append(f"node {name!r} is {what[0]} in a, {what[1]} in b")
            continue
        tensors = zip((*mine.inputs, mine.output), (*theirs.inputs, theirs.output), strict=True)
        for left, right in tensors:
            problems += _problems(a.tensors[left], b.tensors[right])
    _raise_for(problems)
    return paired


def _first(graph: Graph) -> str:
    return ", ".join(node.name for node in graph.nodes[:4])


def _problems(a: Tensor, b: Tensor) -> list[str]:
    if (a.shape, a.dtype) == (b.shape, b.dtype):
        return []
    return [f"{a.name!r} is {a.dtype} {_shape(a)} in a, {b.dtype} {_shape(b)} in b"]


def _shape(tensor: Tensor) -> str:
    return "x".join("batch" if n is None else str(n) for n in tensor.shape)


def _raise_for(problems: list[str]) -> None:
    unique = list(dict.fromkeys(problems))
    if unique:
        more = f", and {len(unique) - 4} more" if len(unique) > 4 else ""
        raise ValueError(
            "compare: expected two graphs of one model, with the same shapes and types of codes; "
            f"{'; '.join(unique[:4])}{more}. Convert one quantized model under two targets: "
            "qjax.convert(qmodel, sample, target=...)."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Compares how two graphs quantize their float inputs, and explains why the codes differ.

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


class Tally:
    """The counts of one node over all batches."""

    def __init__(self) -> None:
        self.own = self.arriving = self.end_to_end = Difference()
        self.kinds: Counter[Key] = Counter()


def described(
    what: str,
    name: str,
    op: str,
    location: str | None,
    tally: Tally,
    found: list[Finding],
    causes: tuple[Cause, ...],
    labels: tuple[str, str],
) -> NodeComparison:
    """One node with its counts in a sentence; what: "node", or "input" for the codes computed from an input."""
    off = (tally.kinds["off", "a"], tally.kinds["off", "b"])
    measured, sums = tally.kinds["measured", ""], tally.kinds["sums", ""]
    own, text = tally.own, ""
    if own.count:
        # Show the file and its folder only; `location` has the whole path.
        short = "/".join(PurePath(location).parts[-2:]) if location else ""
        place = f" ({op}, {short})" if short else f" ({op})"
        verb = "differs" if own.count == 1 else "differ"
        subject = name if name == what else f"{what} {name}"
        text = f"{subject}{place}: {own.count:,} of {own.compared:,} {verb}, {own.direction}"
        kinds = {cause.kind for cause in causes}
        # Scales differ in their last bits whenever one is rounded to float32, so mention them only if they cause a
        # difference.
        said = [f.text for f in found if f.kind != "scale" or "scale" in kinds]
        if said:
            clauses = "; ".join(said)
            # A clause may begin with the name of a target, which must not be capitalised.
            text += ". " + (clauses[0].upper() + clauses[1:] if clauses.startswith(("the ", "only ")) else clauses)
        if causes:
            text += ". " + "; ".join(cause.text for cause in causes)
        if sums:
            text += f". {sums:,} of the {own.compared:,} accumulators differ"
        if any(off):
            text += (
                f". Not the code nearest to the real value: {off[0]:,} of {labels[0]}'s, {off[1]:,} of {labels[1]}'s"
            )
        text += "."
    return NodeComparison(
        name, op, location, own, tally.arriving, tally.end_to_end, causes, tuple(found), sums, off, measured, text
    )


AnyGraph = IntegerGraph | Graph
_NOTHING = Difference()


@with_transfers
def compare(a: AnyGraph, b: AnyGraph, batches: Iterable[Any], *, inputs: Inputs | None = None) -> Comparison:
    """Run both graphs on the same inputs and report where, by how much and why their codes differ.

    The graphs must come from one model: `qjax.convert(qmodel, sample, target=...)` under two targets, a graph and its
    edited copy, or two states of one model. Nodes are paired by name; a node in only one of the graphs is listed.

    Args:
      a: the graph to compare with; differences are `b - a`.
      b: the other graph.
      batches: a list of arrays, or of tuples with one array per input; with `inputs`, a list of anything. Each graph
        quantizes floats in its own way, which is compared too. Integer arrays of the inputs' dtype are codes, which
        both graphs use as they are.
      inputs: picks the graphs' inputs out of a batch.

    Returns:
      A `Comparison`; its `str()` is a table and sentences.

    Raises:
      TypeError: these are not two graphs, or inputs have another dtype.
      ValueError: the graphs belong to different models (other inputs, outputs, or shapes of a node), or there is no
        batch.

    Examples:
      ```python
      other = qjax.convert(qmodel, x, target="onnxruntime")
      # the first node that differs, by how much and why
      print(qjax.compare(graph, other, batches))
      ```
    """
    left, right, given = _ir(a), _ir(b), Batches(batches, inputs, "compare")
    names = device_of(left), device_of(right)
    labels = names if names[0] != names[1] else ("a", "b")
    # If one graph is for a device with fused kernels, fuse the nodes of the other one into the same groups.
    joined = group_like(left, right), group_like(right, left)
    constants = [
        _constants(g if same is whole else same) for g, whole, same in zip((a, b), (left, right), joined, strict=True)
    ]
    run = _Run(*(Runner(*side) for side in zip(joined, labels, constants, strict=True)))
    for _, args in track(given, f"compare: {len(left.nodes)} nodes, batch", compiles=True):
        run.batch(args)
    if run.examples == 0:
        raise ValueError("compare: expected at least one batch with an example, got none.")
    return run.result()


def _ir(graph: Any) -> Graph:
    ir = graph.ir if isinstance(graph, IntegerGraph) else graph
    if not isinstance(ir, Graph):
        raise TypeError(f"compare: expected two graphs from qjax.convert, got {brief(graph)}.")
    return ir


def _constants(graph: AnyGraph) -> Mapping[str, Mapping[str, Any]]:
    return graph.interpreter.constants if isinstance(graph, IntegerGraph) else jax.device_put(prepare(graph))


def _kind(a: Side, b: Side) -> str:
    """The kind of a pair: its operation, or the vendor's kernel in either of the graphs."""
    kinds = [NodeView(side.graph, side.node).kind for side in (a, b)]
    return kinds[1] if kinds[0].startswith("fused:") else kinds[0]


class _Run:
    """Both graphs, paired, and the counts so far."""

    def __init__(self, a: Runner, b: Runner) -> None:
        self.a, self.b = a, b
        self.labels = (a.label, b.label)
        check_signature(a.ir, b.ir)
        self.paired = pairs(a.ir, b.ir)
        self.tallies = {name: Tally() for name in self.paired}
        self.inputs = {name: Tally() for name in a.ir.inputs if a.ir.tensors[name].quantization is not None}
        self.outputs = [Tally() for _ in a.ir.outputs]
        self.examples = 0
        self.predictions = 0

    def batch(self, batch: tuple[Any, ...]) -> None:
        """Run one batch through both graphs."""
        codes = self._codes(batch)
        self.examples += int(codes[0][0].shape[0])
        env_a, env_b = Env(self.a, codes[0]), Env(self.b, codes[1])
        for node in self.a.ir.nodes:
            out = env_a.compute(node)
            if node.name in self.paired:
                _, other = self.paired[node.name]
                self._pair(node, other, env_a, env_b, out)
                env_b.release(other)
            env_a.release(node)
        pairs = zip(self.a.ir.outputs, self.b.ir.outputs, strict=True)
        ends = [(np.asarray(env_a.value(left)), np.asarray(env_b.value(right))) for left, right in pairs]
        for tally, end in zip(self.outputs, ends, strict=True):
            tally.end_to_end += Difference.of(*end)
        left, right = (np.argmax(end, axis=-1) for end in ends[0])
        self.predictions += int(np.sum(left != right))

    def _pair(self, node: Node, other: Node, env_a: Env, env_b: Env, out: Any) -> None:
        theirs = env_b.compute(other)
        # Run b's node, with b's constants, on a's codes.
        shared = [
            env_b.value(name) if name in self.b.data else env_a.value(mine)
            for mine, name in zip(node.inputs, other.inputs, strict=True)
        ]
        local = np.asarray(self.b.output(other, shared))
        mine, whole = np.asarray(out), np.asarray(theirs)
        tally, own = self.tallies[node.name], Difference.of(mine, local)
        tally.own += own
        tally.arriving += Difference.of(local, whole)
        tally.end_to_end += Difference.of(mine, whole)
        if own.count:
            sums = (
                self.a.accumulators(node, [env_a.value(name) for name in node.inputs]),
                self.b.accumulators(other, shared),
            )
            tally.kinds.update(classify(*self._sides(node.name), sums, (mine, local)))

    def _sides(self, name: str) -> tuple[Side, Side]:
        a, b = self.a, self.b
        return Side(a.ir, a.nodes[name], a.label), Side(b.ir, b.nodes[name], b.label)

    def _codes(self, batch: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        ir = self.a.ir
        arrays = inputs_of(ir, batch)
        check_shapes(ir, [tuple(np.shape(x)) for x in arrays])
        reals: list[Any] = []
        for name, x in zip(ir.inputs, arrays, strict=True):
            tensor, x = ir.tensors[name], jnp.asarray(x)
            if (
                tensor.quantization is not None
                and not jnp.issubdtype(x.dtype, jnp.floating)
                and x.dtype != tensor.dtype
            ):
                raise TypeError(
                    f"compare: input {name!r}: expected floats, or codes of dtype {tensor.dtype}, got {x.dtype}. "
                    "graph.quantize(x) makes codes from floats."
                )
            reals.append(x)
        left, right = input_codes(self.a.ir, reals), input_codes(self.b.ir, reals)
        for name, x, mine, theirs in zip(ir.inputs, reals, left, right, strict=True):
            if name in self.inputs and jnp.issubdtype(x.dtype, jnp.floating):
                self._compare_input(name, np.asarray(x), np.asarray(mine), np.asarray(theirs))
        return left, right

    def _compare_input(self, name: str, x: np.ndarray, mine: np.ndarray, theirs: np.ndarray) -> None:
        tally, own = self.inputs[name], Difference.of(mine, theirs)
        tally.own += own
        tally.end_to_end += own
        tally.arriving += Difference(own.compared)
        if own.count:
            tally.kinds.update(classify_input(name, (self.a, self.b), x, mine, theirs))

    def result(self) -> Comparison:
        """Describe all counts in words."""
        nodes = [self._input(name, tally) for name, tally in self.inputs.items() if tally.own.compared]
        nodes += [self._node(name) for name in self.paired]
        named = {self.a.nodes[node.name].output: node for node in nodes if node.name in self.a.nodes}
        outputs: list[NodeComparison] = []
        for name, tally in zip(self.a.ir.outputs, self.outputs, strict=True):
            known = named.get(name)
            end = tally.end_to_end
            outputs.append(known or NodeComparison(name, "output", None, _NOTHING, _NOTHING, end))
        return Comparison(
            self.labels,
            tuple(nodes),
            tuple(name for name in self.a.nodes if name not in self.b.nodes),
            tuple(name for name in self.b.nodes if name not in self.a.nodes),
            tuple(outputs),
            self.examples,
            self.predictions,
        )

    def _node(self, name: str) -> NodeComparison:
        a, b = self._sides(name)
        tally = self.tallies[name]
        causes = tuple(
            Cause(kind, side, n, explain((kind, side), n, a, b, tally.own.compared))
            for (kind, side), n in summary(tally.kinds).items()
        )
        return described("node", name, _kind(a, b), a.node.location, tally, findings(a, b), causes, self.labels)

    def _input(self, name: str, tally: Tally) -> NodeComparison:
        causes = tuple(
            Cause(kind, side, n, INPUT_TEXTS[kind].format(n=f"{n:,}"))
            for (kind, side), n in summary(tally.kinds).items()
        )
        return described(
            "input", name, "quantize", None, tally, input_findings(name, self.a, self.b), causes, self.labels
        )
