"""AdaRound: learns for each weight whether to round up or down (Nagel et al. 2020, arXiv 2004.10568).

Rounding to nearest minimises the error of each weight. What matters is the error of the layer's output, in which errors
of weights add up with their signs. AdaRound minimises that error over all ways to round, layer by layer, without labels
and with the scales unchanged.

The paper draws batches of examples. The squared error of a product is a quadratic function of the weights, whose
coefficients are second moments of the layer's inputs. Every step here therefore has the gradient of all data, and its
cost does not depend on the number of examples.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qjax.contrib.post_training.as_matmul import Matrix, Pairs, errors_on, moments, rows_of
from qjax.contrib.post_training.layerwise_runner import Stop, Stream, Walk
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.ops import products
from qjax.support.batches import Batches, Inputs
from qjax.support.tables import table
from qjax.training.weights import code_bounds, codes_of, parameters, quantized_weights, set_codes

ZETA, GAMMA = 1.1, -0.1
"""The sigmoid is stretched to this interval and clipped, so that it reaches 0 and 1 (section 3.2 of the paper)."""


@dataclasses.dataclass(frozen=True)
class RoundedLayer:
    """Result of one layer. Errors are means of `(y - y_q)**2` over the calibration data, before bias and activation.

    Attributes:
      name: of its weight.
      nearest, learned: the error with nearest rounding, and with the codes that were chosen.
      signal: the mean of `y**2`.
      changed, weights: how many codes differ from nearest rounding, out of how many.
    """

    name: str
    nearest: float
    learned: float
    signal: float
    changed: int
    weights: int


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The result of `adaround`; `str()` is a table.

    Attributes:
      layers: one entry for each layer whose codes were learned.
      left: weights that keep nearest rounding -> why.
    """

    layers: tuple[RoundedLayer, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        rows = [
            [one.name, f"{one.nearest:.4g}", f"{one.learned:.4g}", f"{one.changed} of {one.weights}"]
            for one in self.layers
        ]
        text = table(["weight", "error, nearest", "error, learned", "codes changed"], rows)
        return "\n".join([text, *(f"{name}: nearest, {why}" for name, why in self.left.items())])


@dataclasses.dataclass(frozen=True)
class Options:
    """steps, rate: of the optimizer. weight: of the regulariser. betas: its first and last exponent."""

    steps: int
    rate: float
    weight: float
    betas: tuple[float, float] = (20.0, 2.0)
    warm_up: float = 0.2


def adaround(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    steps: int = 1000,
    learning_rate: float = 1e-2,
    regularization: float = 1.0,
    progress: bool | None = None,
) -> Rounding:
    """Round the weights of dense layers and convolutions up or down such that their outputs change least.

    It works layer by layer in the order of execution. With x the layer's input in the float model, x_q its input in the
    quantized model (whose earlier layers are rounded already) and y = W x, it minimises over V

        mean (y - W_q x_q)^2 + regularization * mean (1 - |2 h(V) - 1|^beta),
        W_q = s * clip(floor(W / s) + h(V), low, high),  h(V) = clip(sigmoid(V) * 1.2 - 0.1, 0, 1)

    (equations 21 to 25 of the paper, without the activation), the first mean taken per channel relative to that of
    nearest rounding. The regulariser starts after a fifth of the steps; then beta falls from 20 to 2 along a cosine,
    and h ends at 0 or 1. Each output channel keeps the learned codes only if its error on the rows used is less than
    with nearest rounding, so no layer's error on them can grow. Then the float weights are set to `code * scale`, and
    everything downstream (`convert`, `verify`) uses the learned codes. The earlier float weights are gone from
    `qmodel`, so keep a copy (`nnx.clone`) to compare with.

    Args:
      qmodel: the quantized model; its weights are changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They and the
        activations between two layers stay in memory. At most 8192 rows of a layer's input are used of each batch.
      inputs: picks the model's arguments out of a batch.
      steps, learning_rate: of Adam, for each layer.
      regularization: the weight of the term that drives h to 0 or 1.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: no batch, or no dense layer or convolution whose weight is an unchanged parameter.

    Examples:
      ```python
      print(qjax.training.adaround(qmodel, batches, steps=100))
      ```
    """
    check_quantized(qmodel, "adaround")
    kept = list(Batches(batches, inputs, "adaround").arguments())
    walk = Walk(qmodel, kept)
    if not walk.items:
        reasons = "; ".join(f"{name}: {why}" for name, why in walk.left.items()) or "it has no quantized weight"
        raise ValueError(f"adaround: expected a dense layer or a convolution to round, got none. {reasons}.")
    options = Options(steps, learning_rate, regularization)
    return learn(qmodel, qmodel, walk, kept, options, progress=progress)


def learn(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    options: Options,
    *,
    progress: bool | None = None,
) -> Rounding:
    """`adaround` along a walk that has been compiled already."""
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False)
    layers: list[RoundedLayer] = []

    def visit(stop: Stop) -> None:
        name, matrix = stop.product.name, Matrix(stop.product)
        w = matrix.columns(np.asarray(reals.parameters[name], np.float64))
        layers.append(_round(qmodel, matrix, w, rows_of(stop.products, stop.data), options))
        (variable,) = parameters(qmodel, [name]).values()
        own.take(name, variable)

    walk.run([own, reals], batches, visit, what="adaround: layer", progress=progress)
    return Rounding(tuple(layers), dict(walk.left))


