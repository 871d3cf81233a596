"""Gives more bits to the few tensors that cost a network most of its accuracy.

- Activations: the scale of a tensor must cover its greatest number. In the residual stream of a transformer a few
  channels are a hundred times as great as the others, so 256 codes leave almost none for the rest. Bondarenko et al.
  2021 (arXiv 2109.12948) keep those tensors in 16 bits.
- Weights: the first layers of a depthwise CNN hold a thousandth of its bytes but cause half of the noise.

Both are found by measuring what each quantizer alone does to the model's output.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qjax.assign.backend import target_of
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.simulated import grids_of
from qjax.contrib.post_training.sums import Sum, room_of, sums_of
from qjax.contrib.post_training.widths import kinds_of, set_bits
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.support.batches import Batches, Inputs
from qjax.support.tables import decibels_text, table
from qjax.training.weights import weights_of

SHARE = 1.0
"""The least noise of a tensor that is worth more bits, as a multiple of the average."""

STEP = 4
"""The step by which widths above 8 bits grow: 24 dB. The sums of a product have room for a few bits only."""

MOST, MORE = 0.2, 1.5
"""The budgets of `widen`: the share of tensors, and the additional bits per weight on average."""


@dataclasses.dataclass(frozen=True)
class Wider:
    """One tensor that got more bits.

    Attributes:
      name: of its quantizer.
      kind: "weight" or "activation".
      before: its bits before.
      bits: its bits now.
      noise: its noise alone at the model's output before, as in `Score`.
    """

    name: str
    kind: str
    before: int
    bits: int
    noise: float


@dataclasses.dataclass(frozen=True)
class Precision:
    """The result of `widen`; `str()` is a table.

    Attributes:
      tensors: those that have more bits now, costliest first.
      quantizers: how many the model has.
      weights, rest: the summed noise of the weights and of the activations that did not change.
      bytes: of all weights, before and now.
      left: name -> why a costly tensor was not changed.
    """

    tensors: tuple[Wider, ...]
    quantizers: int
    weights: float
    rest: float
    bytes: tuple[int, int]
    left: Mapping[str, str]

    def __str__(self) -> str:
        rows = [[t.name, t.kind, t.before, t.bits, decibels_text(t.noise)] for t in self.tensors]
        text = table(["tensor", "", "bits", "now", "alone, dB"], rows)
        said = (
            f"{len(self.tensors)} of {self.quantizers} quantizers; weights {self.bytes[0]:,} -> {self.bytes[1]:,} bytes"
        )
        stay = f"what stays: weights {decibels_text(self.weights)} dB, activations {decibels_text(self.rest)} dB"
        return "\n".join([text, said, stay, *(f"{name}: stays, {why}" for name, why in self.left.items())])


def widen(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    activations: float = MOST,
    weights: float = MORE,
    progress: bool | None = None,
) -> Precision:
    """Give weights and activations more bits where that is worth it, in `qmodel` itself.

    The noise of each quantizer at the model's output is measured with it alone switched on. A tensor may get more bits
    if it causes more than the average share of the remaining noise. The tensor that removes most noise for its share of
    the budget comes first. Fewer than 8 bits become 8, then 12, then 16, as far as the sums stay within int32.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters are the float model's; None is `qmodel` as it is.
      activations: the budget: the share of all quantizers of the model that may be activations with more bits. 0 if the
        target's kernels support activations of one width only.
      weights: the budget: how many additional bits of memory a weight may take on average.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Returns:
      The tensors that have more bits now, and why other costly tensors have not.

    Raises:
      ValueError: there is no batch, or a budget is below 0.

    Examples:
      ```python
      print(qjax.training.widen(qmodel, batches))
      ```
    """
    check_quantized(qmodel, "widen")
    for name, value in (("activations", activations), ("weights", weights)):
        if not value >= 0:
            raise ValueError(f"widen: {name}: expected a number of 0 or more, got {value!r}.")
    kept = list(Batches(batches, inputs, "widen").arguments())
    walk = Walk(qmodel, kept)
    return choose(qmodel, reference or qmodel, walk, kept, activations, weights, progress=progress)


def choose(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    activations: float = MOST,
    weights: float = MORE,
    *,
    solved: QuantizedModel | None = None,
    progress: bool | None = None,
) -> Precision:
    """`widen` along a walk that has been compiled already; solved: with the weights and biases `gptq` will choose."""
    space = _Space(qmodel, batches[0], activations, weights)
    reals, grids, rounded = Stream.of(reference, quantized=False), grids_of(qmodel), dict[str, dict[str, Any]]()
    if solved is not None:
        own = Stream.of(solved)
        paths = {item.name: [path for path in (item.name, item.shift) if path is not None] for item in walk.items}
        rounded = {name: {path: own.parameters[path] for path in read} for name, read in paths.items()}
        grids |= {name: own.grids[name] for name in rounded}
    what = "measure tensors: batch"
    noise = walk.alone(reals, grids, space.names, batches, rounded=rounded, what=what, progress=progress)
    bits, rest, left = space.chosen(noise)
    wide = [name for name in bits if space.kinds[name] != "weight"]
    ranges = walk.ranges(Stream.of(qmodel), batches) if wide else {}
    before = space.bits
    set_bits(qmodel, bits, ranges)
    kinds = {name: "weight" if space.kinds[name] == "weight" else "activation" for name in space.names}
    tensors = [Wider(name, kinds[name], before[name], width, noise[name]) for name, width in bits.items()]
    stay = {kind: sum(v for n, v in rest.items() if kinds[n] == kind) for kind in ("weight", "activation")}
    sizes = space.size(before), space.size({**before, **bits})
    tensors.sort(key=lambda t: -t.noise)
    return Precision(tuple(tensors), len(before), stay["weight"], stay["activation"], sizes, left)


class _Space:
    """The tensors that may be widened, and their costs."""

    def __init__(self, qmodel: QuantizedModel, args: tuple[Any, ...], activations: float, weights: float) -> None:
        target = target_of(qmodel.plan.target)
        self.kinds, self._wide = kinds_of(qmodel), target.wide_weights
        self.bits = {name: q.spec.bits for name, q in qmodel.plan.quantizers}
        own = set(weights_of(qmodel, args).names)
        self._sums: list[Sum] = sums_of(qmodel, args)
        read = {name for one in self._sums for name in one.names}
        self.names = [n for n, kind in self.kinds.items() if kind != "weight" or (n in own and n in read)]
        self._numbers = {name: _product(detail[3]) for name, detail in qmodel.plan.details if detail[0] == "weight"}
        already = sum(kind != "weight" and self.bits[n] >= 16 for n, kind in self.kinds.items())
        self._mixed = target.mixed_widths
        self._most = max(0, int(activations * len(self.bits)) - already)
        self._bytes = int(weights * sum(self._numbers.values()) / 8)

    def size(self, bits: Mapping[str, int]) -> int:
        """The bytes of all weights."""
        return sum(-(-count * stored(bits[name]) // 8) for name, count in self._numbers.items())

    def chosen(self, noise: Mapping[str, float]) -> tuple[dict[str, int], dict[str, float], dict[str, str]]:
        """(name -> bits, the remaining noise, why others do not change)."""
        rest, bits, left = dict(noise), dict[str, int](), dict[str, str]()
        while True:
            total, best = sum(rest.values()), (0.0, "", 0)
            for name, value in rest.items():
                if name in left or not value * len(rest) > SHARE * total:
                    continue
                width, cost = self._next(name, bits)
                if isinstance(cost, str):
                    left[name] = cost
                    continue
                gain = value * (1 - 4.0 ** (self._now(name, bits) - width)) / max(cost, 1e-9)
                best = max(best, (gain, name, width))
            _, name, width = best
            if not name:
                return self._grown(bits, noise), rest, left
            rest[name] *= 4.0 ** (self._now(name, bits) - width)
            bits[name] = width

    def _grown(self, bits: dict[str, int], noise: Mapping[str, float]) -> dict[str, int]:
        """Use all 16 bits of what is stored in 16 bits anyway, as far as sums allow it, costliest tensors first."""
        for name in sorted(bits, key=lambda name: -noise[name]):
            if bits[name] > 8:
                room = room_of(self._sums, name, {n: width - self.bits[n] for n, width in bits.items()})
                bits[name] = min(16, bits[name] + max(room, 0))
        return bits

    def _now(self, name: str, bits: Mapping[str, int]) -> int:
        return bits.get(name, self.bits[name])

    def _next(self, name: str, bits: Mapping[str, int]) -> tuple[int, float | str]:
        """(the next width, its share of the budget or why there is none)."""
        now, weight = self._now(name, bits), self.kinds[name] == "weight"
        wanted = 8 if now < 8 else now + STEP
        if now >= 16:
            return now, "it has 16 bits"
        room = room_of(self._sums, name, {n: width - self.bits[n] for n, width in bits.items()})
        if now >= 8:
            wanted = min(wanted, now + max(room, 2))
        if now + room < wanted:
            return now, f"sums over its codes of {wanted} bits may leave int32"
        if weight and wanted > 8 and not self._wide:
            return now, "the target's kernels take weights of at most 8 bits"
        if weight:
            spent = self.size({**self.bits, **bits, name: wanted}) - self.size(self.bits)
            own = self._numbers[name] * (stored(wanted) - stored(now)) / 8
            return wanted, "it has too many bytes" if spent > self._bytes else own / max(self._bytes, 1)
        if not self._mixed:
            return now, "the target's kernels take activations of one width"
        count = sum(self.kinds[n] != "weight" for n in {*bits, name})
        own = (stored(wanted) - stored(now)) / 8
        return wanted, "the budget of tensors is spent" if count > self._most else own / self._most


def stored(bits: int) -> int:
    """How many bits a code occupies in memory."""
    return 4 if bits <= 4 else 8 if bits <= 8 else 16


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
