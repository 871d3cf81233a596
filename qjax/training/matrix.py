"""A dense layer or convolution as one matrix product per group: rows of data, columns of weights.

Methods that choose a weight's codes need only the second moments of the data, `X^T X` of the rows that are multiplied
with the weight. Their size does not depend on the number of examples.

| layer | groups | rows | summed axes |
| --- | --- | --- | --- |
| dense, `Einsum` | the batch axes of the product | all other axes of the data | the contracted axes |
| convolution | its groups; one per channel if it is depthwise | the output positions | taps x channels of a group |
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import products
from qjax.tracing import Equation
from qjax.training.products import Product

MOST_ROWS = 8192
"""At most so many rows of a batch are used, evenly spaced: neighbouring positions of an image are nearly alike."""


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """The view of one product. Arrays in it: data [groups, rows, K], weights [groups, K, N]."""

    product: Product

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
        """The tensor of the weight's shape again."""
        shape = self.product.equation.in_shapes[self.product.weight]
        if self._conv:
            spec, groups = self._numbers.rhs_spec, self._groups
            out, taps = shape[spec[0]], [shape[axis] for axis in spec[2:]]
            moved = columns.reshape(groups, *taps, shape[spec[1]], out // groups)
            moved = np.moveaxis(moved, 0, -2).reshape(*taps, shape[spec[1]], out)
            return np.transpose(moved, np.argsort((*spec[2:], spec[1], spec[0])))
        axes = tuple(itertools.chain(*self._axes(self.product.weight)))
        return np.transpose(columns.reshape([shape[axis] for axis in axes]), np.argsort(axes))

    def rows(self, x: jax.Array) -> jax.Array:
        """The data as [groups, rows, K], float32, at most `MOST_ROWS` rows."""
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
    """The geometry of a convolution; data: the axes of its input as (batch, channels, places...)."""

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


@dataclasses.dataclass
class Moments:
    """Second moments of a layer's inputs over all batches, float64 [groups, K, K], each divided by the number of rows.

    quantized: X_q^T X_q. mixed: X_q^T X. reals: X^T X. Of `centred` ones the means are taken out first: what the mean
    of the error adds is left to the layer's bias.
    """

    quantized: np.ndarray
    mixed: np.ndarray
    reals: np.ndarray
    means: tuple[np.ndarray, np.ndarray]
    rows: int

    def centred(self) -> "Moments":
        """About the means: what the mean of the error adds is left to the layer's bias."""
        a, b = self.means
        outer = [x[:, :, None] * y[:, None, :] for x, y in ((a, a), (a, b), (b, b))]
        return Moments(self.quantized - outer[0], self.mixed - outer[1], self.reals - outer[2], self.means, self.rows)


Pairs = list[tuple[jax.Array, jax.Array]]
"""(quantized, real) rows [groups, rows, K], one pair for each batch."""


def parted(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """(what is fitted, what judges): the last quarter of the batches; of fewer than four, of the rows of each."""
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


def moments(pairs: Pairs) -> Moments:
    """Of all rows of some batches."""
    total: list[np.ndarray] = []
    rows = 0
    for quantized, reals in pairs:
        found = [np.asarray(part, np.float64) for part in _products(quantized, reals)]
        total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
        rows += quantized.shape[1]
    second, first = [part / rows for part in total[:3]], [part / rows for part in total[3:]]
    return Moments(*second, means=(first[0], first[1]), rows=rows)


@jax.jit
def _products(quantized: jax.Array, reals: jax.Array) -> list[jax.Array]:
    def of(a: jax.Array, b: jax.Array) -> jax.Array:
        numbers = (((1,), (1,)), ((0,), (0,)))
        return products.dot_general(a, b, numbers, jnp.float32)

    return [
        of(quantized, quantized),
        of(quantized, reals),
        of(reals, reals),
        jnp.sum(quantized, axis=1),
        jnp.sum(reals, axis=1),
    ]
