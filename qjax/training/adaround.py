"""AdaRound: learns for each weight whether to round up or down (Nagel et al. 2020, arXiv 2004.10568).

Nearest rounding minimises the error of each weight. What matters is the error of the layer's output, where errors of
weights add up with signs. AdaRound minimises that over all ways to round, layer by layer, without labels and with the
scales as they are.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qjax.batches import Batches, Inputs
from qjax.qmodel import QuantizedModel, check_quantized
from qjax.summary import table
from qjax.training.products import Product
from qjax.training.walk import Stop, Stream, Walk
from qjax.training.weights import code_bounds, codes_of, parameters, quantized_weights, set_codes

ZETA, GAMMA = 1.1, -0.1
"""The sigmoid is stretched to this interval and clipped, so that it reaches 0 and 1 (section 3.2 of the paper)."""


@dataclasses.dataclass(frozen=True)
class RoundedLayer:
    """One layer. Errors are means of `(y - y_q)**2` over the calibration data, before bias and activation.

    Attributes:
      name: of its weight.
      nearest, learned: the error with nearest rounding, and with the codes that were taken.
      signal: the mean of `y**2`.
      changed, weights: how many codes differ from nearest, of how many.
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
      left: weights that stay at nearest, and why.
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
    """steps, rate, batch: of the optimizer. weight: of the regulariser. betas: its exponent, first and last."""

    steps: int
    rate: float
    batch: int
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
    batch_size: int = 64,
    regularization: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Rounding:
    """Round the weights of dense layers and convolutions up or down so that their outputs change least.

    Layer by layer in the order of execution. With x the layer's input in the float model, x_q its input in the
    quantized model (the layers before it rounded already) and y = W x, it minimises over V

        mean (y - W_q x_q)^2 + regularization * mean (1 - |2 h(V) - 1|^beta),
        W_q = s * clip(floor(W / s) + h(V), low, high),  h(V) = clip(sigmoid(V) * 1.2 - 0.1, 0, 1)

    (equations 21 to 25 of the paper, without the activation), the first mean taken per channel as a part of nearest
    rounding's. beta falls from 20 to 2 along a cosine, after a fifth of the steps without regulariser; h ends at 0 or
    1. Each output channel keeps what was learned only if its error over all of the data is less than with nearest
    rounding, so no layer's error can be greater. Then the real weights are set to `code * scale`: everything
    downstream (`convert`, `verify`) uses the learned codes. The earlier float weights are gone from `qmodel`: keep a
    copy (`nnx.clone`) to compare with.

    Args:
      qmodel: the quantized model; its weights are changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything. They are kept, and
        one layer's inputs and outputs with them.
      inputs: what of a batch the model is called with.
      steps, learning_rate, batch_size: of Adam, for each layer; batch_size counts examples.
      regularization: the weight of the term that drives h to 0 or 1.
      seed: of the order of examples.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).

    Raises:
      ValueError: no batch, or no dense layer or convolution whose weight is an unchanged parameter.
    """
    check_quantized(qmodel, "adaround")
    kept = list(Batches(batches, inputs, "adaround").arguments())
    walk = Walk(qmodel, kept)
    if not walk.items:
        reasons = "; ".join(f"{name}: {why}" for name, why in walk.left.items()) or "it has no quantized weight"
        raise ValueError(f"adaround: expected a dense layer or a convolution to round, got none. {reasons}.")
    options = Options(steps, learning_rate, batch_size, regularization)
    return learn(qmodel, qmodel, walk, kept, options, seed=seed, progress=progress)


def learn(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    options: Options,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> Rounding:
    """`adaround` along a walk that is compiled already."""
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False)
    rng = np.random.default_rng(seed)
    layers: list[RoundedLayer] = []

    def visit(stop: Stop) -> None:
        product = stop.product
        w = reals.parameters[product.name]
        x = np.concatenate([np.asarray(part) for part in stop.data[0]])
        outputs = [one(part, w) for one, part in zip(stop.products, stop.data[1], strict=True)]
        y = np.concatenate([np.asarray(part) for part in outputs])
        layers.append(_round(qmodel, product, np.asarray(w, np.float64), x, y, options, rng))
        (variable,) = parameters(qmodel, [product.name]).values()
        own.take(product.name, variable)

    walk.run([own, reals], batches, visit, what="adaround: layer", progress=progress)
    return Rounding(tuple(layers), dict(walk.left))


