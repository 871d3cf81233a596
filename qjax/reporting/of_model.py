"""Builds the report of a quantized model: errors against the float model, the graph, and whether both agree."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax.analysis.accumulators import accumulators
from qjax.analysis.effect import decibels
from qjax.analysis.statistics import Statistics, TensorStatistics, statistics
from qjax.api.workflow import convert, verify
from qjax.comparison.verify import Report
from qjax.export.integer_graph import IntegerGraph
from qjax.lower import ConversionError
from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.reporting.document import MEASURES, Document, Measure, Table, nodes_of, number
from qjax.reporting.of_graph import (
    accumulator_table,
    add_accumulators,
    graph_cards,
    node_table,
    overflow_advice,
)
from qjax.run.quantize_io import outputs_of
from qjax.support.batches import batch_size
from qjax.support.progress import stage

Metric = Callable[[Any, Any], Any]
"""A function of (output of the model, batch) that returns a scalar, the mean over the batch; greater is better."""

_ERRORS = (
    Measure("total", "total error (SQNR)", "Signal-to-noise ratio of the output against the float model.", "low", "dB"),
    Measure(
        "arising", "error arising here (SQNR)", "Signal-to-noise ratio of the output's own quantizer.", "low", "dB"
    ),
    Measure(
        "arriving",
        "error arriving (SQNR)",
        "Signal-to-noise ratio before the output is quantized, against the float model.",
        "low",
        "dB",
    ),
    Measure("weight", "error of the weights (SQNR)", "Signal-to-noise ratio of the weights' quantizer.", "low", "dB"),
    Measure("clipping", "clipping", "Share of the output's values outside the range of its codes.", "high", "%"),
    Measure("used", "codes used", "Share of the output's codes that occur.", "low", "%"),
)
_EXACTNESS = Measure(
    "differ",
    "codes that differ",
    "Codes of the graph that differ from the training forward's although the input codes agree.",
    "high",
    "",
)


def of_model(
    qmodel: QuantizedModel,
    batches: Sequence[tuple[Any, tuple[Any, ...]]],
    *,
    title: str,
    metric: Metric | None,
    source: bool,
) -> Document:
    """Measure a quantized model.

    Args:
      batches: pairs of a batch and the arguments of its call.
    """
    calls = [args for _, args in batches]
    stats = statistics(qmodel, calls)
    try:
        graph = convert(qmodel, calls[0])
    except ConversionError as error:
        return _without_graph(stats, str(error), title)
    verified = verify(graph, qmodel, calls)
    report = accumulators(graph, calls)
    with stage("report: outputs"):
        outputs = _outputs(qmodel, graph, batches, metric)
    nodes, tensors = nodes_of(graph, source=source)
    _add_statistics(nodes, tensors, stats)
    _add_verified(nodes, verified)
    add_accumulators(nodes, report)
    measures = (*_ERRORS, _EXACTNESS, *MEASURES)
    return Document(
        title=title,
        kind="model",
        state="exact" if verified.exact else "equal" if verified.as_converted else "differs",
        headline=_headline(verified, graph.target),
        cards=[*outputs.cards(), ("codes that differ", *_difference(verified)), *graph_cards(graph, report)],
        advice=[
            *verified.ranges(),
            *outputs.advice(),
            *_advice(stats, verified),
            *overflow_advice(report, graph.target),
            *_ship(verified, graph.target),
        ],
        measures=measures,
        nodes=nodes,
        tensors=tensors,
        tables=[node_table(nodes, measures), _tensor_table(stats, nodes), accumulator_table(report)],
        details=[("Exactness: the whole verdict of qjax.verify", verified.verdict)],
    )


def _headline(report: Report, target: str) -> str:
    if report.exact:
        return f"Exact: the integer graph for {target} computes what the training forward computes, code for code."
    if report.as_converted:
        return (
            f"The graph computes what qjax.exact computes for {target}; the fake-quantized forward differs from it in "
            f"{report.local:,} of {report.compared:,} codes."
        )
    return f"Not exact: {report.local:,} of {report.compared:,} codes differ where a node's inputs agree."


def _difference(report: Report) -> tuple[str, str]:
    most = f"by at most {report.local_max}" if report.local else f"{report.examples:,} examples"
    return f"{report.local:,} of {report.compared:,}", most


# ---------------------------------------------------------------------------- outputs


_LOST_CHANNEL = 10.0
"""A channel of an output below this SQNR in dB is lost, if the whole output has at least that many dB more."""


class _Outputs:
    """The graph's dequantized outputs next to the float model's, and the metric of both."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        # For each output and each channel (element of the last axis): the sums of squares of the error and the output.
        self.squares: list[Any] = [0.0 for _ in names]
        self.scores = np.zeros(2)
        self.examples = 0
        self.agree = self.predictions = 0
        self.with_metric = False

    @property
    def ratios(self) -> dict[str, tuple[float, int, float]]:
        """For each output its signal-to-noise ratio in dB, its worst channel, and that channel's ratio."""
        found: dict[str, tuple[float, int, float]] = {}
        for name, squares in zip(self.names, self.squares, strict=True):
            noise, signal = np.reshape(squares, (2, -1)) if np.ndim(squares) else np.zeros((2, 1))
            of_channels = [decibels(n / s) if s else math.inf for n, s in zip(noise, signal, strict=True)]
            worst = int(np.argmin(of_channels))
            found[name] = (
                decibels(noise.sum() / signal.sum()) if signal.sum() else math.inf,
                worst,
                of_channels[worst] if len(of_channels) > 1 else math.inf,
            )
        return found

    def advice(self) -> list[str]:
        """The outputs in which a channel is lost although the whole looks good."""
        return [
            f"Channel {channel} of the output {name} has only {least:.1f} dB, although the whole output has "
            f"{ratio:.1f} dB. Return parts of different magnitude separately, so that each gets its own scale, or give "
            "the output 16 bits."
            for name, (ratio, channel, least) in self.ratios.items()
            if least < _LOST_CHANNEL and ratio - least > _LOST_CHANNEL
        ]

    def cards(self) -> list[tuple[str, str, str]]:
        """Accuracy first, if there is a metric; then the signal-to-noise ratio of every output."""
        found: list[tuple[str, str, str]] = []
        if self.with_metric:
            plain, graph = self.scores / self.examples
            found.append(
                ("metric of the graph", f"{graph:.4g}", f"float model {plain:.4g}, change {graph - plain:+.4g}")
            )
        for name in self.names[:2]:
            ratio, channel, least = self.ratios[name]
            worst = f", the worst of its channels ({channel}) {least:.1f} dB" if math.isfinite(least) else ""
            shown = f"{ratio:.1f} dB" if math.isfinite(ratio) else "equal"
            found.append((f"output {name}", shown, f"against the float model{worst}"))
        if self.predictions:
            share = f"{self.agree:,} of {self.predictions:,}"
            found.append(("same prediction", share, "largest score, float model and graph"))
        return found


