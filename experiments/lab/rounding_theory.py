"""What roundings of the weights do to each product alone, and from that to the class scores of the whole network."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax.contrib.post_training.as_matmul import Matrix, moments, rows_of
from qjax.contrib.post_training.layerwise_runner import Stop, Stream, Walk


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """What a product reads in the float network, and its weights.

    gram: mean x^T x [groups, inputs, inputs]. mean: E[x] [groups, inputs]. weights: [groups, inputs, channels]. All are
    float64. matrix: between the weight's own shape and that of `weights`.
    """

    gram: np.ndarray
    mean: np.ndarray
    weights: np.ndarray
    matrix: Matrix


def inputs_of(qmodel: Any, batches: Sequence[np.ndarray], names: Sequence[str]) -> dict[str, Inputs]:
    """The named weights' products on these batches, all quantizers off."""
    kept = [(x,) for x in batches]
    reals, found = Stream.of(qmodel, quantized=False), dict[str, Inputs]()

    def visit(stop: Stop) -> None:
        name, matrix = stop.product.name, Matrix(stop.product)
        if name in names:
            w = matrix.columns(np.asarray(reals.parameters[name], np.float64))
            seen = moments(rows_of(stop.products, (stop.data[0], stop.data[0])), w)
            found[name] = Inputs(seen.quantized, seen.means[0], w, matrix)

    Walk(qmodel, kept).run([reals], kept, visit)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded:
    """A product under two roundings of its weights, from the second moments of its inputs.

    nearest, learned: the weights [groups, inputs, channels], real numbers on the grid.
    noise: the mean squared error of its output, of the nearest ones. mean: what of it the channels' mean errors are.
    left: the error of the learned ones.
    """

    nearest: np.ndarray
    learned: np.ndarray
    noise: float
    mean: float
    left: float


def rounded(layer: Inputs, codes: np.ndarray, scale: np.ndarray, low: int, high: int) -> Rounded:
    """codes, scale: as `layer.weights`; low, high: the ends of the grid."""
    nearest, learned = codes * scale, descended(layer, codes, scale, low, high) * scale
    error = nearest - layer.weights
    mean = np.einsum("gk,gkn->gn", layer.mean, error)
    return Rounded(nearest, learned, _error(layer, nearest), float(np.mean(mean**2)), _error(layer, learned))


def _error(layer: Inputs, w: np.ndarray) -> float:
    """The mean over channels of d^T G d."""
    d = w - layer.weights
    return float(np.mean(np.sum(d * np.matmul(layer.gram, d), 1)))


def descended(layer: Inputs, codes: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    """Codes that no single change from up to down or back makes better, found from the nearest ones; float64.

    In each channel the change that lowers d^T G d most is made, until there is none.
    """
    floor = np.clip(np.floor(layer.weights / scale), low, high)
    other = np.where(codes > floor, floor, np.clip(floor + 1, low, high))
    codes, other = codes.astype(np.float64), np.where(np.abs(codes - other) > 1, codes, other)
    slope = np.matmul(layer.gram, codes * scale - layer.weights)
    square = np.diagonal(layer.gram, axis1=1, axis2=2)[:, :, None]
    groups, channels = np.indices((codes.shape[0], codes.shape[2]))
    for _ in range(4 * codes.shape[1]):
        move = (other - codes) * scale
        change = move * (2 * slope + square * move)
        chosen = change.argmin(1)
        at = (groups, chosen, channels)
        better = change[at] < -1e-12 * np.abs(slope[at] * scale[at])
        if not better.any():
            break
        step = np.where(better, move[at], 0.0)
        codes[at], other[at] = np.where(better, other[at], codes[at]), np.where(better, codes[at], other[at])
        # [groups, channels, inputs]: the chosen rows of the symmetric G
        slope += np.swapaxes(layer.gram[groups, chosen] * step[..., None], 1, 2)
    return codes


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of the class scores against the float network's, dB. first: gain of learned rounding in the first product."""

    nearest: float
    gain: float
    corrected: float
    first: float


def expected(model: Any, images: np.ndarray, layers: Mapping[str, Inputs], found: Mapping[str, Rounded]) -> Expected:
    """Each weight is replaced alone in the float network; the squared errors of the scores then add up."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    reals = np.asarray(run(state, images), np.float64)

    def noise(name: str, w: np.ndarray) -> float:
        variable, matrix = flat[name], layers[name].matrix
        before = variable[...]
        variable[...] = jax.numpy.asarray(matrix.restored(w), before.dtype)
        scores = np.asarray(run(state, images), np.float64)
        variable[...] = before
        return float(np.mean((scores - reals) ** 2))

    own = {name: noise(name, one.nearest) for name, one in found.items()}
    learned = sum(noise(name, one.learned) for name, one in found.items())
    corrected = sum(own[name] * (1 - one.mean / one.noise) for name, one in found.items())
    total, (first, *_) = sum(own.values()), found.values()
    signal = float(np.mean(reals**2))
    return Expected(
        decibels(signal / total),
        decibels(total / learned),
        decibels(total / corrected),
        decibels(first.noise / first.left),
    )


def decibels(ratio: float) -> float:
    return float(10 * np.log10(ratio))


def noisy(scores: np.ndarray, sqnr: float, rng: np.random.Generator, draws: int = 4) -> np.ndarray:
    """[draws, n, classes]: the scores with independent normal noise of that SQNR, dB."""
    scores = scores.astype(np.float64)
    deviation = np.sqrt(np.mean(scores**2)) * 10 ** (-sqnr / 20)
    return scores + deviation * rng.standard_normal((draws, *scores.shape))


def changed(scores: np.ndarray, sqnr: float, rng: np.random.Generator) -> float:
    """The share of examples whose class that noise changes."""
    return float(np.mean(noisy(scores, sqnr, rng).argmax(-1) != scores.argmax(-1)))


def points(scores: np.ndarray, labels: np.ndarray, sqnr: float, rng: np.random.Generator) -> float:
    """Accuracy under that noise, percent."""
    return 100 * float(np.mean(noisy(scores, sqnr, rng).argmax(-1) == labels))
