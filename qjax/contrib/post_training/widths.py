"""Changes the bit widths of a model's quantizers in place, and derives the recipe for the same widths."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from qjax.assign.backend import target_of
from qjax.calibration.learned import Quantizer
from qjax.calibration.minmax import MinMax
from qjax.calibration.weights import weight_qparams
from qjax.model.fingerprint import fingerprint
from qjax.model.quantized_model import QuantizedModel
from qjax.model.quantizer_numbers import QuantizerNumbers
from qjax.numerics.affine import QParams, choose_qparams
from qjax.recipe.keys import ancestors
from qjax.recipe.recipe import Override, Recipe

MARGIN = 2.0
"""Ranges with more than 8 bits are widened by this factor, because other inputs reach further and one bit is cheap."""


def set_bits(
    qmodel: QuantizedModel, bits: Mapping[str, int], ranges: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Set other bit widths in place.

    The scales of weights cover the weights exactly, those of activations the given ranges, with a margin at 16 bits.
    """
    if not bits:
        return
    plan = qmodel.plan
    kinds = kinds_of(qmodel)
    changed: dict[str, tuple[Quantizer, QParams]] = {}
    for name, width in bits.items():
        spec = target_of(plan.target).with_bits(plan.by_name[name].spec, width)
        q = dataclasses.replace(plan.by_name[name], spec=spec, fixed=None)
        weight = kinds[name] == "weight"
        changed[name] = q, _of_weight(qmodel, name, q) if weight else covering(q, *_with_margin(ranges[name], width))
    replace_quantizers(qmodel, changed)


def replace_quantizers(qmodel: QuantizedModel, changed: Mapping[str, tuple[Quantizer, QParams]]) -> None:
    """Replace quantizers of a model, with these quantization parameters, in place."""
    plan, kinds = qmodel.plan, kinds_of(qmodel)
    values: dict[str, Mapping[str, Any]] = {
        **qmodel.quantizers.named(),
        **{name: q.init(qparams) for name, (q, qparams) in changed.items()},
    }

    def observer(name: str, known: Any) -> Any:
        return known if name not in changed else "minmax" if kinds[name] == "weight" else MinMax()

    quantizers = tuple((name, changed[name][0] if name in changed else q) for name, q in plan.quantizers)
    observers = tuple((name, observer(name, known)) for name, known in plan.observers)
    qmodel.plan = dataclasses.replace(plan, quantizers=quantizers, observers=observers)
    qmodel.quantizers = QuantizerNumbers(qmodel.plan.by_name, values)
    qmodel.fingerprint = fingerprint(qmodel.plan.by_name)


def _with_margin(ends: tuple[np.ndarray, np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = ends
    return (low * np.float32(MARGIN), high * np.float32(MARGIN)) if width > 8 else (low, high)


def kinds_of(qmodel: QuantizedModel) -> dict[str, str]:
    """Name of a quantizer -> the kind of its tensor, such as "weight"."""
    return {name: detail[0] for name, detail in qmodel.plan.details}


def covering(q: Quantizer, low: np.ndarray, high: np.ndarray) -> QParams:
    """The parameters that cover a range, for every iteration of the scans around the tensor."""
    parts = [choose_qparams(low[i], high[i], q.spec) for i in np.ndindex(*q.stack)]
    scale = np.stack([np.asarray(part.scale) for part in parts]).reshape(q.stack)
    return QParams(scale, np.stack([np.asarray(part.zero_point) for part in parts]).reshape(q.stack), q.spec)


def _of_weight(qmodel: QuantizedModel, name: str, q: Quantizer) -> QParams:
    known = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(qmodel.model))}
    return weight_qparams(np.asarray(known[name][...], np.float32), q.spec)


def recipe_with(recipe: Recipe, qmodel: QuantizedModel, names: Iterable[str]) -> Recipe:
    """Derive the recipe with which `quantize` gives these quantizers the widths that they have in `qmodel`."""
    details, quantizers = dict(qmodel.plan.details), qmodel.plan.by_name
    specs = {name: quantizers[name].spec for name in names}
    weights = {name: spec for name, spec in specs.items() if details[name][0] == "weight"}
    specs = {name: spec for name, spec in specs.items() if name not in weights}
    # A quantizer often has its module's name. An override of it then also covers the quantizers inside the module, so
    # these get overrides with their own specs.
    for name, (kind, module, *_) in details.items():
        if kind != "weight" and name not in specs and any(path in specs for path in ancestors(module)):
            specs[name] = quantizers[name].spec
    order = sorted(specs, key=lambda name: (name.count("/"), len(name), name))
    own = {re.escape(name): Override(activations=specs[name]) for name in order}
    own |= {re.escape(name): Override(weights=spec) for name, spec in weights.items()}
    kept = {key: value for key, value in recipe.overrides.items() if key not in own}
    return dataclasses.replace(recipe, overrides={**kept, **own})
