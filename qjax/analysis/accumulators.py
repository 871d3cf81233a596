"""Reports how wide the accumulators of a graph must be: for the worst input, and on data.

For each node with weights it lists the bits that the worst input needs, the bits that the data needed, and what a given
register (the node's own, or one to try) does to the sums. The int16 pairs of vpmaddubsw are always reported too,
because FBGEMM, oneDNN and ONNX Runtime use them on a CPU without VNNI, where a graph that is exact here may saturate.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.assign.overflow import bounds, product_bounds
from qjax.export.integer_graph import IntegerGraph
from qjax.graph import kernels
from qjax.graph.ir import Graph, Node
from qjax.numerics.accumulator import EXACT, PAIR_MAX, PAIR_MIN, Accumulator, bits_for, wrap
from qjax.numerics.narrow_sums import pair_sum_events, running_sums, saturating_sum_events
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.ops.facts import ProductFacts
from qjax.ops.narrow_accumulator import Rows
from qjax.run import interpreter
from qjax.support.batches import Batches, Inputs, brief
from qjax.support.progress import track
from qjax.support.tables import Grid, Printed
from qjax.support.transfers import with_transfers

_PAIRS = Accumulator(pairs=True)


@dataclasses.dataclass(frozen=True)
class Observed:
    """Counts and extremes over all batches; the node receives the codes that the graph itself computes.

    sums: number of outputs. low, high, bits: of the finished sums of products, without the bias; partial_low,
    partial_high, partial_bits: including all partial sums. All of these are in unbounded integers.
    overflowed: finished sums that the register cannot hold. saturated: additions that the register, or an int16 pair,
    clamped. changed: finished sums that are wrong in the register. codes_changed: output codes that differ from those
    of exact sums; None where int32 itself cannot hold the exact sums.
    pairs: sums of two neighbouring products. pairs_saturated: those that vpmaddubsw clamps. None where the operands
    have more than 8 bits.
    """

    sums: int
    low: int
    high: int
    partial_low: int
    partial_high: int
    overflowed: int
    saturated: int
    changed: int
    codes_changed: int | None = None
    pairs: int | None = None
    pairs_saturated: int | None = None

    @property
    def bits(self) -> int:
        """The bits that hold every finished sum."""
        return bits_for(self.low, self.high)

    @property
    def partial_bits(self) -> int:
        """The bits that hold every partial sum, which a saturating register needs in order not to saturate."""
        return bits_for(self.partial_low, self.partial_high)


@dataclasses.dataclass(frozen=True)
class NodeAccumulator:
    """The accumulator of one node with weights.

    products: how many are summed. accumulator: the register to which the figures refer.
    low, high: the worst case of the sum of products, over all input codes; it bounds all partial sums too.
    total_low, total_high: the same for the int32 that is rescaled: the register's sum plus the bias.
    weight_pairs: pairs of neighbouring weights; pairs_at_risk: those that vpmaddubsw clamps for some pair of codes.
      None where the operands have more than 8 bits. Signed codes are shifted to unsigned ones by their least code.
    observed: None without data.
    """

    name: str
    op: str
    location: str | None
    products: int
    accumulator: Accumulator
    low: int
    high: int
    total_low: int
    total_high: int
    weight_pairs: int | None
    pairs_at_risk: int | None
    observed: Observed | None

    @property
    def bits(self) -> int:
        """The width that no input can overflow."""
        return bits_for(self.low, self.high)

    @property
    def total_bits(self) -> int:
        """The width that the accumulator with its bias needs in the worst case."""
        return bits_for(self.total_low, self.total_high)

    @property
    def headroom(self) -> int:
        """The bits of the register that no input needs; negative if some input overflows it."""
        return self.accumulator.bits - self.bits


@dataclasses.dataclass(frozen=True)
class AccumulatorReport(Printed):
    """The result of `accumulators`; `str(report)` is a table."""

    nodes: tuple[NodeAccumulator, ...]
    examples: int

    @property
    def bits(self) -> int:
        """The narrowest register that no input can overflow, for all nodes."""
        return max((node.bits for node in self.nodes), default=1)

    @property
    def observed_bits(self) -> int | None:
        """The narrowest register that the data did not overflow, including partial sums; None without data."""
        found = [node.observed.partial_bits for node in self.nodes if node.observed is not None]
        return max(found, default=None)

    def parts(self) -> list[Grid | str]:
        """A table and a summary line."""
        header = ["node", "op", "products", "register", "bits, worst", "headroom", "pairs at risk"]
        if self.examples:
            header += ["observed", "bits", "bits, partial", "overflow", "additions cut", "sums changed"]
            header += ["codes changed", "pairs cut"]
        text = f"no input needs more than {self.bits} bits"
        if self.examples:
            text += f"; {self.examples} examples needed {self.observed_bits}"
        return [Grid(header, [self._row(node) for node in self.nodes]), text]

    def _row(self, node: NodeAccumulator) -> list[Any]:
        risk = "-" if node.weight_pairs is None else f"{node.pairs_at_risk} of {node.weight_pairs}"
        row = [node.name, node.op, node.products, node.accumulator, node.bits, node.headroom, risk]
        seen = node.observed
        if seen is not None:
            row += [f"[{seen.low}, {seen.high}]", seen.bits, seen.partial_bits, seen.overflowed, seen.saturated]
            row += [seen.changed, "-" if seen.codes_changed is None else seen.codes_changed]
            row += ["-" if seen.pairs is None else f"{seen.pairs_saturated} of {seen.pairs}"]
        return row


@with_transfers
def accumulators(
    graph: IntegerGraph,
    batches: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
    accumulator: Accumulator | None = None,
) -> AccumulatorReport:
    """The bits that a graph's accumulators need in the worst case and, given batches, on data.

    Args:
      graph: a graph from `convert` or `load`.
      batches: a list of float arrays, or of tuples of the graph's inputs; with `inputs`, a list of anything.
      inputs: picks the graph's inputs out of a batch.
      accumulator: a register to try on every node; None uses each node's own. It changes the counts, but not the codes
        that flow through the graph.

    Examples:
      ```python
      print(qjax.accumulators(graph).bits)  # of the widest sum, whatever the input
      print(qjax.accumulators(graph, batches))  # a table: worst case and these batches
      ```
    """
    if not isinstance(graph, IntegerGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"accumulators: expected a graph from qjax.convert or qjax.load, got {brief(graph)}. Convert a quantized "
            "model first: qjax.accumulators(qjax.convert(qmodel, sample))."
        )
    ir = graph.ir
    tried = ir if accumulator is None else _with_accumulator(ir, accumulator)
    weighted = [index for index, node in enumerate(ir.nodes) if _has_weight(node)]
    examples, seen = (
        (0, {}) if batches is None else _observe(graph, tried, weighted, Batches(batches, inputs, "accumulators"))
    )
    nodes = tuple(_describe(tried, tried.nodes[index], seen.get(index)) for index in weighted)
    return AccumulatorReport(nodes, examples)


def _has_weight(node: Node) -> bool:
    return isinstance(ops.get(node.op), ProductFacts) and "kernel" in node.constants


def _with_accumulator(graph: Graph, accumulator: Accumulator) -> Graph:
    """The graph with another register in all nodes with weights."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if _has_weight(node):
            attributes = {key: value for key, value in node.attributes.items() if key != "accumulator"}
            if accumulator != EXACT:
                attributes["accumulator"] = accumulator.to_json()
            node = dataclasses.replace(node, attributes=attributes)
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _register(graph: Graph, node: Node) -> Accumulator:
    accumulator = Accumulator.of_json(node.attributes.get("accumulator"))
    return accumulator.on(graph.tensors[node.inputs[0]].dtype, graph.tensors[node.constants["kernel"]].dtype)