def _round(qmodel: QuantizedModel, matrix: Matrix, w: np.ndarray, pairs: Pairs, options: Options) -> RoundedLayer:
    """Learn one layer's codes and store them. w: its float weights, float64 [groups, K, N]."""
    name, seen = matrix.product.name, moments(pairs, w)
    (grid,) = quantized_weights(qmodel, [name]).values()
    (now,) = (np.asarray(c) for c in codes_of(qmodel, [name]).values())

    def spread(values: Any) -> np.ndarray:
        return matrix.columns(np.broadcast_to(np.asarray(values, np.float64), now.shape))

    nearest, scale = spread(now), spread(grid.scale)
    low, high = map(spread, code_bounds(grid))
    steps = w / scale
    # The nearest code is one of the two, even where float32 and float64 break a tie differently. A code that another
    # method chose may be neither; it is kept unless the learned codes are better.
    floor = np.clip(np.floor(steps), low, high)
    floor = np.where(np.abs(nearest - steps) <= 1, np.clip(floor, np.maximum(nearest - 1, low), nearest), floor)
    start = np.clip(steps - floor, 0.01, 0.99)
    # The inverse of h.
    v = -np.log((ZETA - GAMMA) / (start - GAMMA) - 1)
    base = errors_on(pairs, w, nearest * scale)
    # Divide by 1 where nearest rounding has no error.
    unit = np.where(base > 0, base, 1.0)
    # mean (y - x_q W_q)^2 = d^T H d - 2 d^T c + constant, with d = W_q - W and c = mean x_q^T (y - x_q W)
    numbers = (seen.quantized, seen.toward - np.matmul(seen.quantized, w), w, floor, scale, low, high, unit)
    h = _learn(v, numbers, options)
    codes = np.clip(floor + (h >= 0.5), low, high)
    found = errors_on(pairs, w, codes * scale)
    codes = np.where((found < base)[:, None], codes, nearest)
    set_codes(qmodel, {name: matrix.restored(codes).astype(np.int32)})
    return RoundedLayer(
        name,
        float(base.mean()),
        float(np.minimum(found, base).mean()),
        float(seen.signal.mean()),
        int((codes != nearest).sum()),
        int(codes.size),
    )


def rectified_sigmoid(v: jax.Array) -> jax.Array:
    """`clip(sigmoid(v) * (zeta - gamma) + gamma, 0, 1)`, equation 23 of the paper."""
    return jnp.clip(jax.nn.sigmoid(v) * np.float32(ZETA - GAMMA) + np.float32(GAMMA), 0.0, 1.0)


def _learn(v: np.ndarray, numbers: tuple[np.ndarray, ...], options: Options) -> np.ndarray:
    """h(V) after the last step, [groups, K, N]."""
    schedule = np.asarray([annealed(step, options) for step in range(options.steps)], np.float32).reshape(-1, 2)
    # optax promotes dtypes and ranks, which the caller's JAX settings may forbid.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        given = [np.asarray(value, np.float32) for value in numbers]
        return np.asarray(_descend(np.asarray(v, np.float32), given, schedule, np.float32(options.rate)))


@jax.jit
def _descend(v: jax.Array, numbers: list[jax.Array], schedule: jax.Array, rate: jax.Array) -> jax.Array:
    """Run all steps. schedule: the regulariser's weight and exponent at each of them, float32 [steps, 2]."""
    moments, toward, w, floor, scale, low, high, unit = numbers
    adam = optax.adam(rate)

    def loss_of(v: jax.Array, weight: jax.Array, beta: jax.Array) -> jax.Array:
        h = rectified_sigmoid(v)
        d = jnp.clip(floor + h, low, high) * scale - w
        product = products.dot_general(moments, d, (((2,), (1,)), ((0,), (0,))), jnp.float32)
        error = jnp.sum(d * (product - 2 * toward), axis=1)
        return jnp.mean(error / unit) + weight * jnp.mean(1 - jnp.abs(2 * h - 1) ** beta)

    def step(carry: tuple[jax.Array, Any], now: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        v, state = carry
        updates, state = adam.update(jax.grad(loss_of)(v, now[0], now[1]), state, v)
        moved: Any = optax.apply_updates(v, updates)
        return (moved, state), None

    (v, _), _ = jax.lax.scan(step, (v, adam.init(v)), schedule)
    return rectified_sigmoid(v)


def annealed(step: int, options: Options) -> tuple[float, float]:
    """The regulariser's weight and exponent at a step."""
    warm = options.warm_up * options.steps
    if step < warm:
        return 0.0, options.betas[0]
    done = (step - warm) / max(1.0, options.steps - warm)
    first, last = options.betas
    return options.weight, last + 0.5 * (first - last) * (1 + float(np.cos(done * np.pi)))
