"""Shows what quantization does to every tensor: range, clipping, noise, use of the codes, accumulator headroom."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.analysis.accumulators import NodeAccumulator, accumulators
from qjax.analysis.effect import decibels, finite
from qjax.api.workflow import convert
from qjax.calibration import track
from qjax.lower import ConversionError
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.affine import QSpec, broadcast_to_tensor, centered_bounds, round_to_grid
from qjax.ops import Quantized
from qjax.support.batches import Batches, Inputs, batch_size
from qjax.support.tables import Grid, Printed
from qjax.support.transfers import with_transfers
from qjax.tracing import Place, lost_tables

# ----------------------------------------------------------------------------------------------------------------------
# Histograms over the grid of a quantizer: of the values that it receives, and of the codes that it produces.
#
# Both have the same axis, in steps: code `c` covers `[c - 1/2, c + 1/2)`. With up to 32 codes, every code has its own
# bar, and the values have eight bars for each code. Wider grids combine neighbouring codes into at most 128 bars.

_FINE_LEVELS = 32
_BARS = 128
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts over equally wide bars, in steps of the scale from the least code.

    after: how many codes fall into each bar, from the least code on. width: codes per bar.
    before: how many values fall into each bar. before_width: the width of these bars. before_start: where they begin,
    below the least code; the first and the last bar also count everything beyond them.
    """

    after: tuple[int, ...]
    width: int
    before: tuple[int, ...]
    before_width: float
    before_start: float