def _describe(graph: Graph, node: Node, observed: Observed | None) -> NodeAccumulator:
    register = _register(graph, node)
    products, total = product_bounds(graph, node, stored=register.operands == "codes"), bounds(graph, node)
    assert products is not None
    assert total is not None
    kernel = graph.tensors[node.constants["kernel"]].shape
    kept = [w for _, w in node.attributes["channels"]]
    risk = _pairs_at_risk(graph, node, register)
    return NodeAccumulator(
        name=node.name,
        op=node.op,
        location=node.location,
        products=math.prod(size or 0 for axis, size in enumerate(kernel) if axis not in kept),
        accumulator=register,
        low=int(products[0].min(initial=0)),
        high=int(products[1].max(initial=0)),
        total_low=total[0],
        total_high=total[1],
        weight_pairs=None if risk is None else risk[0],
        pairs_at_risk=None if risk is None else risk[1],
        observed=observed,
    )


# ---------------------------------------------------------------------------- int16 pairs


def _unsigned_shift(graph: Graph, node: Node) -> int | None:
    """The shift that makes a node's codes unsigned; None if vpmaddubsw cannot take its operands."""
    x, kernel = graph.tensors[node.inputs[0]], graph.tensors[node.constants["kernel"]]
    if x.dtype not in ("int8", "uint8") or kernel.dtype != "int8":
        return None
    assert x.quantization is not None
    return min(x.quantization.qmin, 0)