def _round(
    qmodel: QuantizedModel,
    product: Product,
    w: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    options: Options,
    rng: np.random.Generator,
) -> RoundedLayer:
    """Learn one layer's codes and set them. w: its float weights, in float64."""
    name = product.name
    (grid,) = quantized_weights(qmodel, [name]).values()
    (nearest,) = (np.asarray(c) for c in codes_of(qmodel, [name]).values())
    low, high = (np.asarray(end) for end in code_bounds(grid))
    scale = np.broadcast_to(np.asarray(grid.scale), nearest.shape)
    steps = w / scale.astype(np.float64)
    # The nearest code is one of the two, also where float32 and float64 decide a tie differently. A code that another
    # method chose may be neither; it stays unless the learned ones are better.
    floor = np.clip(np.floor(steps), low, high)
    floor = np.where(np.abs(nearest - steps) <= 1, np.clip(floor, np.maximum(nearest - 1, low), nearest), floor)
    start = np.clip(steps - floor, 0.01, 0.99)
    # The inverse of h.
    v = -np.log((ZETA - GAMMA) / (start - GAMMA) - 1).astype(np.float32)
    base = _errors(product, x, y, nearest * scale)
    learned = _learn(product, x, y, floor.astype(np.float32), v, scale, low, high, base / x.shape[0], options, rng)
    codes = np.clip(floor + (learned >= 0.5), low, high)
    found = _errors(product, x, y, codes * scale)
    codes = np.where(np.broadcast_to(found < base, codes.shape), codes, nearest).astype(np.int32)
    set_codes(qmodel, {name: codes})
    return RoundedLayer(
        name,
        float(base.sum() / y.size),
        float(np.minimum(found, base).sum() / y.size),
        float(np.sum(np.square(y.astype(np.float64))) / y.size),
        int((codes != nearest).sum()),
        int(codes.size),
    )


def _errors(product: Product, x: np.ndarray, y: np.ndarray, w: np.ndarray, rows: int = 256) -> np.ndarray:
    """float64, broadcastable to the weight: each channel's sum of squared errors over all examples."""
    w = w.astype(np.float32)
    total: Any = 0.0
    for first in range(0, len(x), rows):
        difference = product(jnp.asarray(x[first : first + rows]), jnp.asarray(w)) - y[first : first + rows]
        total = total + np.asarray(product.summed(jnp.square(difference)), np.float64)
    return total


def rectified_sigmoid(v: jax.Array) -> jax.Array:
    """`clip(sigmoid(v) * (zeta - gamma) + gamma, 0, 1)`, equation 23 of the paper."""
    return jnp.clip(jax.nn.sigmoid(v) * np.float32(ZETA - GAMMA) + np.float32(GAMMA), 0.0, 1.0)


def _learn(
    product: Product,
    x: np.ndarray,
    y: np.ndarray,
    floor: np.ndarray,
    v: np.ndarray,
    scale: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    base: np.ndarray,
    options: Options,
    rng: np.random.Generator,
) -> np.ndarray:
    """h(V) after the last step, of the weight's shape."""
    # Where nearest rounding leaves no error, divide by 1.
    unit = np.where(base > 0, base, 1.0).astype(np.float32)

    def loss_of(v: jax.Array, x: jax.Array, y: jax.Array, weight: jax.Array, beta: jax.Array) -> jax.Array:
        h = rectified_sigmoid(v)
        w = jnp.clip(floor + h, low, high) * scale
        error = product.summed(jnp.square(product(x, w) - y)) / np.float32(x.shape[0])
        return jnp.mean(error / unit) + weight * jnp.mean(1 - jnp.abs(2 * h - 1) ** beta)

    adam = optax.adam(options.rate)

    @jax.jit
    def step(v: jax.Array, state: Any, x: jax.Array, y: jax.Array, weight: jax.Array, beta: jax.Array) -> Any:
        updates, state = adam.update(jax.grad(loss_of)(v, x, y, weight, beta), state, v)
        return optax.apply_updates(v, updates), state

    # optax promotes dtypes and ranks, which the caller's JAX settings may forbid.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _descend(step, adam.init(jnp.asarray(v)), v, x, y, options, rng)


def _descend(
    step: Any, state: Any, v: np.ndarray, x: np.ndarray, y: np.ndarray, options: Options, rng: np.random.Generator
) -> np.ndarray:
    """h(V) after all steps."""
    current: Any = jnp.asarray(v)
    for i, rows in enumerate(_batches(len(x), options, rng)):
        weight, beta = annealed(i, options)
        current, state = step(current, state, x[rows], y[rows], np.float32(weight), np.float32(beta))
    return np.asarray(rectified_sigmoid(current))


def annealed(step: int, options: Options) -> tuple[float, float]:
    """The regulariser's weight and exponent at a step."""
    warm = options.warm_up * options.steps
    if step < warm:
        return 0.0, options.betas[0]
    done = (step - warm) / max(1.0, options.steps - warm)
    first, last = options.betas
    return options.weight, last + 0.5 * (first - last) * (1 + float(np.cos(done * np.pi)))


def _batches(examples: int, options: Options, rng: np.random.Generator) -> Iterable[Sequence[int] | np.ndarray]:
    """Rows of each step: permutations of all examples, cut into batches of one size."""
    size, order = min(options.batch, examples), np.empty(0, np.int64)
    for _ in range(options.steps):
        if len(order) < size:
            order = rng.permutation(examples)
        rows, order = order[:size], order[size:]
        yield rows
