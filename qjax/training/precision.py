"""16 bits for the activations that need them: a few tensors with outliers cost a transformer most of its accuracy.

The scale of a tensor must cover its greatest number. In the residual stream of a transformer a few channels are a
hundred times as great as the others, so 256 codes leave almost none for the rest. Bondarenko et al. 2021 (arXiv
2109.12948) keep those tensors in 16 bits. Here they are found by measuring what each tensor's quantizer alone does to
the model's output.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.assign.backend import target_of
from qjax.batches import Batches, Inputs
from qjax.calibration.learned import Quantizer
from qjax.calibration.minmax import MinMax
from qjax.fingerprint import fingerprint
from qjax.numerics.affine import QParams, choose_qparams
from qjax.ops import Role
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.places import ancestors
from qjax.qmodel import QuantizedModel, QuantizerState, check_quantized, evaluation_copy
from qjax.recipe import Override, Recipe
from qjax.summary import decibels_text, table
from qjax.tracing.annotation import Annotation
from qjax.training.simulated import grids_of, switched
from qjax.training.walk import Stream, Walk, noise_of
from qjax.training.weights import codes_of, weights_of

SHARE = 1.0
"""How many times the average share of the noise a tensor must bring to be worth more bits."""


@dataclasses.dataclass(frozen=True)
class Wider:
    """One tensor.

    Attributes:
      name: of its quantizer.
      before: its bits before.
      bits: its bits now.
      noise: what it alone did to the model's output before, as in `Score`.
    """

    name: str
    before: int
    bits: int
    noise: float


@dataclasses.dataclass(frozen=True)
class Precision:
    """The result of `widen_activations`; `str()` is a table.

    Attributes:
      tensors: those that have more bits now, the costliest first.
      quantizers: how many the model has.
      weights: the noise of all weights together.
      rest: that of the activations that stay, summed.
      left: name -> why it stays as it is.
    """

    tensors: tuple[Wider, ...]
    quantizers: int
    weights: float
    rest: float
    left: Mapping[str, str]

    def __str__(self) -> str:
        rows = [[t.name, t.before, t.bits, decibels_text(t.noise)] for t in self.tensors]
        text = table(["tensor", "bits", "now", "alone, dB"], rows)
        said = f"{len(self.tensors)} of {self.quantizers} quantizers; weights alone {decibels_text(self.weights)} dB"
        return "\n".join([text, said, *(f"{name}: stays, {why}" for name, why in self.left.items())])


def widen_activations(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    bits: int = 16,
    most: float = 0.2,
    progress: bool | None = None,
) -> Precision:
    """Give activations more bits where that is worth it, in `qmodel` itself.

    Each tensor's noise at the model's output is measured with its quantizer alone switched on. The costliest tensor
    gets more bits first, then the next, as long as it brings more than the average share of the noise that is left
    (that of the weights included), and the number of tensors stays within the budget. Their scales follow from their
    ranges on these batches.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything. They are kept.
      inputs: what of a batch the model is called with: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters are the float model's; None is `qmodel` as it is.
      bits: how many a tensor gets.
      most: the budget: the share of all quantizers of the model, weights among them, that may get more.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).

    Raises:
      ValueError: no batch; a target whose kernels do not mix widths.
    """
    check_quantized(qmodel, "widen_activations")
    kept = list(Batches(batches, inputs, "widen_activations").arguments())
    target = target_of(qmodel.plan.target)
    if not target.mixed_widths:
        raise ValueError(
            f"widen_activations: the kernels of target {target.name!r} take activations of one width, got a request "
            f"for {bits} bits in some. Give all of them 16 (activations=QSpec(bits=16)), or choose a target that mixes."
        )
    return widen(qmodel, reference or qmodel, Walk(qmodel, kept), kept, bits=bits, most=most, progress=progress)


def widen(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    bits: int = 16,
    most: float = 0.2,
    progress: bool | None = None,
) -> Precision:
    """`widen_activations` along a walk that is compiled already."""
    kinds = {name: detail[0] for name, detail in qmodel.plan.details}
    quantizers = qmodel.plan.by_name
    names = [name for name in quantizers if kinds[name] != "weight" and quantizers[name].spec.bits < bits]
    reals, grids = Stream.of(reference, quantized=False), grids_of(qmodel)
    noise = walk.alone(reals, grids, names, batches, what="measure activations: batch", progress=progress)
    own = [name for name in quantizers if kinds[name] == "weight"]
    alone = Stream(Stream.of(qmodel).parameters, switched(grids, own))
    weights = noise_of(walk.outputs(reals, batches), walk.outputs(alone, batches))
    already = sum(kinds[name] != "weight" and q.spec.bits >= bits for name, q in quantizers.items())
    budget, left = int(most * len(quantizers)) - already, dict[str, str]()
    chosen = _chosen(noise, weights, budget)
    while refused := _overflowing(qmodel, batches[0], chosen, bits):
        # Take the next candidates instead of the refused ones.
        left |= dict.fromkeys(refused, f"sums over its codes of {bits} bits may leave int32")
        stay = sum(noise[name] for name in left)
        free = {name: value for name, value in noise.items() if name not in left}
        chosen = _chosen(free, weights + stay, budget)
    ranges = walk.ranges(Stream.of(qmodel), batches) if chosen else {}
    before = {name: quantizers[name].spec.bits for name in chosen}
    set_bits(qmodel, dict.fromkeys(chosen, bits), ranges)
    tensors = tuple(Wider(name, before[name], bits, noise[name]) for name in chosen)
    rest = sum(value for name, value in noise.items() if name not in chosen)
    return Precision(tensors, len(quantizers), weights, rest, left)


def _chosen(noise: Mapping[str, float], weights: float, most: int) -> list[str]:
    left, chosen = weights + sum(noise.values()), list[str]()
    for name in sorted(noise, key=lambda name: -noise[name]):
        count = len(noise) - len(chosen)
        if len(chosen) >= most or not noise[name] * count > SHARE * left:
            break
        chosen.append(name)
        left -= noise[name]
    return chosen


def _overflowing(qmodel: QuantizedModel, args: tuple[Any, ...], names: Collection[str], bits: int) -> list[str]:
    """Those of the tensors whose products may leave int32 with so many bits, the bias left a half of it."""
    call = evaluation_copy(qmodel).trace(*args)
    annotation = call.annotation
    codes = codes_of(qmodel, weights_of(qmodel, args).names)
    widths = {name: q.spec.bits for name, q in qmodel.plan.quantizers} | dict.fromkeys(names, bits)
    grown: dict[str, None] = {}
    made = {value: eqn for eqn in call.traced.program.walk() for value in eqn.outputs}
    for eqn in call.traced.program.walk():
        op = annotation.ops.get(eqn, (None,))[0]
        if not isinstance(op, (Conv, Dot)):
            continue
        places = [annotation.weights.get((eqn, i)) or _place(annotation, made, v) for i, v in enumerate(eqn.inputs)]
        # The greatest sum of one operand's codes along the summed axes, and the widths of the other operands.
        factor, width = 0.0, 0
        for index, place in enumerate(places):
            if place is None:
                continue
            if place.kind == "weight" or (index == len(places) - 1 and not factor):
                summed = tuple(a for a in range(len(eqn.in_shapes[index])) if a not in op.weight_axes(eqn, index))
                terms = float(np.prod([eqn.in_shapes[index][a] for a in summed]))
                factor = terms * 2.0 ** widths[place.name]
                if place.name in codes and np.ndim(codes[place.name]) == len(eqn.in_shapes[index]):
                    factor = float(np.abs(np.asarray(codes[place.name], np.float64)).sum(summed).max())
            else:
                width += widths[place.name]
        if factor * 2.0**width >= 2.0**30:
            grown.update(dict.fromkeys(place.name for place in places if place is not None and place.name in names))
    return list(grown)


def _place(annotation: Annotation, made: Mapping[Any, Any], value: Any) -> Any:
    """The quantizer of a tensor, also behind operations that keep its codes, such as a max pool."""
    while value not in annotation.values and value in made:
        eqn = made[value]
        op = annotation.ops.get(eqn, (None,))[0]
        flowing = [v for v, constant in zip(eqn.inputs, annotation.is_constant(eqn), strict=True) if not constant]
        if op is None or op.role is not Role.GRID or not flowing:
            return None
        value = flowing[0]
    return annotation.values.get(value)


def set_bits(
    qmodel: QuantizedModel, bits: Mapping[str, int], ranges: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Give quantizers of activations other widths in place; their scales cover these ranges exactly."""
    if not bits:
        return
    plan = qmodel.plan
    changed: dict[str, Quantizer] = {}
    for name, width in bits.items():
        q = dataclasses.replace(plan.by_name[name], spec=plan.by_name[name].spec.replace(bits=width), fixed=None)
        changed[name] = q
        qmodel.quantizers[name] = QuantizerState(q, q.init(covering(q, *ranges[name])))
    quantizers = tuple((name, changed.get(name, q)) for name, q in plan.quantizers)
    observers = tuple((name, MinMax() if name in changed else known) for name, known in plan.observers)
    qmodel.plan = dataclasses.replace(plan, quantizers=quantizers, observers=observers)
    qmodel.fingerprint = fingerprint(qmodel.plan.by_name)