def _rows(graph: Graph, node: Node, constants: Mapping[str, Any], x: Any, accumulator: Accumulator) -> Rows:
    op = ops.get(node.op)
    assert isinstance(op, Dot | Conv)
    return op.rows(kernels.attributes(graph, node), constants, x, accumulator)


def _pairs_at_risk(graph: Graph, node: Node, register: Accumulator) -> tuple[int, int] | None:
    """The number of pairs of weights, and how many of them can saturate."""
    shift, x = _unsigned_shift(graph, node), graph.tensors[node.inputs[0]]
    if shift is None or x.quantization is None:
        return None
    constants = {"kernel": graph.constant(node, "kernel"), "zero_point0": x.quantization.zero_point}
    zeros = jnp.zeros([1 if size is None else size for size in x.shape], x.dtype)
    w = np.asarray(_rows(graph, node, constants, zeros, register if register.pairs else _PAIRS).w).astype(np.int64)
    w = np.concatenate([w, np.zeros((w.shape[0] % 2, *w.shape[1:]), np.int64)])
    low, high = x.quantization.qmin - shift, x.quantization.qmax - shift
    least, most = np.minimum(w * low, w * high), np.maximum(w * low, w * high)
    least, most = least[0::2] + least[1::2], most[0::2] + most[1::2]
    return least.size, int(((least < PAIR_MIN) | (most > PAIR_MAX)).sum())


# ---------------------------------------------------------------------------- data


def _observe(
    graph: IntegerGraph, tried: Graph, weighted: Sequence[int], batches: Batches
) -> tuple[int, dict[int, Observed]]:
    ir, exact = graph.ir, _with_accumulator(tried, EXACT)

    @jax.jit
    def measure(inputs: Sequence[Any], own: Any, other: Any, plain: Any) -> dict[int, dict[str, Any]]:
        env = interpreter.run(ir, own, inputs)
        counts: dict[int, dict[str, Any]] = {}
        for index in weighted:
            node, name = tried.nodes[index], tried.nodes[index].name
            x = jnp.asarray(env[node.inputs[0]])
            fits = _fits_int32(exact, exact.nodes[index], node)
            found = _sums(tried, node, plain[name], x, fits)
            if fits:
                codes = [kernels.run_node(g, g.nodes[index], c[name], [x]) for g, c in ((tried, other), (exact, plain))]
                found["codes_changed"] = _count(codes[0] != codes[1])
            counts[index] = found
        return counts

    constants = (kernels.prepare(ir), kernels.prepare(tried), kernels.prepare(exact))
    totals: dict[int, dict[str, int]] = {}
    examples = 0
    for _, args in track(batches, "accumulators: batch", compiles=True):
        codes = graph.quantize(*args)
        codes = codes if isinstance(codes, tuple) else (codes,)
        size = int(np.shape(codes[0])[0])
        if size == 0:
            continue
        examples += size
        with jax.enable_x64(True):  # counts and wide sums need int64
            counts = jax.device_get(measure(codes, *constants))
        for index, found in counts.items():
            total = totals.setdefault(index, {})
            for key, value in found.items():
                merge = min if key.endswith("low") else max if key.endswith("high") else operator.add
                total[key] = merge(total[key], int(value)) if key in total else int(value)
    if examples == 0:
        raise ValueError("accumulators: expected at least one example, got none. Leave batches out for the worst case.")
    return examples, {index: Observed(**total) for index, total in totals.items()}


