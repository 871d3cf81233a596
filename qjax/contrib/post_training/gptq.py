"""GPTQ and coordinate descent: choose the codes of a layer's weights that preserve its output.

x is the layer's input in the float model, x_q its input in the quantized model, whose earlier layers are solved
already. Each layer minimises over codes and scales

    mean (x W - x_q W_q)^2 = (W_q - W*)^T H (W_q - W*) + constant,   H = mean x_q^T x_q,   H W* = mean x_q^T x W

so the target W* already compensates the error of the quantized inputs, as in Qronos (Zhang et al. 2025, arXiv
2505.11695) and QEP (Arai and Ichikawa 2025, arXiv 2504.09629). If the layer has a bias, the moments are centred, and
the bias absorbs the mean error.

0. Damping: d times the mean of H's diagonal is added to the diagonal. This keeps weights near their float values where
   the data do not determine them. The last quarter of the data is held out in every layer. By the error on it each
   layer chooses d for W*, and with few bits another d for the rounding. W itself instead of W* is a candidate too.
1. Scales: each channel tries several scales up to its present one, and keeps the one with the least error after
   nearest rounding.
2. GPTQ (Frantar et al. 2023, arXiv 2210.17323): the weights are rounded input by input, the most important input first.
   The Cholesky factor of H^-1 moves each rounding error to the weights that are not rounded yet.
3. Coordinate descent (QuantEase: Behdin et al. 2023, arXiv 2309.01885): each code in turn is set to its best value
   given all others, for several rounds. Between rounds, least squares finds for each channel the best scale of its
   codes (COMQ: Zhang et al. 2024, arXiv 2403.07134). No step can increase the error.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import linalg

from qjax.contrib.post_training.as_matmul import Matrix, Moments, errors_on, moments, parted, rows_of
from qjax.contrib.post_training.gptq_layer import Layer, target
from qjax.contrib.post_training.layerwise_runner import Stop, Stream, Walk
from qjax.contrib.post_training.simulated import grid_of, qparams_of, set_qparams
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.numerics.affine import QParams
from qjax.support.batches import Batches, Inputs
from qjax.support.tables import decibels_text, table
from qjax.training.scan_layers import Part, quantizer_of
from qjax.training.weights import parameters

DAMPING = (0.01, 0.1, 1.0, 10.0, float("inf"))
"""The values of d that are tried for W*; infinity stands for W itself."""
ROUNDING = (0.01, 0.1, 1.0)
"""The values of d that are tried when rounding weights of at most `FEW` bits; with more bits the middle one is used."""
FEW = 6


@dataclasses.dataclass(frozen=True)
class SolvedLayer:
    """Result of one layer. Errors are `sum (y - y_q)^2 / sum y^2` on the calibration data, before bias and activation.

    Attributes:
      name: of its weight.
      nearest: with the scales and codes before this step.
      solved: with those after it.
      changed, weights: how many codes changed, out of how many.
    """

    name: str
    nearest: float
    solved: float
    changed: int
    weights: int


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of `gptq`; `str()` is a table.

    Attributes:
      layers: one entry for each layer, in the order of execution.
      left: weights that did not change -> why.
    """

    layers: tuple[SolvedLayer, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        rows = [
            [s.name, decibels_text(s.nearest), decibels_text(s.solved), f"{s.changed} of {s.weights}"]
            for s in self.layers
        ]
        text = table(["weight", "nearest, dB", "solved, dB", "codes changed"], rows)
        return "\n".join([text, *(f"{name}: nearest, {why}" for name, why in self.left.items())])


def gptq(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    rounds: int = 2,
    damping: float | None = None,
    progress: bool | None = None,
) -> Solution:
    """Choose codes and scales of all dense layers and convolutions such that the error of their outputs is least.

    It works layer by layer, in one pass over the model; the module's docstring has the method. The float weights become
    `code * scale`, and biases (or running means of a batch norm) directly after a layer absorb the mean error. Scales
    per channel, per tensor and per group all work; those of groups do not change. Each layer of a scan has its own
    moments, and gets the result that it would get outside of the scan.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They and the
        activations between two layers stay in memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters, without quantizers, are the float model's; None is `qmodel` as it is now.
      rounds: of coordinate descent; 0 keeps the codes of GPTQ.
      damping: the fraction of the mean of H's diagonal that is added to it; None chooses it for each layer, see the
        module.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch; no dense layer or convolution has an unchanged parameter as its weight; the damping
        is negative, not finite, or too small for the data.

    Examples:
      ```python
      print(qjax.training.gptq(qmodel, batches))
      ```
    """
    check_quantized(qmodel, "gptq")
    if damping is not None and not 0 <= damping < float("inf"):
        raise ValueError(f"gptq: damping: expected a finite number that is not negative, got {damping!r}.")
    kept = list(Batches(batches, inputs, "gptq").arguments())
    walk = Walk(qmodel, kept)
    if not walk.items:
        reasons = "; ".join(f"{name}: {why}" for name, why in walk.left.items()) or "it has no quantized weight"
        raise ValueError(f"gptq: expected a dense layer or a convolution, got none. {reasons}.")
    options = {"rounds": rounds, "damping": damping, "progress": progress}
    try:
        return solve(qmodel, reference or qmodel, walk, kept, **options)
    except linalg.LinAlgError as error:
        raise ValueError(
            f"gptq: expected inputs of a layer that determine its weights, but their moments have no inverse with "
            f"damping {damping!r} ({error}). Use more damping, such as 0.01, or more data."
        ) from error


def solve(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    rounds: int = 2,
    damping: float | None = None,
    carried: bool = True,
    progress: bool | None = None,
) -> Solution:
    """`gptq` along a walk that has been compiled already; without `carried` each layer preserves `x_q W`, not `x W`."""
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False, passing=True)
    shifts = [item.shift for item in walk.items]
    paths = {path for item in walk.items for path in (item.name, item.shift) if path is not None}
    variables = parameters(qmodel, paths)
    layers: list[SolvedLayer] = []

    def visit(stop: Stop) -> None:
        product = stop.product
        name, q = product.name, quantizer_of(qmodel.plan.by_name, product.name)
        matrix = Matrix(product)
        pairs = rows_of(stop.products, stop.data)
        if not carried:
            pairs = [(a, a) for a, _ in pairs]
        movable = product.shift is not None and shifts.count(product.shift) == 1
        fit, held = (pairs, []) if damping is not None else parted(pairs)
        w = matrix.columns(np.asarray(reals.parameters[name], np.float64))
        seen = moments(fit, w, centred=movable)
        qparams = qparams_of(qmodel, name)

        def error_of(w: np.ndarray, solved: np.ndarray) -> float:
            return float(errors_on(held or fit, w, solved, centred=movable).sum())

        layer = _layer(matrix, qparams, seen, w, error_of, damping, carried=carried)
        del w  # it is as large as the codes
        nearest = layer.codes_of(np.asarray(own.parameters[name], np.float64))
        codes, scale = layer.solved(nearest, rounds)
        layer.release()
        used = set_qparams(qmodel, name, QParams(scale, qparams.zero_point, q.spec))
        solved = codes * layer.spread(np.asarray(used.scale))
        _set(variables[name], own, name, matrix.restored(solved))
        own.grids[name] = grid_of(q, used)
        if movable:
            path, sign = str(product.shift), 1.0 if product.adds else -1.0
            x, y = seen.means
            mean = (y - np.squeeze(np.matmul(x[:, None], solved), 1)).ravel()
            shift = np.asarray(reals.parameters[path], np.float64) + sign * mean
            _set(variables[path], own, path, shift)
        signal = max(float(seen.signal.sum()), 1e-300)
        layers.append(
            SolvedLayer(
                name,
                float(seen.errors(nearest * layer.scale).sum()) / signal,
                float(seen.errors(solved).sum()) / signal,
                int((codes != nearest).sum()),
                int(codes.size),
            )
        )

    walk.run([own, reals], batches, visit, what="gptq: layer", progress=progress)
    return Solution(tuple(layers), dict(walk.left))


def _layer(
    matrix: Matrix,
    qparams: QParams,
    seen: Moments,
    w: np.ndarray,
    error_of: Callable[[np.ndarray, np.ndarray], float],
    damping: float | None,
    *,
    carried: bool,
) -> Layer:
    """Solve the layer with the given damping, or with the candidate that has the least error."""
    if damping is not None:
        return Layer(matrix, seen, qparams, target(seen, w, damping), damping, alone=True)
    # Without earlier errors, the float weights themselves are the target.
    wanted = min((target(seen, w, d) for d in DAMPING), key=lambda found: error_of(w, found)) if carried else w
    choices = ROUNDING if qparams.spec.bits <= FEW else ROUNDING[1:2]
    # One at a time, because each holds matrices of the size of H.
    tried = (Layer(matrix, seen, qparams, wanted, d, alone=len(choices) == 1) for d in choices)
    return min(tried, key=lambda one: error_of(w, one.rounded())) if len(choices) > 1 else next(tried)


def _set(variable: nnx.Variable[Any] | Part, stream: Stream, path: str, value: np.ndarray) -> None:
    variable[...] = jnp.asarray(value, variable[...].dtype)
    stream.take(path, variable)