def covering(q: Quantizer, low: np.ndarray, high: np.ndarray) -> QParams:
    """The parameters that cover a range, for every iteration of the scans around the tensor."""
    parts = [choose_qparams(low[i], high[i], q.spec) for i in np.ndindex(*q.stack)]
    scale = np.stack([np.asarray(part.scale) for part in parts]).reshape(q.stack)
    return QParams(scale, np.stack([np.asarray(part.zero_point) for part in parts]).reshape(q.stack), q.spec)


def recipe_with(recipe: Recipe, qmodel: QuantizedModel, names: Iterable[str]) -> Recipe:
    """The recipe by which `quantize` gives these quantizers of activations the widths that they have in `qmodel`."""
    details, quantizers = dict(qmodel.plan.details), qmodel.plan.by_name
    specs = {name: quantizers[name].spec for name in names}
    # A quantizer often has its module's name. An override of it then also covers the quantizers inside of the module,
    # so these get overrides with their own specs.
    for name, (kind, module, *_) in details.items():
        if kind != "weight" and name not in specs and any(path in specs for path in ancestors(module)):
            specs[name] = quantizers[name].spec
    order = sorted(specs, key=lambda name: (name.count("/"), len(name), name))
    own = {re.escape(name): Override(activations=specs[name]) for name in order}
    kept = {key: value for key, value in recipe.overrides.items() if key not in own}
    return dataclasses.replace(recipe, overrides={**kept, **own})
