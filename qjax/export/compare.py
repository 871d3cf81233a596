"""Compares two graphs of one model node by node: where they diverge first, by how much, and why.

Two targets make two graphs of one model. Per node three questions: on *the same* input codes, which outputs differ
(what arises here)? Which differ because the inputs do (what arrives)? And which differ when each graph is run from its
inputs? The outputs of the first kind are then explained one by one, see `causes`.

Nodes run one at a time, each jitted by itself, and tensors are dropped behind their last reader: the peak is that of
two forwards, not of all activations.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.export.causes import Finding, Key, Side, classify, differing_fields, explain, findings, summary
from qjax.export.comparison import Cause, Comparison, Difference, NodeComparison
from qjax.export.exact_values import Ratio, compare_halves
from qjax.export.integer_graph import IntegerGraph, quantize_inputs
from qjax.export.interpreter import attributes, check_count, check_shapes, prepare
from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.export.methods import QUANTIZATIONS
from qjax.export.probe import accumulators

AnyGraph = IntegerGraph | Graph
_NOTHING = Difference()


def compare(a: AnyGraph, b: AnyGraph, inputs: Any) -> Comparison:
    """Run both graphs on the same inputs and say where, by how much and why their codes differ.

    The graphs come from one model: `qjax.convert(qmodel, sample, target=...)` under two targets, a graph and its edited
    copy, or two states of one model. Nodes are paired by name; a node that only one graph has is listed.

    Args:
      a: the graph to compare with; differences are `b - a`.
      b: the other one.
      inputs: one batch, an array or a tuple with one array per input; or an iterable of such batches. Reals are
        quantized by each graph in its own way, which is compared too. Integer arrays of the inputs' dtype are codes,
        and both graphs get the same ones.

    Returns:
      A `Comparison`; `str()` is a table and sentences.

    Raises:
      TypeError: not two graphs, or inputs of another dtype.
      ValueError: graphs of different models (other inputs, outputs, or shapes of a node), or no batch.
    """
    left, right = _ir(a), _ir(b)
    labels = (left.target, right.target) if left.target != right.target else ("a", "b")
    run = _Run(_Graph(left, labels[0], _constants(a)), _Graph(right, labels[1], _constants(b)))
    for batch in _batches(inputs):
        run.batch(batch)
    if run.examples == 0:
        raise ValueError("compare: expected at least one batch, got none.")
    return run.result()


def _ir(graph: Any) -> Graph:
    ir = graph.ir if isinstance(graph, IntegerGraph) else graph
    if not isinstance(ir, Graph):
        raise TypeError(f"compare: expected two graphs from qjax.convert, got {type(graph).__name__}.")
    return ir


def _constants(graph: AnyGraph) -> Mapping[str, Mapping[str, Any]]:
    return graph.interpreter.constants if isinstance(graph, IntegerGraph) else jax.device_put(prepare(graph))


def _batches(inputs: Any) -> Iterable[tuple[Any, ...]]:
    if hasattr(inputs, "shape"):
        return [(inputs,)]
    if isinstance(inputs, tuple):
        return [cast(tuple[Any, ...], inputs)]
    if not isinstance(inputs, Iterable):
        raise TypeError(
            f"compare: expected an array, a tuple of arrays, or an iterable of batches, got {type(inputs).__name__}."
        )
    batches = cast(Iterable[Any], inputs)
    return (cast(tuple[Any, ...], batch) if isinstance(batch, tuple) else (batch,) for batch in batches)


@functools.lru_cache(maxsize=1024)
def _jitted(what: Literal["output", "accumulators"], op: str, attributes_json: str) -> Callable[..., Any]:
    """A node's kernel, or what it has before it rounds; compiled once for all nodes that differ in constants only."""
    facts = json.loads(attributes_json)
    function = ops.get(op).kernel if what == "output" else functools.partial(accumulators, op)

    def apply(constants: Any, inputs: Any) -> Any:
        return function(facts, constants, inputs)

    return jax.jit(apply)


class _Graph:
    """One of the two graphs, and its nodes as jitted functions."""

    def __init__(self, ir: Graph, label: str, constants: Mapping[str, Mapping[str, Any]]) -> None:
        self.ir, self.label, self.constants = ir, label, constants
        self.nodes = {node.name: node for node in ir.nodes}
        self.data = {tensor.name: tensor.value for tensor in ir.constants()}

    def output(self, node: Node, inputs: Sequence[Any]) -> jax.Array:
        """The node on codes."""
        return self._run("output", node, inputs)

    def accumulators(self, node: Node, inputs: Sequence[Any]) -> list[np.ndarray]:
        """What the node has before it rounds."""
        return [np.asarray(array) for array in self._run("accumulators", node, inputs)]

    def _run(self, what: Literal["output", "accumulators"], node: Node, inputs: Sequence[Any]) -> Any:
        facts = json.dumps(attributes(self.ir, node), sort_keys=True)
        return _jitted(what, node.op, facts)(self.constants[node.name], list(inputs))

    def readers(self) -> Counter[str]:
        """How often a run reads each tensor: once per node and input, and once more for an output of the graph."""
        return Counter([name for node in self.ir.nodes for name in node.inputs] + [*self.ir.outputs])


