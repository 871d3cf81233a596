"""How far two roundings drift apart along a chain of layers, from the chain's scales and activations alone.

Two runs of one chain agree until one code of one sample differs; from there the sample's difference grows layer by
layer, whatever the targets do later: codes are rounded again and again, and a rounded difference is greater in the mean
square than the difference. With u uniform and d fixed, the integer round(u + d) - round(u) is one of the two integers
beside d and d in the mean: it is k with probability max(0, 1 - |d - k|), and differs from 0 with min(1, |d|).

A product turns codes that differ by a mean square of D2 into d ~ N(0, gain * D2), being a sum of many independent
products. This is a mean-field estimate: it takes outputs as independent of each other, u as uniform, and a relu as open
for half of its inputs.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.lab.chains import Layer, Quantized

REACH = 60
"""Greatest difference of codes that is followed."""
STEPS = np.arange(-REACH, REACH + 1)
_NORMAL = np.linspace(-5, 5, 401)
_DENSITY = np.exp(-(_NORMAL**2) / 2) / np.sum(np.exp(-(_NORMAL**2) / 2))


def rounded(differences: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The distribution over STEPS of a difference of codes, given that of the real values behind it."""
    clipped = np.clip(differences.ravel(), -REACH, REACH - 1e-9)
    low = np.floor(clipped)
    fraction, index, weight = clipped - low, low.astype(int) + REACH, probabilities.ravel()
    found = np.bincount(index, weight * (1 - fraction), STEPS.size)
    return found + np.bincount(index + 1, weight * fraction, STEPS.size)


def product(variance: float, open_share: float) -> np.ndarray:
    """The distribution over STEPS behind a product and its relu, d ~ N(0, variance) where the relu is open."""
    found = open_share * rounded(_NORMAL * variance**0.5, _DENSITY)
    found[REACH] += 1 - open_share
    return found


def two_roundings(layer: Layer) -> float:
    """The share of codes in which two roundings (gemmlowp's, NEON's) differ from one: the mean of 2^-(r+1).

    The first rounding makes a tie of one in 2^r high words; the second then errs for one half of those.
    """
    return float(np.mean(2.0 ** -(layer.right + 1.0)))


def open_share(chain: Quantized) -> float:
    """The share of products that a relu lets pass."""
    return 0.5 if chain.relu else 1.0


@dataclasses.dataclass(frozen=True)
class Spread:
    """Behind each layer, float64 [depth].

    share: of the codes, that differ. square: the mean square of the differences, in steps. touched: the share of
    samples in which a code has differed so far.
    """

    share: np.ndarray
    square: np.ndarray
    touched: np.ndarray


def spread(chain: Quantized) -> Spread:
    """How differences spread that arise as `two_roundings` says, in products only."""
    depth, width = len(chain.layers), chain.layers[0].right.size
    clean, share, square, touched = 1.0, np.zeros(depth), np.zeros(depth), np.zeros(depth)
    for first, layer in enumerate(chain.layers):
        start = 1 - (1 - open_share(chain) * two_roundings(layer)) ** width
        one = np.zeros(STEPS.size)
        one[[REACH, REACH + 1]] = 1 - 1 / width, 1 / width
        if chain.residual:
            one = rounded(STEPS * layer.step_branch / layer.step_out, one)
        life = _life(chain, one, chain.layers[first + 1 :])
        share[first:] += [clean * start * (1 - codes[REACH]) for codes in life]
        square[first:] += [clean * start * float(codes @ STEPS**2) for codes in life]
        touched[first:] += clean * start
        clean *= 1 - start
    return Spread(share, square, touched)


def _life(chain: Quantized, codes: np.ndarray, layers: Sequence[Layer]) -> list[np.ndarray]:
    """The distribution over STEPS of a touched sample's differences, now and behind each of the layers."""
    found = [codes]
    for layer in layers:
        branch = product(layer.gain * float(codes @ STEPS**2), open_share(chain))
        if chain.residual:
            kept = STEPS[:, None] * layer.step_in / layer.step_out
            added = STEPS[None, :] * layer.step_branch / layer.step_out
            codes = rounded(kept + added, codes[:, None] * branch[None, :])
        else:
            codes = branch
        found.append(codes)
    return found


def truncation_bias(chain: Quantized) -> np.ndarray:
    """The mean difference of codes behind each layer, floor against nearest, for scales that are powers of two.

    The floor of a multiple of 2^-n is less than its value by (1 - 2^-n) / 2 in the mean. A product loses that where its
    relu is open, a sum for the bits that its output does not have. What becomes of a loss v in later layers depends on
    its direction. Weights of mean 0 turn what is orthogonal to the activations x into something of mean 0; but along x,
    v = -c x with c = -<v, x> / <x, x>, it comes out as -c times the next activations, whose mean a relu makes positive.
    A residual sum keeps the mean of the orthogonal part as well. float64 [depth], in steps.
    """
    along, across = 0.0, 0.0  # c, and the mean of the orthogonal part in real values
    found: list[float] = []
    for layer in chain.layers:
        # a right shift r behind the high word drops r + 1 bits where a scale is a power of two
        bits = float(np.mean(1 - 2.0 ** -(layer.right + 1.0)))
        share, x = open_share(chain), layer.output
        loss = -share * bits / 2 * layer.step_branch
        # <v, x> of a loss where the relu is open: a closed output is 0, the residual input does not know
        inner = loss * (layer.branch.mean / share + (layer.input.mean if chain.residual else 0.0))
        across = across + loss if chain.residual else loss
        if chain.residual:
            finest = min(layer.step_in, layer.step_branch)
            cut = -max(0.0, 1 - finest / layer.step_out) / 2 * layer.step_out
            across, inner = across + cut, inner + cut * x.mean
        fresh = -inner / x.square
        along, across = along + fresh, across + fresh * x.mean
        found.append((across - along * x.mean) / layer.step_out)
    return np.array(found)
