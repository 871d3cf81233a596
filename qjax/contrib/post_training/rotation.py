"""Rotates residual streams (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456) by folding the rotation into the weights.

A few channels of a transformer's residual stream are a hundred times as great as the others. A rotation spreads each
channel over all of them, so that one scale suits the tensor. With the rows x of the stream and an orthogonal Q:

| parameter | becomes |
| --- | --- |
| W, b that write x | W Q, b Q; likewise the rows of tables |
| the scale g and bias c of a norm that reads x | 1, and (c / g) Q |
| W that reads the norm's result | Q^T diag(g) W |
| W that reads x itself | Q^T W |

A norm that subtracts the mean commutes with Q only if Q preserves the vector of ones. So Q = U^T S U: the rows of U are
the constant function and others (a Hadamard matrix times a cosine transform if the width is no power of two), and S has
random signs, with +1 for the constant. Nothing is added at run time, and the float function does not change.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax.api.calibrate import calibrate
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.residual_streams import Residual, find_residuals
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.support.batches import Batches, Inputs
from qjax.training.weights import parameters, weights_of

SAME = 1e-6
"""The greatest noise at the model's output that rounding of the parameters may cause."""


@dataclasses.dataclass(frozen=True)
class Rotated:
    """The result of `rotate`.

    Attributes:
      widths: of the streams that were rotated.
      parameters: how many changed.
      left: why other streams were not.
    """

    widths: tuple[int, ...]
    parameters: int
    left: tuple[str, ...]

    def __str__(self) -> str:
        said = f"{len(self.widths)} residual streams of width {', '.join(map(str, self.widths))}: {self.parameters}"
        return "\n".join([f"{said} parameters changed", *(f"left: {why}" for why in self.left)])


def rotate(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Rotated:
    """Rotate the residual streams of a transformer whose norms precede its layers (pre-norm).

    The float function does not change. A model whose residual stream is a norm's result (BERT) cannot be rotated.

    Args:
      qmodel: the quantized model; its parameters are changed, and it is calibrated again on these batches.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: a model with the same parameters, which are changed in the same way.
      seed: of the rotation.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Returns:
      The streams that were rotated.

    Raises:
      ValueError: there is no batch, no residual stream can be rotated, or a scale of a norm is nearly zero.

    Examples:
      ```python
      class Block(nnx.Module):
          def __init__(self, rngs):
              self.norm = nnx.RMSNorm(8, rngs=rngs)
              self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

          def __call__(self, x):
              return x + self.down(nnx.gelu(self.up(self.norm(x))))


      class Net(nnx.Module):
          def __init__(self, rngs):
              self.embed, self.block = nnx.Linear(8, 8, rngs=rngs), Block(rngs)
              self.norm, self.head = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

          def __call__(self, x):
              return self.head(self.norm(self.block(self.embed(x))))


      qmodel = qjax.quantize(Net(nnx.Rngs(0)), recipe, x)
      print(qjax.training.rotate(qmodel, batches))
      ```
    """
    check_quantized(qmodel, "rotate")
    kept = list(Batches(batches, inputs, "rotate").arguments())
    models = [qmodel] if reference is None else [qmodel, reference]
    return turn(models, Walk(qmodel, kept), kept, seed=seed, progress=progress)


def turn(
    models: Sequence[QuantizedModel],
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> Rotated:
    """Rotate all `models` alike; the first is the quantized one, which is calibrated again."""
    qmodel = models[0]
    call = evaluation_copy(qmodel).trace(*batches[0])
    residuals, left = find_residuals(call, weights_of(qmodel, batches[0]).names)
    if not residuals:
        raise ValueError(
            f"rotate: expected a residual stream between norms, got none{': ' if left else ''}{'; '.join(left)}."
        )
    before = Stream.of(models[-1], quantized=False)
    numbers = {path: np.asarray(value, np.float64) for path, value in before.parameters.items() if _floats(value)}
    changed = rotated(residuals, numbers, seed)
    after = dict(before.parameters)
    after |= {path: jnp.asarray(value, before.parameters[path].dtype) for path, value in changed.items()}
    truth, found = (walk.outputs(Stream(p, before.grids), batches[:1]) for p in (before.parameters, after))
    if not noise_of(truth, found) < SAME:
        raise ValueError("rotate: expected the float function to stay the same, but it changed. The model is restored.")
    for model in models:
        for path, variable in parameters(model, changed).items():
            variable[...] = after[path]
    calibrate(qmodel, list(batches), progress=progress)
    return Rotated(tuple(one.width for one in residuals), len(changed), tuple(left))


def rotated(residuals: Sequence[Residual], numbers: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The parameters that a rotation changes, in float64."""
    found: dict[str, np.ndarray] = {}

    def now(path: str) -> np.ndarray:
        return found.get(path, numbers[path])

    for index, residual in enumerate(residuals):
        q = rotation(residual.width, np.random.default_rng([seed, index]))
        for path, axis in residual.written.items():
            found[path] = _along(now(path), axis, q)
        for path, axis in residual.read.items():
            found[path] = _along(now(path), axis, q)
        for norm in residual.norms:
            scale = np.ones(residual.width) if norm.scale is None else numbers[norm.scale]
            if not np.min(np.abs(scale)) > 1e-4 * np.max(np.abs(scale)):
                raise ValueError(f"rotate: expected scales of a norm that are not zero, got some in {norm.scale!r}.")
            for path, axis in norm.read:
                found[path] = _along(_along(now(path), axis, np.diag(scale)), axis, q)
            if norm.scale is not None:
                found[norm.scale] = np.ones_like(scale)
            if norm.bias is not None:
                found[norm.bias] = np.matmul(numbers[norm.bias] / scale, q)
    return found


def rotation(width: int, rng: np.random.Generator) -> np.ndarray:
    """A symmetric orthogonal matrix that preserves the vector of ones, with entries of about `1 / sqrt(width)`."""
    odd = width
    while odd % 2 == 0:
        odd //= 2
    angles = np.pi * np.outer(np.arange(odd), np.arange(odd) + 0.5) / odd
    rows = np.cos(angles) * np.where(np.arange(odd) == 0, np.sqrt(1 / odd), np.sqrt(2 / odd))[:, None]
    while rows.shape[0] < width:
        rows = np.kron(np.asarray([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2), rows)
    signs = rng.choice([-1.0, 1.0], width)
    signs[0] = 1.0
    return np.matmul(rows.T, signs[:, None] * rows)


def _along(w: np.ndarray, axis: int, q: np.ndarray) -> np.ndarray:
    """A tensor times a symmetric matrix along an axis."""
    return np.moveaxis(np.tensordot(w, q, axes=(axis, 0)), -1, axis)


def _floats(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))