class _Env:
    """The tensors of one run of one graph; each is dropped behind its last reader."""

    def __init__(self, graph: _Graph, inputs: Sequence[Any]) -> None:
        self.graph = graph
        self.values: dict[str, Any] = dict(zip(graph.ir.inputs, inputs, strict=True))
        self.left = graph.readers()
        self.done: set[str] = set()

    def value(self, name: str) -> Any:
        """A tensor's codes, computed with whatever they need."""
        if name in self.graph.data:
            return jnp.asarray(self.graph.data[name])
        if name not in self.values:
            node = self.graph.ir.producer(name)
            assert node is not None
            self.compute(node)
        return self.values[name]

    def compute(self, node: Node) -> Any:
        """The codes of a node's output."""
        if node.name not in self.done:
            self.values[node.output] = self.graph.output(node, [self.value(name) for name in node.inputs])
            self.done.add(node.name)
        return self.values[node.output]

    def release(self, node: Node) -> None:
        """The node's inputs have been read."""
        for name in node.inputs:
            self.left[name] -= 1
            if self.left[name] == 0:
                self.values.pop(name, None)


class _Tally:
    """The counts of one node over all batches."""

    def __init__(self) -> None:
        self.own = self.arriving = self.end_to_end = _NOTHING
        self.kinds: Counter[Key] = Counter()


class _Run:
    """Both graphs, paired, and what was counted so far."""

    def __init__(self, a: _Graph, b: _Graph) -> None:
        self.a, self.b = a, b
        _check_signature(a, b)
        self.paired = [name for name in a.nodes if name in b.nodes]
        _check_pairs(a, b, self.paired)
        self.tallies = {name: _Tally() for name in self.paired}
        self.inputs = {name: _Tally() for name in a.ir.inputs if a.ir.tensors[name].quantization is not None}
        self.reals = False
        self.outputs = [_Tally() for _ in a.ir.outputs]
        self.examples = 0
        self.predictions = 0

    def batch(self, batch: tuple[Any, ...]) -> None:
        """Run one batch through both."""
        codes = self._codes(batch)
        self.examples += int(codes[0][0].shape[0])
        env_a, env_b = _Env(self.a, codes[0]), _Env(self.b, codes[1])
        for node in self.a.ir.nodes:
            out = env_a.compute(node)
            other = self.b.nodes.get(node.name)
            if other is not None:
                self._pair(node, other, env_a, env_b, out)
                env_b.release(other)
            env_a.release(node)
        pairs = zip(self.a.ir.outputs, self.b.ir.outputs, strict=True)
        ends = [(np.asarray(env_a.value(left)), np.asarray(env_b.value(right))) for left, right in pairs]
        for tally, end in zip(self.outputs, ends, strict=True):
            tally.end_to_end += Difference.of(*end)
        left, right = (np.argmax(end, axis=-1) for end in ends[0])
        self.predictions += int(np.sum(left != right))

    def _pair(self, node: Node, other: Node, env_a: _Env, env_b: _Env, out: Any) -> None:
        theirs = env_b.compute(other)
        # b's node on a's codes; constants stay b's own
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
        check_count(ir, batch)
        check_shapes(ir, [tuple(np.shape(x)) for x in batch])
        reals: list[Any] = []
        for name, x in zip(ir.inputs, batch, strict=True):
            tensor, x = ir.tensors[name], jnp.asarray(x)
            if (
                tensor.quantization is not None
                and not jnp.issubdtype(x.dtype, jnp.floating)
                and x.dtype != tensor.dtype
            ):
                raise TypeError(
                    f"compare: input {name!r} takes reals, or codes of dtype {tensor.dtype}; got {x.dtype}. "
                    "graph.quantize(x) makes codes from reals."
                )
            reals.append(x)
        left, right = _Inputs(self.a, reals).codes, _Inputs(self.b, reals).codes
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
            grids = _grids(self.a.ir.tensors[name], self.b.ir.tensors[name])
            tally.kinds.update(_classify_input(grids, x, mine, theirs))

    # ------------------------------------------------------------------------ the report

    def result(self) -> Comparison:
        """Everything counted, in words."""
        nodes = [self._input(name, tally) for name, tally in self.inputs.items() if tally.own.compared]
        nodes += [self._node(name) for name in self.paired]
        named = {self.a.nodes[node.name].output: node for node in nodes if node.name in self.a.nodes}
        outputs: list[NodeComparison] = []
        for name, tally in zip(self.a.ir.outputs, self.outputs, strict=True):
            known = named.get(name)
            end = tally.end_to_end
            outputs.append(known or NodeComparison(name, "output", None, _NOTHING, _NOTHING, end))
        return Comparison(
            (self.a.label, self.b.label),
            tuple(nodes),
            tuple(name for name in self.a.nodes if name not in self.b.nodes),
            tuple(name for name in self.b.nodes if name not in self.a.nodes),
            tuple(outputs),
            self.examples,
            self.predictions,
        )

    def _node(self, name: str) -> NodeComparison:
        a, b = self._sides(name)
        tally, found = self.tallies[name], findings(a, b)
        causes = tuple(
            Cause(kind, side, n, explain((kind, side), n, a, b, tally.own.compared))
            for (kind, side), n in summary(tally.kinds).items()
        )
        return _described(name, a.node.op, a.node.location, tally, found, causes, (a.label, b.label))

    def _input(self, name: str, tally: _Tally) -> NodeComparison:
        a, b = self.a, self.b
        found: list[Finding] = []
        if a.ir.quantization != b.ir.quantization:
            texts = [f"{g.label} {QUANTIZATIONS[g.ir.quantization]} ({g.ir.quantization})" for g in (a, b)]
            found.append(Finding("method", "; ".join(texts)))
        grids = _grids(a.ir.tensors[name], b.ir.tensors[name])
        found += [Finding("grid", f"{what} of {name!r} differ here") for what in differing_fields(*grids)]
        causes = tuple(
            Cause(kind, side, n, _INPUT_TEXTS[kind].format(n=f"{n:,}"))
            for (kind, side), n in summary(tally.kinds).items()
        )
        return _described(name, "quantize", None, tally, found, causes, (a.label, b.label))