def _outputs(
    qmodel: QuantizedModel, graph: IntegerGraph, batches: Sequence[tuple[Any, tuple[Any, ...]]], metric: Metric | None
) -> _Outputs:
    definition, state = nnx.split(evaluation_copy(qmodel.model))
    plain = jax.jit(lambda state, args: nnx.merge(definition, state)(*args)) if _arrays(batches) else None
    found = _Outputs(graph.ir.outputs)
    found.with_metric = metric is not None
    for batch, args in batches:
        size = batch_size(args)
        wanted = plain(state, args) if plain is not None else nnx.merge(definition, state)(*args)
        got = graph(*args)
        pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in _pairs(graph, wanted, got)]
        for index, (a, b) in enumerate(pairs):
            rows = [np.reshape(x, (-1, x.shape[-1] if x.ndim > 1 else 1)) for x in (b - a, a)]
            found.squares[index] = found.squares[index] + np.stack([np.square(x).sum(0) for x in rows])
        if pairs and pairs[0][0].ndim > 1 and pairs[0][0].shape[-1] > 1:
            same = pairs[0][0].argmax(-1) == pairs[0][1].argmax(-1)
            found.agree += int(same.sum())
            found.predictions += int(same.size)
        if metric is not None:
            found.scores += size * np.array([_score(metric(output, batch)) for output in (wanted, got)])
        found.examples += size
    return found


