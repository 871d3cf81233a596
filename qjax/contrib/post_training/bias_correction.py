"""Bias correction: removes the mean error that quantization adds to each channel."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax.contrib.post_training.layerwise_runner import Stop, Stream, Walk
from qjax.contrib.post_training.simulated import rounded_to
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.support.batches import Batches, Inputs
from qjax.training.scan_layers import quantizer_of
from qjax.training.weights import parameters


@dataclasses.dataclass(frozen=True)
class Correction:
    """The result of `correct_bias`.

    Attributes:
      shifts: name of a weight -> (the parameter or running mean that was changed, the float32 [channels] that this adds
        to the layer's output).
      left: name of a weight -> why its layer was not corrected.
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
    progress: bool | None = None,
) -> Correction:
    """Restore the mean that every output channel of dense layers and convolutions has in the float model.

    The correction `E[y] - E[y_q]` of each channel of a layer's output is measured on these batches: y in the float
    model, including the bias, and y_q in the quantized model whose earlier layers are corrected already (empirical bias
    correction: Nagel et al. 2019, arXiv 1906.04721, section 4.2 and appendix D). It is added to the layer's bias. If
    batch norm follows instead, the correction is subtracted from its running mean, which has the same effect. The model
    runs in evaluation mode, once over all batches; the activations between two layers stay in memory for all of them.

    Args:
      qmodel: the quantized model; biases or running means are changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch.
      reference: the model whose parameters, without quantizers, are the float model's; None is `qmodel` as it is now.
        If learned rounding or an earlier correction has already changed parameters, pass a copy (`nnx.clone`) from
        before. A second correction against the same reference then changes nothing.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch, or no layer that can be corrected; the message gives the reason for each.

    Examples:
      ```python
      print(qjax.training.correct_bias(qmodel, batches))
      ```
    """
    check_quantized(qmodel, "correct_bias")
    kept = list(Batches(batches, inputs, "correct_bias").arguments())
    return correct(qmodel, qmodel if reference is None else reference, Walk(qmodel, kept), kept, progress=progress)


def correct(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    progress: bool | None = None,
) -> Correction:
    """`correct_bias` along a walk that has been compiled already."""
    left, names = dict(walk.left), set[str]()
    shared = Counter(product.shift for product in walk.items)
    for product in walk.items:
        if product.shift is None:
            left[product.name] = "neither a bias nor batch norm follows it directly; give the layer a bias"
        elif shared[product.shift] > 1:
            left[product.name] = f"{product.shift} belongs to several layers"
        else:
            names.add(product.name)
    if not names:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "it has no quantized weight"
        raise ValueError(f"correct_bias: expected a layer whose bias can be corrected, got none. {reasons}.")
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False)
    shifts: dict[str, tuple[str, np.ndarray]] = {}

    def visit(stop: Stop) -> None:
        name, path = stop.product.name, str(stop.product.shift)
        if name not in names:
            return
        means = [
            mean_of(
                stop,
                data,
                rounded_to(quantizer_of(qmodel.plan.by_name, name), stream.grids[name], stream.parameters[name]),
            )
            for stream, data in zip((own, reals), stop.data, strict=True)
        ]
        sign = 1.0 if stop.product.adds else -1.0
        before = [np.asarray(stream.parameters[path], np.float64) * sign for stream in (own, reals)]
        shift = ((means[1] + before[1]) - (means[0] + before[0])).astype(np.float32)
        (variable,) = parameters(qmodel, [path]).values()
        moved = variable[...].astype(jnp.float32) + np.float32(sign) * shift
        variable[...] = moved.astype(variable[...].dtype)
        own.take(path, variable)
        shifts[name] = (path, shift)

    walk.run([own, reals], batches, visit, what="correct biases: layer", progress=progress)
    return Correction(shifts, left)


def mean_of(stop: Stop, data: Sequence[Any], w: Any) -> np.ndarray:
    """float64 [channels]: the mean of a product's output over all examples."""
    total, count = np.zeros(()), 0
    for product, x in zip(stop.products, data, strict=True):
        y = product(x, w)
        rows = y.size // y.shape[-1]
        total, count = total + rows * np.asarray(product.means(y), np.float64), count + rows
    return total / count