_INPUT_TEXTS = {
    "tie": "exact ties of x / s: {n}",
    "float32": "values so near a tie that the float32 steps of one of the two carry them onto or over it: {n}",
    "grid": "because the grids differ: {n}",
    "other": "values that are not finite: {n}",
}


def _described(
    name: str,
    op: str,
    location: str | None,
    tally: _Tally,
    found: list[Finding],
    causes: tuple[Cause, ...],
    labels: tuple[str, str],
) -> NodeComparison:
    off = (tally.kinds["off", "a"], tally.kinds["off", "b"])
    measured, sums = tally.kinds["measured", ""], tally.kinds["sums", ""]
    own, text = tally.own, ""
    if own.count:
        word = "input" if op == "quantize" else "node"
        # a file and its folder tell enough; `location` has the whole path
        short = "/".join(PurePath(location).parts[-2:]) if location else ""
        place = f" ({op}, {short})" if short else f" ({op})"
        verb = "differs" if own.count == 1 else "differ"
        text = f"{word} {name}{place}: {own.count:,} of {own.compared:,} {verb}, {own.direction}"
        kinds = {cause.kind for cause in causes}
        # the last bits of scales differ wherever one of them is a float32: said only where they decide
        said = [f.text for f in found if f.kind != "scale" or "scale" in kinds]
        if said:
            text += ". " + "; ".join(said)
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


class _Inputs:
    """The codes that one graph makes of a batch; codes pass as they are."""

    def __init__(self, graph: _Graph, batch: Sequence[Any]) -> None:
        ir = graph.ir
        self.codes: list[Any] = []
        for name, x in zip(ir.inputs, batch, strict=True):
            codes = ir.tensors[name].quantization is not None and not jnp.issubdtype(x.dtype, jnp.floating)
            alone = ir.replace(inputs=(name,))
            self.codes.append(x if codes else quantize_inputs(alone, [x])[0])


def _grids(a: Tensor, b: Tensor) -> tuple[Quantization, Quantization]:
    assert a.quantization is not None
    assert b.quantization is not None
    return a.quantization, b.quantization


def _classify_input(
    grids: tuple[Quantization, Quantization], x: np.ndarray, mine: np.ndarray, theirs: np.ndarray
) -> Counter[Key]:
    """Why codes of real inputs differ: the exact quotient x / s is a tie, or float32 steps decide."""
    mask = mine != theirs
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


# ---------------------------------------------------------------------------- one model in two graphs


def _check_signature(a: _Graph, b: _Graph) -> None:
    left, right = a.ir, b.ir
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


def _check_pairs(a: _Graph, b: _Graph, paired: Sequence[str]) -> None:
    if a.nodes and not paired:
        raise ValueError(
            "compare: the graphs have no node in common: they come from different models. "
            f"a has {', '.join(list(a.nodes)[:4])}, ...; b has {', '.join(list(b.nodes)[:4])}, ..."
        )
    problems: list[str] = []
    for name in paired:
        mine, theirs = a.nodes[name], b.nodes[name]
        if mine.op != theirs.op or len(mine.inputs) != len(theirs.inputs):
            what = [f"{node.op} of {len(node.inputs)} tensors" for node in (mine, theirs)]
            problems.append(f"node {name!r} is {what[0]} in a, {what[1]} in b")
            continue
        tensors = zip((*mine.inputs, mine.output), (*theirs.inputs, theirs.output), strict=True)
        for left, right in tensors:
            problems += _problems(a.ir.tensors[left], b.ir.tensors[right])
    _raise_for(problems)


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