def _arrays(batches: Sequence[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Whether all arguments are arrays, because Python values (flags) cannot be arguments of a jitted function."""
    leaves = jax.tree.leaves([args for _, args in batches], is_leaf=lambda x: x is None)
    return all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def _pairs(graph: IntegerGraph, wanted: Any, got: Any) -> list[tuple[Any, Any]]:
    return list(zip(outputs_of(graph.ir, wanted), outputs_of(graph.ir, got), strict=True))


def _score(value: Any) -> float:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(
            f"report: expected metric(output, batch) to return one number, the mean over the batch, got shape "
            f"{array.shape}."
        )
    return float(array.reshape(()))


# ---------------------------------------------------------------------------- what statistics and verify say of nodes


def _add_statistics(nodes: list[dict[str, Any]], tensors: dict[str, Any], stats: Statistics) -> None:
    known = {t.name: t for t in stats.tensors}
    for name, tensor in tensors.items():
        if name in known:
            _describe(tensor, known[name])
    for node in nodes:
        own = known.get(node["output"])
        if own is not None:
            node["measures"] |= {
                "total": number(own.float_sqnr),
                "arising": number(own.sqnr),
                "arriving": number(own.arriving_sqnr),
                "clipping": number(100 * own.clipped),
                "used": number(100 * own.used),
            }
        weights = [known[name] for name in node["tensors"][1:] if name in known]
        if weights:
            node["measures"]["weight"] = number(min(w.sqnr for w in weights))


def _describe(tensor: dict[str, Any], own: TensorStatistics) -> None:
    tensor["figures"] += [
        ("range of the values", f"{own.low:.4g} to {own.high:.4g}"),
        ("values outside the range", f"{own.clipped:.3%}"),
        ("error arising here (SQNR)", _decibels(own.sqnr)),
        *([] if own.kind == "weight" else [("error arriving (SQNR)", _decibels(own.arriving_sqnr))]),
        ("total error (SQNR)", _decibels(own.float_sqnr)),
        ("codes used", f"{own.used:.1%}"),
        ("entropy", f"{own.entropy:.2f} of {own.bits} bits"),
    ]
    if own.channels is not None and own.dead:
        tensor["figures"].append(("dead channels", f"{own.dead} of {own.channels}"))
    if own.worst:
        listed = ", ".join(f"{index} ({_decibels(ratio)})" for index, ratio in own.worst)
        tensor["figures"].append(("worst examples", listed))
    if own.histogram is not None and "qmin" in tensor:
        h = own.histogram
        tensor["histogram"] = {
            "qmin": tensor["qmin"],
            "width": h.width,
            "after": list(h.after),
            "before": list(h.before),
            "before_width": h.before_width,
            "before_start": h.before_start,
        }


def _add_verified(nodes: list[dict[str, Any]], report: Report) -> None:
    known = {node.name: node for node in report.nodes}
    for node in nodes:
        own = known.get(node["name"])
        if own is not None:
            node["measures"]["differ"] = own.local
            text = f"{own.local:,} of {own.compared:,} differ on the same input codes, {own.end_to_end:,} end to end"
            node["facts"].append(("against the training forward", text))
            if own.cause:
                node["facts"].append(("cause", f"the target {own.cause}"))


def _tensor_table(stats: Statistics, nodes: Sequence[dict[str, Any]]) -> Table:
    owner = {name: node["name"] for node in reversed(nodes) for name in node["tensors"]}
    header = [
        "tensor",
        "kind",
        "bits",
        "low",
        "high",
        "clipped, %",
        "error arising (SQNR, dB)",
        "arriving, dB",
        "total, dB",
    ]
    header += ["entropy, bits", "codes used, %", "dead channels"]
    rows = [
        [
            t.name,
            t.kind,
            t.bits,
            f"{t.low:.4g}",
            f"{t.high:.4g}",
            f"{100 * t.clipped:.3f}",
            _plain(t.sqnr),
            "-" if t.kind == "weight" else _plain(t.arriving_sqnr),
            _plain(t.float_sqnr),
            f"{t.entropy:.2f}",
            f"{100 * t.used:.1f}",
            "-" if t.dead is None else f"{t.dead} of {t.channels}",
        ]
        for t in stats.tensors
    ]
    return Table("Tensors", header, rows, [owner.get(t.name) for t in stats.tensors])


def _without_graph(stats: Statistics, error: str, title: str) -> Document:
    return Document(
        title=title,
        kind="model",
        state="differs",
        headline="The model cannot be converted to integers yet, because qjax.convert refuses it.",
        cards=[("examples", f"{stats.examples:,}", "")],
        advice=[
            error.splitlines()[0],
            "qjax.explain(model, sample) lists every obstacle at once, each with your line and two cures.",
        ],
        measures=(),
        nodes=(),
        tensors={},
        tables=[_tensor_table(stats, ())],
        details=[("The error of qjax.convert", error)],
    )


# ---------------------------------------------------------------------------- advice


def _advice(stats: Statistics, report: Report) -> list[str]:
    found: list[str] = []
    if not report.exact:
        if report.as_converted is False:
            found.append(
                f"The graph differs from what qjax.convert returns for this model now: {report.changed}. Convert again."
            )
        else:
            found.append("Train the last epochs with qjax.exact(qmodel, sample): it computes the graph's codes.")
    clipped = [t for t in stats.tensors if t.kind != "weight" and t.clipped > 0.01]
    for t in sorted(clipped, key=lambda t: -t.clipped)[:3]:
        found.append(
            f"{t.name} clips {t.clipped:.1%} of its values: calibrate it with more data, or with another method."
        )
    made = [t for t in stats.tensors if math.isfinite(t.sqnr)]
    worst = sorted(made, key=lambda t: t.sqnr)[:1]
    for t in worst:
        if t.sqnr < 30:
            found.append(
                f"Most error arises in {t.name}: {t.sqnr:.1f} dB at {t.bits} bits. "
                "qjax.sensitivity(qmodel, batches) shows what more bits for it would gain, and qjax.search finds the "
                "best choice within a budget."
            )
    dead = [t for t in stats.tensors if t.dead and t.channels and t.dead / t.channels > 0.25]
    for t in dead[:2]:
        found.append(
            f"{t.dead} of {t.channels} channels of {t.name} are zero everywhere: prune them, or look at their scale."
        )
    for t in stats.tensors:
        if t.steep is not None and t.steep > 0:
            found.append(
                f"{t.name} has too few codes for the lookup table that reads it, because {t.steep:.0%} of the table's "
                "steps are steep. Give it more bits."
            )
    return found


def _ship(report: Report, target: str) -> list[str]:
    if not report.exact and report.as_converted is False:
        return []
    return [f'Ship it: graph.save("model.qjax"), or graph.emit(...) for the runtime of {target}.']


def _decibels(value: float) -> str:
    return "none" if value == math.inf else f"{value:.1f} dB" if math.isfinite(value) else "-"


def _plain(value: float) -> str:
    return "inf" if value == math.inf else f"{value:.2f}" if math.isfinite(value) else "-"