def _fits_int32(exact: Graph, node: Node, tried: Node) -> bool:
    """Whether int32 holds the exact sums, and those of the register to try, for every input."""
    stored = Accumulator.of_json(tried.attributes.get("accumulator")).operands == "codes"
    total, products = bounds(exact, node), product_bounds(exact, node, stored=stored)
    assert total is not None
    assert products is not None
    lowest, highest = int(products[0].min(initial=0)), int(products[1].max(initial=0))
    return max(bits_for(*total), bits_for(lowest, highest)) <= 32


def _sums(graph: Graph, node: Node, constants: Mapping[str, Any], x: jax.Array, fits: bool) -> dict[str, Any]:
    """The fields of `Observed` for one node on one batch. x: the codes of its input."""
    register = _register(graph, node)
    zero_point = jnp.asarray(constants["zero_point0"])
    # Sum in the register's own order. Positions outside the image hold the code of zero.
    rows = _rows(graph, node, constants, x, dataclasses.replace(register, padding="zero_point"))
    subtracted = jnp.zeros_like(zero_point) if register.operands == "codes" else zero_point
    total, low, high = running_sums(rows.x, rows.w, subtracted, jnp.int32 if fits else jnp.int64)
    held, saturated = total, jnp.zeros((), jnp.int64)
    if register.overflow == "saturate":
        held, events = saturating_sum_events(rows.x, rows.w, subtracted, register.bits)
        saturated = _count(events)
    elif register.overflow == "wrap":
        held = wrap(total.astype(jnp.int32), register.bits)
    shift = _unsigned_shift(graph, node)
    found: dict[str, Any] = {}
    if shift is not None:
        paired = _rows(graph, node, constants, x, register if register.pairs else _PAIRS)
        pairs, events = pair_sum_events(paired.x, paired.w, np.int32(shift))
        found |= {"pairs": np.int64(-(-paired.x.shape[0] // 2) * total.size), "pairs_saturated": _count(events)}
        if register.pairs:
            saturated = _count(events)
            # Subtract the zero point times all weights at once. For weights that met padding instead of a code it is
            # added back below.
            given = jnp.sum(paired.w, axis=0, dtype=jnp.int32)[:, None, :] * zero_point
            held = paired.restore(pairs - jnp.broadcast_to(given, pairs.shape))
            if paired.outside is not None:
                held = held + jnp.broadcast_to(paired.outside * zero_point, held.shape)
            total = rows.restore(total)
    return {
        "sums": np.int64(total.size),
        "low": jnp.min(total),
        "high": jnp.max(total),
        "partial_low": jnp.min(low),
        "partial_high": jnp.max(high),
        "overflowed": _count((total < register.low) | (total > register.high)),
        "saturated": saturated,
        "changed": _count(held.astype(total.dtype) != total),
        **found,
    }


def _count(values: jax.Array) -> jax.Array:
    return jnp.sum(values, dtype=jnp.int64)
