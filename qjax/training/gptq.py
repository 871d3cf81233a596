"""GPTQ and coordinate descent: codes of a layer's weights that keep its output, from second moments of its inputs.

x is the layer's input in the float model, x_q its input in the quantized model, whose earlier layers are solved
already. Each layer minimises over codes and scales

    mean (x W - x_q W_q)^2 = (W_q - W*)^T H (W_q - W*) + constant,   H = mean x_q^T x_q,   H W* = mean x_q^T x W

so the target W* already corrects what the quantized inputs do, as in Qronos (Zhang et al. 2025, arXiv 2505.11695) and
QEP (Arai and Ichikawa 2025, arXiv 2504.09629). If the layer has a bias, the moments are centred, and the bias absorbs
the mean error.

0. Damping: d times the mean of H's diagonal is added to the diagonal. This keeps weights near their float values where
   the data do not determine them. The last quarter of the data takes no part in the fit of any layer. By the error on
   it each layer chooses d for W*, and with few bits another d for the rounding. W itself instead of W* is a choice too.
1. Scales: each channel tries several scales up to its present one, and keeps the one with the least error after
   nearest rounding.
2. GPTQ (Frantar et al. 2023, arXiv 2210.17323): the weights are rounded input by input, the most important input first.
   The Cholesky factor of H^-1 moves each rounding error to the weights that are not rounded yet.
3. Coordinate descent (QuantEase: Behdin et al. 2023, arXiv 2309.01885): each code in turn is set to its best value
   given all others, for several rounds. Between rounds, least squares gives each channel the best scale for its codes
   (COMQ: Zhang et al. 2024, arXiv 2403.07134). No step can increase the error.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import linalg

from qjax.batches import Batches, Inputs
from qjax.numerics.affine import QParams, broadcast_to_tensor
from qjax.qmodel import QuantizedModel, check_quantized
from qjax.summary import decibels_text, table
from qjax.training.matrix import Matrix, Moments, errors_on, moments, parted, rows_of
from qjax.training.parts import Part, quantizer_of
from qjax.training.simulated import bounds_of, grid_of, qparams_of, set_qparams
from qjax.training.walk import Stop, Stream, Walk
from qjax.training.weights import parameters

BLOCK = 64
DAMPING = (0.01, 0.1, 1.0, 10.0, float("inf"))
"""The values of d that are tried for W*; an infinite one is W itself."""
ROUNDING = (0.01, 0.1, 1.0)
"""The values of d that are tried for the rounding of weights of at most `FEW` bits. Others take the middle one."""
FEW = 6


@dataclasses.dataclass(frozen=True)
class SolvedLayer:
    """One layer. Errors are `sum (y - y_q)^2 / sum y^2` on the calibration data, before bias and activation.

    Attributes:
      name: of its weight.
      nearest: with the scales and codes before this step.
      solved: with those after it.
      changed, weights: how many codes changed, of how many.
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
      left: weights that stay as they were, and why.
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
    """Choose the codes and scales of all dense layers and convolutions for the least error of their outputs.

    Layer by layer, in one pass over the model; see the module for the method. The real weights become `code * scale`,
    biases (or running means of a batch norm) directly behind a layer take the mean error. Scales per channel, per
    tensor and per group all work; those of groups keep the values that they have. Each layer of a scan has moments of
    its own, and becomes what it would become outside of the scan.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, of anything. They are kept, and
        what flows between two layers with them.
      inputs: what of a batch the model is called with: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters, without quantizers, are the float model's; None is `qmodel` as it is now.
      rounds: of coordinate descent; 0 leaves the codes of GPTQ.
      damping: the share of the mean of H's diagonal that is added to it; None chooses it for each layer, see the
        module.
      progress: show a line of progress on stderr; None shows one on a terminal (`qjax.show_progress`).

    Raises:
      ValueError: no batch, no dense layer or convolution whose weight is an unchanged parameter, a damping that is
        negative or no finite number, or one too small for the data.
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
            f"gptq: expected inputs of a layer that determine its weights, got moments without an inverse with damping "
            f"{damping!r} ({error}). Give a greater damping, such as 0.01, or more data."
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
    """`gptq` along a walk that is compiled already; not `carried`: by itself each layer keeps `x_q W`, not `x W`."""
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False)
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

        def judged(solved: np.ndarray) -> float:
            return float(errors_on(held or fit, w, solved, centred=movable).sum())

        if damping is not None:
            layer = _Layer(matrix, seen, qparams, target(seen, w, damping), damping)
        else:
            # without earlier errors the float weights themselves are the target
            wanted = min((target(seen, w, d) for d in DAMPING), key=judged) if carried else w
            choices = ROUNDING if q.spec.bits <= FEW else ROUNDING[1:2]
            # One after the other: each holds matrices of the size of H.
            tried = (_Layer(matrix, seen, qparams, wanted, d) for d in choices)
            layer = min(tried, key=lambda one: judged(one.rounded())) if len(choices) > 1 else next(tried)
        nearest = layer.codes_of(np.asarray(own.parameters[name], np.float64))
        codes, scale = layer.solved(nearest, rounds)
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


def damped(seen: Moments, damping: float) -> tuple[np.ndarray, np.ndarray]:
    """H with its greater diagonal, [groups, K, K], and what was added, [groups]."""
    diagonal = np.einsum("gkk->gk", seen.quantized)
    extra = damping * diagonal.mean(-1) + 1e-12 * max(1e-30, float(diagonal.max(initial=0.0)))
    extra = np.where(extra > 0, extra, 1.0)
    h = seen.quantized.copy()
    np.einsum("gkk->gk", h)[...] += extra[:, None]
    return h, extra


def target(seen: Moments, w: np.ndarray, damping: float) -> np.ndarray:
    """W*: the float weights with the least error on the quantized inputs."""
    if damping == float("inf"):
        return w
    h, extra = damped(seen, damping)
    right = seen.toward + extra[:, None, None] * w
    return np.stack([solve_positive(*one) for one in zip(h, right, strict=True)])


def solve_positive(h: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`h^-1 right` of a positive definite matrix."""
    return linalg.cho_solve(linalg.cho_factor(h, lower=True, check_finite=False), right, check_finite=False)


