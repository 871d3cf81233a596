"""Views a dense layer or convolution as one matrix product per group: rows of data times columns of weights.

Methods that choose a weight's codes only need second moments of the rows that are multiplied with the weight, and of
the outputs. The size of these moments does not depend on the number of examples.

| layer | groups | rows | summed axes |
| --- | --- | --- | --- |
| dense, `Einsum` | the batch axes of the product | all other axes of the data | the contracted axes |
| convolution | its groups; one per channel if it is depthwise | the output positions | taps x channels of a group |
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.post_training.products import Product
from qjax.ops import products
from qjax.tracing import Equation

MOST_ROWS = 8192
"""The most rows used of a batch, evenly spaced, because neighbouring positions of an image are nearly alike."""


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """One product as a matrix product: data [groups, rows, K], weights [groups, K, N]."""

    product: Product

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self._equation.in_shapes[self.product.weight]

    def columns(self, w: np.ndarray) -> np.ndarray:
        """A tensor of the weight's shape as [groups, K, N]."""
        if self._conv:
            spec, groups = self._numbers.rhs_spec, self._groups
            out, taps = w.shape[spec[0]], [w.shape[axis] for axis in spec[2:]]
            moved = np.transpose(w, (*spec[2:], spec[1], spec[0]))
            moved = np.moveaxis(moved.reshape(*taps, w.shape[spec[1]], groups, out // groups), -2, 0)
            return moved.reshape(groups, -1, out // groups)
        batch, summed, free = self._axes(self.product.weight)
        moved = np.transpose(w, (*batch, *summed, *free))
        sizes = [math.prod(w.shape[axis] for axis in axes) for axes in (batch, summed, free)]
        return moved.reshape(sizes)

    def restored(self, columns: np.ndarray) -> np.ndarray:
        """Undo `columns`: the tensor in the weight's shape."""
        shape = self.shape
        if self._conv:
            spec, groups = self._numbers.rhs_spec, self._groups
            out, taps = shape[spec[0]], [shape[axis] for axis in spec[2:]]
            moved = columns.reshape(groups, *taps, shape[spec[1]], out // groups)
            moved = np.moveaxis(moved, 0, -2).reshape(*taps, shape[spec[1]], out)
            return np.transpose(moved, np.argsort((*spec[2:], spec[1], spec[0])))
        axes = tuple(itertools.chain(*self._axes(self.product.weight)))
        return np.transpose(columns.reshape([shape[axis] for axis in axes]), np.argsort(axes))

    def rows(self, x: jax.Array) -> jax.Array:
        """The data as float32 [groups, rows, K], with at most `MOST_ROWS` rows."""
        if not self._conv:
            return _dense_rows(x, self._axes(1 - self.product.weight))
        params, numbers, eqn = self._equation.params, self._numbers, self._equation
        windows = _Windows(
            data=tuple(numbers.lhs_spec),
            window=tuple(eqn.in_shapes[1][axis] for axis in numbers.rhs_spec[2:]),
            out=tuple(eqn.out_shapes[0][axis] for axis in numbers.out_spec[2:]),
            strides=tuple(params["window_strides"]),
            dilation=tuple(params["rhs_dilation"]),
            spread=tuple(params["lhs_dilation"]),
            padding=tuple(tuple(pair) for pair in params["padding"]),
            groups=self._groups,
        )
        return _windows_rows(x, windows)

    @property
    def _equation(self) -> Equation:
        return self.product.equation

    @property
    def _conv(self) -> bool:
        return self._equation.primitive == "conv_general_dilated"

    @property
    def _numbers(self) -> "lax.ConvDimensionNumbers":
        return self._equation.params["dimension_numbers"]

    @property
    def _groups(self) -> int:
        return int(self._equation.params["feature_group_count"])

    def _axes(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(batch, contracted, other) axes of an operand of a dot."""
        contracting, batch = self._equation.params["dimension_numbers"]
        rank = len(self._equation.in_shapes[index])
        free = tuple(a for a in range(rank) if a not in contracting[index] and a not in batch[index])
        return tuple(batch[index]), tuple(contracting[index]), free


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The geometry of a convolution. data: the axes of its input as (batch, channels, spatial axes...)."""

    data: tuple[int, ...]
    window: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...]
    padding: tuple[tuple[int, ...], ...]
    groups: int


@functools.partial(jax.jit, static_argnums=1)
def _dense_rows(x: jax.Array, axes: tuple[tuple[int, ...], ...]) -> jax.Array:
    batch, summed, free = axes
    moved = jnp.transpose(x.astype(jnp.float32), (*batch, *free, *summed))
    rows = moved.reshape([math.prod(x.shape[axis] for axis in own) for own in (batch, free, summed)])
    return rows[:, :: max(1, -(-rows.shape[1] // MOST_ROWS))]


@functools.partial(jax.jit, static_argnums=1)
def _windows_rows(x: jax.Array, windows: _Windows) -> jax.Array:
    x = jnp.transpose(x.astype(jnp.float32), (windows.data[0], *windows.data[2:], windows.data[1]))
    config = [(low, high, d - 1) for (low, high), d in zip(windows.padding, windows.spread, strict=True)]
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    keep = max(1, -(-x.shape[0] * math.prod(windows.out) // MOST_ROWS))
    taps: list[jax.Array] = []
    for tap in itertools.product(*map(range, windows.window)):
        start = [t * d for t, d in zip(tap, windows.dilation, strict=True)]
        end = [s + (n - 1) * step + 1 for s, n, step in zip(start, windows.out, windows.strides, strict=True)]
        piece = lax.slice(x, [0, *start, 0], [x.shape[0], *end, x.shape[-1]], [1, *windows.strides, 1])
        taps.append(piece.reshape(-1, x.shape[-1])[::keep])
    stacked = jnp.stack(taps)
    count, rows = stacked.shape[:2]
    grouped = stacked.reshape(count, rows, windows.groups, -1)
    return jnp.transpose(grouped, (2, 1, 0, 3)).reshape(windows.groups, rows, -1)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of a layer's quantized inputs x_q and its target outputs y = x W, float64 means over all rows.

    quantized: x_q^T x_q, [groups, K, K]. toward: x_q^T y, [groups, K, N]. signal: y^2, [groups, N]. means: of x_q,
    [groups, K], and of y, [groups, N]. rows: how many rows were used. Centred moments are about the means, because the
    layer's bias corrects the mean error.
    """

    quantized: np.ndarray
    toward: np.ndarray
    signal: np.ndarray
    means: tuple[np.ndarray, np.ndarray]
    rows: int

    def errors(self, w: np.ndarray) -> np.ndarray:
        """[groups, N]: `mean (y - x_q w)^2` of weights [groups, K, N]."""
        cross = np.sum(w * self.toward, axis=1)
        return np.maximum(self.signal - 2 * cross + np.sum(w * np.matmul(self.quantized, w), axis=1), 0.0)


Pairs = list[tuple[jax.Array, jax.Array]]
"""(quantized, float) rows [groups, rows, K], one pair for each batch."""


def rows_of(layers: Sequence[Product], data: Sequence[Sequence[jax.Array]]) -> Pairs:
    """The inputs of a layer as rows. layers: its product for each batch. data: of both models, for each batch."""
    return [(m.rows(a), m.rows(b)) for m, a, b in zip(map(Matrix, layers), *data, strict=True)]


def parted(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Split into (fitting, validation): the latter is the last quarter of the batches, or of each one's rows if < 4."""
    if len(pairs) >= 4:
        count = len(pairs) // 4
        return pairs[:-count], pairs[-count:]
    if any(quantized.shape[1] < 4 for quantized, _ in pairs):
        return pairs, []
    fit, judge = Pairs(), Pairs()
    for quantized, reals in pairs:
        first = quantized.shape[1] - quantized.shape[1] // 4
        fit.append((quantized[:, :first], reals[:, :first]))
        judge.append((quantized[:, first:], reals[:, first:]))
    return fit, judge


def moments(pairs: Pairs, w: np.ndarray, *, centred: bool = False) -> Moments:
    """The moments of all rows of some batches; w: the float weights, [groups, K, N]."""
    means, rows = _sums(_means, pairs)
    # Subtract means from the rows. If they were subtracted from sums of squares, rounding would lose small variances.
    middle = means if centred else [np.zeros_like(part) for part in means]
    (quantized, toward, signal, x, y), _ = _sums(_products, pairs, w, *middle)
    if centred:  # the rest of the means, which float32 could not subtract
        for each, own, other, wanted in zip(quantized, toward, x, y, strict=True):
            for row, mean in enumerate(other):  # row by row, because a temporary would be as large as both arrays
                each[row] -= mean * other
                own[row] -= mean * wanted
        signal = signal - y * y
    return Moments(quantized, toward, signal, (means[0], np.squeeze(np.matmul(means[1][:, None], w), 1)), rows)


def errors_on(pairs: Pairs, w: np.ndarray, solved: np.ndarray, *, centred: bool = False) -> np.ndarray:
    """[groups, N]: `mean (x W - x_q W_q)^2` from the rows themselves; `centred`: without the error's own mean.

    `Moments.errors` computes the same without the data, but rounding of its sums loses a small error.
    """
    (first, second), _ = _sums(_differences, pairs, w, solved)
    return second - first * first if centred else second


def _sums(function: Callable[..., list[jax.Array]], pairs: Pairs, *weights: np.ndarray) -> tuple[list[np.ndarray], int]:
    """The means over all rows of what a function sums over the rows of a batch, and the number of rows."""
    given = [jnp.asarray(w, jnp.float32) for w in weights]
    total: list[np.ndarray] = []
    rows = 0
    for quantized, reals in pairs:
        for index, part in enumerate(function(quantized, reals, *given)):
            if index == len(total):
                total.append(np.asarray(part, np.float64))
            else:
                total[index] += np.asarray(part)
        rows += quantized.shape[1]
    for part in total:
        part /= rows
    return total, rows


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """For each group, the product of a along the given axis with b's rows."""
    return products.dot_general(a, b, (((axis,), (1,)), ((0,), (0,))), jnp.float32)


@jax.jit
def _means(quantized: jax.Array, reals: jax.Array) -> list[jax.Array]:
    return [jnp.sum(quantized, axis=1), jnp.sum(reals, axis=1)]


@jax.jit
def _products(quantized: jax.Array, reals: jax.Array, w: jax.Array, *middle: jax.Array) -> list[jax.Array]:
    quantized, reals = (x - mean[:, None] for x, mean in zip((quantized, reals), middle, strict=True))
    y = _product(reals, w, 2)
    sums = [jnp.sum(part, axis=1) for part in (jnp.square(y), quantized, y)]
    return [_product(quantized, quantized, 1), _product(quantized, y, 1), *sums]


@jax.jit
def _differences(quantized: jax.Array, reals: jax.Array, w: jax.Array, solved: jax.Array) -> list[jax.Array]:
    error = _product(reals, w, 2) - _product(quantized, solved, 2)
    return [jnp.sum(error, axis=1), jnp.sum(jnp.square(error), axis=1)]
