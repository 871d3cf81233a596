"""Oracles of accumulators: Python's integers, one product after the other."""

from collections.abc import Sequence

import numpy as np

from qjax.numerics.accumulator import Accumulator


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def wrapped(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def saturated(products: Sequence[int], bits: int) -> tuple[int, int]:
    """The register after all products, and how often it saturated."""
    acc, events = 0, 0
    for product in products:
        total = acc + product
        acc = clamp(total, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        events += acc != total
    return acc, events


def paired(products: Sequence[int]) -> tuple[int, int]:
    """The sum of int16 pairs, and how many of them saturated."""
    products = [*products, 0] if len(products) % 2 else list(products)
    acc, events = 0, 0
    for a, b in zip(products[0::2], products[1::2], strict=True):
        pair = clamp(a + b, -32768, 32767)
        acc, events = acc + pair, events + (pair != a + b)
    return acc, events


def register(
    accumulator: Accumulator,
    codes: Sequence[int],
    weights: Sequence[int],
    outside: Sequence[bool],
    zero_point: int,
    tap: int,
) -> int:
    """What stands before the bias, the zero point's share taken off, for one output.

    codes, weights: in the order of the sum; outside: whether the code stands for a position outside of the image.
    tap: how many consecutive products belong to one position of the window.
    """
    codes, weights = ([int(v) for v in values] for values in (codes, weights))
    share = zero_point * sum(weights)
    if not accumulator.pairs:
        subtracted = zero_point if accumulator.operands == "centered" else 0
        products = [(c - subtracted) * w for c, w in zip(codes, weights, strict=True)]
        share = 0 if accumulator.operands == "centered" else share
        if accumulator.overflow == "saturate":
            return saturated(products, accumulator.bits)[0] - share
        return wrapped(sum(products), accumulator.bits) - share
    if accumulator.padding == "skip":
        kept = [w for w, out in zip(weights, outside, strict=True) if not out]
        codes = [0 if out else c for c, out in zip(codes, outside, strict=True)]
        share = zero_point * sum(kept)
    products = [c * w for c, w in zip(codes, weights, strict=True)]
    size = tap if accumulator.unit == "tap" else max(len(products), 1)
    return sum(paired(products[k : k + size])[0] for k in range(0, len(products), size)) - share


def columns(function, *arrays: np.ndarray) -> np.ndarray:
    """`function` of the lists along axis 0 of rows (K, batch, M) and (K, batch, N), for every output."""
    x, w = arrays
    out = np.empty((x.shape[1], x.shape[2], w.shape[2]), object)
    for b, m, n in np.ndindex(*out.shape):
        out[b, m, n] = function([int(p) * int(q) for p, q in zip(x[:, b, m], w[:, b, n], strict=True)])
    return out
