"""Bias correction: takes out of each channel the mean error that quantization puts in."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.batches import Batches, Inputs
from qjax.calibration import track
from qjax.qmodel import QuantizedModel, check_quantized
from qjax.training.products import Product, Products, state_of
from qjax.training.weights import parameters


@dataclasses.dataclass(frozen=True)
class Correction:
    """What `correct_bias` did.

    shifts: name of a weight -> (the parameter or running mean that was moved, float32 [channels] added to the layer's
    output). left: name of a weight -> why its layer was not corrected.
    """

    shifts: dict[str, tuple[str, np.ndarray]]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: {where}, at most {np.max(np.abs(d)):.3g}" for name, (where, d) in self.shifts.items()]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])


def correct_bias(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    progress: bool | None = False,
) -> Correction:
    """Make the mean of every channel of every dense layer and convolution what it is in the model of reals.

    Adds `E[y] - E[y_q]` to each channel of a layer's output y, both measured on these batches: y in the model of reals,
    bias included, y_q in the quantized model whose earlier layers are corrected already (empirical bias correction:
    Nagel et al. 2019, arXiv 1906.04721, section 4.2 and appendix D). It goes to the layer's bias; where batch norm
    follows instead, its running mean is moved the other way, which is the same sum. The model runs in evaluation mode,
    once over all batches for each layer.

    Args:
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything. They are kept.
      inputs: what of a batch the model is called with.
      reference: the model whose parameters, without quantizers, are the reals; None is `qmodel` as it is now. Where
        learned rounding or an earlier correction has already moved parameters, give a copy (`nnx.clone`) from before;
        correcting twice against the same reference then changes nothing the second time.
      progress: show a progress bar on stderr; None shows one on a terminal.

    Raises:
      ValueError: no batch, or no layer that can be corrected; the message says why for each.
    """
    check_quantized(qmodel, "correct_bias")
    kept = list(Batches(batches, inputs, "correct_bias").arguments())
    products = Products(qmodel, kept[0])
    left, items = dict(products.left), []
    shared = Counter(product.shift for product in products.items)
    for product in products.items:
        if product.shift is None:
            left[product.name] = "neither a bias nor batch norm stands directly behind it; give the layer a bias"
        elif shared[product.shift] > 1:
            left[product.name] = f"{product.shift} belongs to several layers"
        else:
            items.append(product)
    if not items:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "it has no quantized weight"
        raise ValueError(f"correct_bias: expected a layer whose bias can be corrected, got none. {reasons}.")
    reals = qmodel if reference is None else nnx.clone(reference)
    truth = _means(products, items, state_of(reals), kept, quantized=False)
    wanted = {product.name: truth[product.name] + _shift(reals, product) for product in items}
    shifts: dict[str, tuple[str, np.ndarray]] = {}
    for product in track(items, "correcting biases", enabled=progress):
        found = _means(products, [product], state_of(qmodel), kept, quantized=True)
        shift = (wanted[product.name] - found[product.name] - _shift(qmodel, product)).astype(np.float32)
        variable, sign = _variable(qmodel, product), np.float32(1 if product.adds else -1)
        variable[...] = (variable[...].astype(jnp.float32) + sign * shift).astype(variable[...].dtype)
        shifts[product.name] = (str(product.shift), shift)
    return Correction(shifts, left)


def _variable(qmodel: QuantizedModel, product: Product) -> nnx.Variable[Any]:
    """The bias or the running mean behind a product."""
    (variable,) = parameters(qmodel, [str(product.shift)]).values()
    return variable


def _shift(qmodel: QuantizedModel, product: Product) -> np.ndarray:
    """float64 [channels]: what is added to a product's output."""
    return np.asarray(_variable(qmodel, product)[...], np.float64) * (1 if product.adds else -1)


def _means(
    products: Products, items: Sequence[Product], state: Any, batches: Sequence[Any], *, quantized: bool
) -> dict[str, np.ndarray]:
    """Name -> float64 [channels]: the mean over all examples of a product's output."""
    totals = {product.name: np.zeros(()) for product in items}
    count = dict.fromkeys(totals, 0)
    for args in batches:
        taps = products.taps(state, args, quantized=quantized)
        for product in items:
            y = taps[product.name][1]
            rows = y.size // y.shape[-1]
            totals[product.name] = totals[product.name] + rows * np.asarray(product.means(y), np.float64)
            count[product.name] += rows
    return {name: total / count[name] for name, total in totals.items()}