def _layout(levels: int) -> tuple[int, float, int, int]:
    """(codes per bar, width of a bar of values, number of bars on the grid, number of bars on each side of it)."""
    if levels <= _FINE_LEVELS:
        return 1, 1 / _PARTS, levels * _PARTS, max(_PARTS, levels)
    group = -(-levels // _BARS)
    bars = -(-levels // group)
    return group, float(group), bars, max(2, bars // 8)


def fine_counts(x: jax.Array, scale: jax.Array, zero_point: jax.Array, spec: QSpec) -> jax.Array:
    """int32 [bars]: counts of the values before a quantizer. x: float32. scale, zero_point: broadcast against x."""
    _, width, bars, margin = _layout(spec.levels)
    steps = x / scale + (zero_point - np.int32(spec.qmin)).astype(jnp.float32) + np.float32(0.5)
    # Float codes saturate here, so infinities and far outliers fall into the last bar.
    index = jnp.floor(jnp.nan_to_num(steps) * np.float32(1 / width)) + np.float32(margin)
    index = jnp.clip(index, np.float32(0), np.float32(bars + 2 * margin - 1)).astype(jnp.int32)
    return jnp.bincount(index.reshape(-1), length=bars + 2 * margin)


def merged(counts: np.ndarray, before: np.ndarray) -> Histogram:
    """The histogram of all codes and of `fine_counts`."""
    levels = counts.size
    group, width, bars, margin = _layout(levels)
    if before.size != bars + 2 * margin:
        raise ValueError(
            f"histogram: expected {bars + 2 * margin} bars of values for {levels} codes, got {before.size}."
        )
    after = np.add.reduceat(counts, np.arange(0, levels, group))
    return Histogram(tuple(after.tolist()), group, tuple(before.tolist()), width, -0.5 - margin * width)


@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """One tensor with a quantizer, over all batches (a weight: once); one per iteration inside scans.

    Attributes:
      name: of the tensor.
      quantizer: its name; tensors on one grid share it.
      bits: of the codes.
      low, high: the least and the greatest float value before the quantizer.
      values: how many were seen.
      clipped: the share that rounds to a code beyond the grid.
      sqnr: the quantizer's own noise relative to its input, `10 log10(sum x^2 / sum (x - x_q)^2)`, dB.
      float_sqnr: the same against this tensor in the float model, so with all earlier errors.
      entropy: of the codes, in bits: how many of `bits` carry information.
      used: the share of the grid's codes that occur.
      dead, channels: the number of channels (a weight's output channels, an activation's last axis) whose codes are all
        zero, and of all channels; None if there are no channels.
      headroom: the bits of int32 that the accumulator of this tensor does not need in the worst case; None if it has
        no accumulator with weights, or if the model has no integer form.
      steep: if a lookup table reads this tensor and its input has too few codes: the share of neighbouring codes whose
        results are more than 16 of 256 codes apart; otherwise None.
      arriving_sqnr: the quantizer's input against this tensor in the float model, dB: the earlier errors alone.
      histogram: of the values and of their codes.
      worst: at most five (example, dB): those whose tensor is farthest from the float model's, worst first; empty for
        weights, in scans, and where no axis is the batch.
    """

    name: str
    quantizer: str
    kind: str
    bits: int
    low: float
    high: float
    values: int
    clipped: float
    sqnr: float
    float_sqnr: float
    entropy: float
    used: float
    dead: int | None
    channels: int | None
    headroom: int | None
    steep: float | None = None
    arriving_sqnr: float = math.inf
    histogram: Histogram | None = None
    worst: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Statistics(Printed):
    """The result of `statistics`; `str()` is a table.

    no_integers: why the model has no integer form, and therefore no headroom; None if it has one.
    """

    tensors: tuple[TensorStatistics, ...]
    examples: int
    no_integers: str | None = None

    def __getitem__(self, name: str) -> TensorStatistics:
        """The tensor of that name."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(f"No tensor {name!r}. Tensors: {', '.join(tensor.name for tensor in self.tensors)}.")

    def parts(self) -> list[Grid | str]:
        """A table and a summary line."""
        header = ["tensor", "kind", "bits", "range", "clipped", "SQNR, dB", "against float, dB"]
        header += ["entropy, bits", "codes used", "dead channels", "headroom, bits"]
        lost = any(t.steep is not None for t in self.tensors)
        header += ["steep table"] if lost else []
        rows = [
            [
                t.name,
                t.kind,
                t.bits,
                f"[{t.low:.4g}, {t.high:.4g}]",
                f"{t.clipped:.3%}",
                _decibels(t.sqnr),
                _decibels(t.float_sqnr),
                f"{t.entropy:.2f}",
                f"{t.used:.1%}",
                "-" if t.dead is None else f"{t.dead} of {t.channels}",
                "-" if t.headroom is None else t.headroom,
                *(["-" if t.steep is None else f"{t.steep:.0%}"] if lost else []),
            ]
            for t in self.tensors
        ]
        text = f"{self.examples} examples"
        if self.no_integers is not None:
            text += f"; no headroom, since: {self.no_integers.splitlines()[0]}"
        return [Grid(header, rows), text]

    def to_json(self) -> str:
        """The result as JSON; an infinite ratio is null. Histograms are left out."""
        rows = [
            {
                f.name: finite(v) if isinstance(v := getattr(tensor, f.name), float) else v
                for f in dataclasses.fields(tensor)
                if f.name not in ("histogram", "worst")
            }
            | {"worst": [[index, finite(ratio)] for index, ratio in tensor.worst]}
            for tensor in self.tensors
        ]
        document = {"examples": self.examples, "no_integers": self.no_integers, "tensors": rows}
        return json.dumps(document, indent=2, allow_nan=False)


@with_transfers
def statistics(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    nodes: Iterable[str] | None = None,
    *,
    inputs: Inputs | None = None,
    progress: bool | None = None,
) -> Statistics:
    """Measure every quantized tensor while the quantized model and its float model run side by side.

    It needs one compiled function and one pass, in evaluation mode. Sums are float64.

    Args:
      qmodel: the quantized model; it is not changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything.
      nodes: regular expressions that match a tensor's, a quantizer's or a module's name in full; None is every tensor.
      inputs: picks the model's arguments out of a batch.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch, or a name matches nothing.

    Examples:
      ```python
      found = qjax.statistics(qmodel, batches)
      print(found)  # SQNR, range and clipping of every tensor
      ```
    """
    check_quantized(qmodel, "statistics")
    patterns = None if nodes is None else _patterns(nodes)
    graphdef, state = nnx.split(evaluation_copy(qmodel))
    plan = qmodel.plan

    def wanted(place: Place) -> bool:
        names = (place.label, place.name, place.module)
        return patterns is None or any(p.fullmatch(name) for p in patterns for name in names)

    @jax.jit
    def step(state: Any, args: tuple[Any, ...]) -> dict[str, dict[str, jax.Array]]:
        model = nnx.merge(graphdef, state)
        call = model.trace(*args)

        def plain(place: Place, x: jax.Array, _: Quantized | None) -> jax.Array | None:
            return x.astype(jnp.float32) if wanted(place) else None

        def record(place: Place, x: jax.Array, quantized: Quantized | None) -> dict[str, jax.Array] | None:
            return _look(place, x, quantized) if quantized is not None and wanted(place) else None

        reals = call.evaluate(quantize=None, record=plain).recorded
        found = call.evaluate(record=record).recorded
        for label in call.places:
            if label in found:
                axes = tuple(range(found[label]["low"].ndim, reals[label].ndim))
                value = found[label].pop("value")
                found[label]["float_signal"] = _squares(reals[label], axes)
                found[label]["float_noise"] = _squares(reals[label], axes, value)
                found[label]["arriving_noise"] = _squares(reals[label], axes, found[label].pop("given"))
                if _has_examples(found[label], reals[label], args):
                    found[label]["examples"] = _ratio_of_each(reals[label], value)
        return found

    places: Mapping[str, Place] = {}
    totals: dict[str, dict[str, np.ndarray]] = {}
    examples, sample = 0, None
    steep: dict[str, float] = {}
    for _, args in track(Batches(batches, inputs, "statistics"), "statistics: batch", enabled=progress, compiles=True):
        if sample is None:
            sample = args
            call = qmodel.trace(*args)
            annotation, places = call.annotation, call.places
            lost = lost_tables(annotation, qmodel.qparams().get)
            steep = {annotation.tables[eqn].label: found.share for eqn, found in lost.items()}
            _check_matched(patterns, places)
        examples += batch_size(args)
        _merge(totals, jax.device_get(step(state, args)), places)
    if sample is None or examples == 0:
        raise ValueError("statistics: expected at least one batch with an example, got none.")
    made = any(label in totals and place.kind == "activation" for label, place in places.items())
    headroom, why = _headroom(qmodel, sample) if made else ({}, None)
    tensors = [
        _finish(place, label + "".join(f"[{i}]" for i in at), {k: v[at] for k, v in totals[label].items()}, headroom)
        for label, place in places.items()
        if label in totals
        for at in np.ndindex(*totals[label]["low"].shape)
    ]
    bits = {name: q.spec.bits for name, q in plan.quantizers}
    tensors = [dataclasses.replace(t, bits=bits[t.quantizer], steep=steep.get(t.name)) for t in tensors]
    return Statistics(tuple(tensors), examples, why)


# ---------------------------------------------------------------------------- on the device


def _look(place: Place, x: jax.Array, quantized: Quantized) -> dict[str, jax.Array]:
    """The counts and sums of one tensor in one batch, and its quantized value."""
    spec = quantized.qparams.spec
    zero_point = broadcast_to_tensor(quantized.qparams.integer_zero_point(), spec, x.shape)
    low, high = centered_bounds(zero_point, spec.qmin, spec.qmax)
    steps = round_to_grid(x, quantized.scale, "nearest_even")
    low, high = jnp.broadcast_to(low, steps.shape), jnp.broadcast_to(high, steps.shape)
    x32, value = x.astype(jnp.float32), quantized.real32()
    codes = jnp.nan_to_num(quantized.codes).astype(jnp.int32)
    index = codes + jnp.broadcast_to(zero_point, codes.shape) - np.int32(spec.qmin)
    axes = tuple(range(x.ndim))
    found = {
        "low": jnp.min(x32, initial=jnp.inf),
        "high": jnp.max(x32, initial=-jnp.inf),
        "clipped": jnp.sum(jnp.logical_or(steps < low, steps > high), dtype=jnp.int32),
        "signal": _squares(x32, axes),
        "noise": _squares(x32, axes, value),
        "counts": jnp.bincount(index.reshape(-1), length=spec.levels),
        "before": fine_counts(x32, quantized.scale, zero_point, spec),
        "given": x32,
        "value": value,
    }
    channel = _channel(place, x.ndim)
    if channel is not None:
        found["alive"] = jnp.any(codes != 0, axis=tuple(axis for axis in axes if axis != channel))
    return found


def _has_examples(found: dict[str, jax.Array], real: jax.Array, args: tuple[Any, ...]) -> bool:
    """Whether the first axis of an activation is the batch."""
    return found["low"].ndim == 0 and real.ndim > 0 and "alive" in found and real.shape[0] == batch_size(args)


def _ratio_of_each(x: jax.Array, other: jax.Array) -> jax.Array:
    """float32 [examples]: the noise of each example relative to its signal."""
    axes = tuple(range(1, x.ndim))
    noise, signal = jnp.sum(jnp.square(x - other), axis=axes), jnp.sum(jnp.square(x), axis=axes)
    return noise / jnp.where(signal == 0, jnp.ones_like(signal), signal)


def _squares(x: jax.Array, axes: tuple[int, ...], other: jax.Array | None = None) -> jax.Array:
    """float32 [..., 2]: the sum of squares of x, or of its distance to another, and the remainder that float32 loses.

    The sum is float64, which a program without 64-bit numbers can return only in two parts.
    """
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        wide = wide if other is None else wide - other.astype(jnp.float64)
        total = jnp.sum(jnp.square(wide), axis=axes)
        head = total.astype(jnp.float32)
        tail = (total - head.astype(jnp.float64)).astype(jnp.float32)
        return jnp.stack([head, tail], axis=-1)


def _channel(place: Place, rank: int) -> int | None:
    if place.kind == "weight":
        return place.axes[-1] if place.axes else None
    return rank - 1 if rank > 1 else None


# ---------------------------------------------------------------------------- on the host


_MERGE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "low": np.minimum,
    "high": np.maximum,
    "alive": np.logical_or,
    "examples": lambda a, b: np.concatenate([a, b]),
}


def _merge(totals: dict[str, dict[str, np.ndarray]], found: Any, places: Mapping[str, Place]) -> None:
    for label, parts in found.items():
        values: dict[str, np.ndarray] = {}
        for key, part in parts.items():
            array = np.asarray(part)
            if key.endswith(("signal", "noise")):
                array = array.astype(np.float64).sum(-1)
            elif key in ("clipped", "counts", "before"):
                array = array.astype(np.int64)
            values[key] = array
        if label not in totals:
            totals[label] = values
        elif places[label].kind != "weight":
            totals[label] = {key: _MERGE.get(key, np.add)(totals[label][key], value) for key, value in values.items()}


def _finish(place: Place, label: str, total: dict[str, np.ndarray], headroom: dict[str, int]) -> TensorStatistics:
    counts = total["counts"]
    values = int(counts.sum())
    shares = counts[counts > 0] / max(1, values)
    alive = total.get("alive")
    return TensorStatistics(
        name=label,
        quantizer=place.name,
        kind=place.kind,
        bits=0,
        low=float(total["low"]),
        high=float(total["high"]),
        values=values,
        clipped=int(total["clipped"]) / max(1, values),
        sqnr=_sqnr(total["signal"], total["noise"]),
        float_sqnr=_sqnr(total["float_signal"], total["float_noise"]),
        entropy=max(0.0, -math.fsum(shares * np.log2(shares))),
        used=int((counts > 0).sum()) / counts.size,
        dead=None if alive is None else int((~alive).sum()),
        channels=None if alive is None else int(alive.size),
        headroom=headroom.get(label),
        arriving_sqnr=_sqnr(total["float_signal"], total["arriving_noise"]),
        histogram=merged(counts, total["before"]),
        worst=_worst(total.get("examples")),
    )


def _worst(noise: np.ndarray | None) -> tuple[tuple[int, float], ...]:
    if noise is None:
        return ()
    order = np.argsort(-noise, kind="stable")[:5]
    return tuple((int(index), decibels(float(noise[index]))) for index in order if noise[index] > 0)


def _sqnr(signal: Any, noise: Any) -> float:
    signal, noise = float(signal), float(noise)
    return decibels(noise / signal) if signal else (-math.inf if noise else math.inf)


def _headroom(qmodel: QuantizedModel, sample: tuple[Any, ...]) -> tuple[dict[str, int], str | None]:
    """Tensor -> bits of int32 that its accumulator does not need, from the report of the graph."""
    try:
        graph = convert(qmodel, sample)
    except ConversionError as error:
        return {}, str(error)
    outputs = {node.name: node.output for node in graph.ir.nodes}

    def left(node: NodeAccumulator) -> int:
        return 32 - node.total_bits

    return {outputs[node.name]: left(node) for node in accumulators(graph).nodes}, None


def _patterns(nodes: Iterable[str]) -> list[re.Pattern[str]]:
    names = [nodes] if isinstance(nodes, str) else list(nodes)
    try:
        return [re.compile(name) for name in names]
    except re.error as error:
        raise ValueError(f"statistics: nodes: expected regular expressions, got {names!r}: {error}.") from None


def _check_matched(patterns: list[re.Pattern[str]] | None, places: Mapping[str, Place]) -> None:
    for pattern in patterns or ():
        if not any(pattern.fullmatch(name) for p in places.values() for name in (p.label, p.name, p.module)):
            raise ValueError(
                f"statistics: {pattern.pattern!r} matches no quantized tensor. Tensors: {', '.join(places)}."
            )


def _decibels(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf" if value > 0 else "-inf" if value < 0 else "-"