def inverse_factor(h: np.ndarray) -> np.ndarray:
    """The upper triangular U with `U^T U = h^-1`."""
    # With rows and columns in reverse order: h = L L^T, so h^-1 = L^-T L^-1.
    lower = linalg.cholesky(h[::-1, ::-1], lower=True, check_finite=False)
    (invert,) = linalg.get_lapack_funcs(("trtri",), (lower,))
    inverse, failed = invert(lower, lower=1, overwrite_c=1)
    if failed:
        raise linalg.LinAlgError(f"a triangular factor has no inverse ({failed})")
    return inverse[::-1, ::-1]


def _set(variable: nnx.Variable[Any] | Part, stream: Stream, path: str, value: np.ndarray) -> None:
    variable[...] = jnp.asarray(value, variable[...].dtype)
    stream.take(path, variable)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Codes, [groups, K, N], scales, [groups, K or 1, N], and what they cost, [groups, N]."""

    codes: np.ndarray
    scale: np.ndarray
    costs: np.ndarray


class _Layer:
    """The least squares of one layer, float64 arrays [groups, K, N]; scales and bounds may be [groups, 1, N]."""

    def __init__(self, matrix: Matrix, seen: Moments, qparams: QParams, wanted: np.ndarray, damping: float) -> None:
        self._matrix, self._spec, self._shape = matrix, qparams.spec, matrix.shape
        low, high = bounds_of(qparams)
        self.scale = self.spread(np.asarray(qparams.scale))
        self._low, self._high = self.spread(low), self.spread(high)
        self._target = wanted
        self._h, _ = damped(seen, damping)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Numbers of the scale's shape as [groups, K, N]; [groups, 1, N] where all inputs of a channel share them."""
        full = broadcast_to_tensor(jnp.asarray(values), self._spec, self._shape)
        if self._spec.per_tensor:
            full = jnp.reshape(full, (1,) * len(self._shape))
        wide = self._matrix.columns(np.broadcast_to(np.asarray(full, np.float64), self._shape))
        return wide[:, :1] if wide.strides[1] == 0 else wide

    def codes_of(self, w: np.ndarray) -> np.ndarray:
        """The nearest codes of weights of their own shape."""
        return self._nearest(self._matrix.columns(w), self.scale)

    def _nearest(self, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return _nearest(w, scale, self._low, self._high)

    def costs(self, w: np.ndarray) -> np.ndarray:
        """[groups, N]: what these weights cost, by which the error grows."""
        d = w - self._target
        return np.sum(d * np.matmul(self._h, d), axis=1)

    def rounded(self) -> np.ndarray:
        """The weights that GPTQ alone gives with the present scales."""
        return self._carried(self.scale) * self.scale

    def solved(self, nearest: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes, and scales of their quantizer's shape."""
        scale = self._ranged()
        best = self._least(self._choice(nearest, self.scale), self._choice(self._carried(scale), scale))
        for _ in range(rounds):
            codes = self._descended(best.codes, best.scale)
            found = self._least(best, self._choice(codes, best.scale))
            if self._single:
                found = self._least(found, self._choice(codes, self._fitted(codes, best.scale)))
            done = found.costs.sum() > 0.9999 * best.costs.sum()
            best = found
            if done:
                break
        return best.codes, self._gathered(best.scale)

    def _choice(self, codes: np.ndarray, scale: np.ndarray) -> _Choice:
        return _Choice(codes, scale, self.costs(codes * scale))

    def _least(self, first: _Choice, second: _Choice) -> _Choice:
        """For every scale the choice that costs less, all weights on that scale together; the first of equals."""
        better = self._per_scale(second.costs) < self._per_scale(first.costs)
        wide = better[:, None, :]
        return _Choice(
            np.where(wide, second.codes, first.codes),
            np.where(wide, second.scale, first.scale),
            np.where(better, second.costs, first.costs),
        )

    def _per_scale(self, costs: np.ndarray) -> np.ndarray:
        """[groups, N]: summed over the channels that share a scale."""
        # If one scale serves several columns, the whole layer chooses together.
        return costs if self._independent else np.full_like(costs, costs.sum())

    @property
    def _independent(self) -> bool:
        """Whether every column has scales of its own."""
        return {axis for _, axis in self._matrix.product.channels} <= set(self._spec.param_axes(len(self._shape)))

    @property
    def _single(self) -> bool:
        """Whether all weights of a column have one scale."""
        return self._spec.group_size is None

    def _ranged(self) -> np.ndarray:
        """The best scales of several, after nearest rounding."""
        # With many codes per channel, clipping helps little, so try few factors.
        factors = np.linspace(1.0, 0.85, 4) if self._spec.bits >= 6 else np.linspace(1.0, 0.5, 16)
        least = np.full(self._target.shape[::2], np.inf)
        best = np.ones_like(least)
        for factor in factors:
            scale = self.scale * factor
            costs = self._per_scale(self.costs(self._nearest(self._target, scale) * scale))
            best, least = np.where(costs < least, factor, best), np.minimum(costs, least)
        return self.scale * best[:, None, :]

    def _fitted(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """The best scales of given codes, by least squares; unchanged where they would not be positive."""
        above = self._per_scale(np.sum(codes * self._toward, axis=1))
        below = self._per_scale(np.sum(codes * np.matmul(self._h, codes), axis=1))
        with np.errstate(all="ignore"):
            ratio = above / below
        good = np.isfinite(ratio) & (ratio > 0.25 * scale[:, 0]) & (ratio < 4 * scale[:, 0])
        return np.where(good[:, None], ratio[:, None], scale)

    @functools.cached_property
    def _toward(self) -> np.ndarray:
        return np.matmul(self._h, self._target)

    def _gathered(self, scale: np.ndarray) -> np.ndarray:
        """Scales of every weight as the quantizer keeps them."""
        full = self._matrix.restored(np.broadcast_to(scale, self._target.shape))
        sizes = self._spec.param_sizes(self._shape)
        index = tuple(np.arange(n) * (full.shape[a] // n) for a, n in enumerate(sizes))
        return full[np.ix_(*index)].reshape(self._spec.param_shape(self._shape)).astype(np.float32)

    def _carried(self, scale: np.ndarray) -> np.ndarray:
        """GPTQ's codes: errors carried on by the Cholesky factor of the inverse, inputs of great diagonal first."""
        groups, size, _ = self._target.shape
        order, upper = self._factor
        rows = np.arange(groups)[:, None]
        w = self._target[rows, order]
        # What a channel's inputs share is the same in every order.
        ordered = (x if x.shape[1] == 1 else x[rows, order] for x in (scale, self._low, self._high))
        s, low, high = (np.broadcast_to(x, w.shape) for x in ordered)
        codes = np.empty_like(w)
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            errors = np.empty_like(w[:, start:end])
            for k in range(start, end):
                codes[:, k] = _nearest(w[:, k], s[:, k], low[:, k], high[:, k])
                error = (w[:, k] - codes[:, k] * s[:, k]) / upper[:, k, k, None]
                w[:, k:end] -= upper[:, k, k:end, None] * error[:, None]
                errors[:, k - start] = error
            w[:, end:] -= np.matmul(np.swapaxes(upper[:, start:end, end:], 1, 2), errors)
        result = np.empty_like(codes)
        result[rows, order] = codes
        return result

    @functools.cached_property
    def _factor(self) -> tuple[np.ndarray, np.ndarray]:
        """The order of the inputs, [groups, K], and in it the factors of H^-1."""
        order = np.argsort(-np.einsum("gkk->gk", self._h), axis=1, kind="stable")
        upper = [inverse_factor(h[np.ix_(own, own)]) for h, own in zip(self._h, order, strict=True)]
        return order, np.stack(upper)

    def _descended(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """One round of coordinate descent over all inputs."""
        h, size = self._h, codes.shape[1]
        scale, low, high = (np.broadcast_to(x, codes.shape) for x in (scale, self._low, self._high))
        values = codes * scale
        codes = codes.copy()
        gradient = np.matmul(h, self._target - values)
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            own = gradient[:, start:end]
            moved = np.zeros_like(own)
            for k in range(start, end):
                best = values[:, k] + own[:, k - start] / h[:, k, k, None]
                code = _nearest(best, scale[:, k], low[:, k], high[:, k])
                step = code * scale[:, k] - values[:, k]
                codes[:, k], moved[:, k - start] = code, step
                own -= h[:, start:end, k, None] * step[:, None]
            gradient[:, :start] -= np.matmul(h[:, :start, start:end], moved)
            gradient[:, end:] -= np.matmul(h[:, end:, start:end], moved)
        return codes


def _nearest(w: np.ndarray, scale: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes in float64. The model computes its own from `code * scale`, which its formula takes back to `code`."""
    return np.clip(np.rint(w / scale), low, high)
