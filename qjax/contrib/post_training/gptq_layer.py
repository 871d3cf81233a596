"""Solves the least squares of one layer, from which `gptq` takes codes and scales; its docstring lists the steps."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from scipy import linalg

from qjax.contrib.post_training.as_matmul import Matrix, Moments
from qjax.contrib.post_training.simulated import bounds_of
from qjax.numerics.affine import QParams, broadcast_to_tensor

BLOCK = 64


def damped(seen: Moments, damping: float, h: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """H with its damped diagonal, [groups, K, K], and what was added, [groups]. h: modified in place; None: a copy."""
    diagonal = np.einsum("gkk->gk", seen.quantized)
    extra = damping * diagonal.mean(-1) + 1e-12 * max(1e-30, float(diagonal.max(initial=0.0)))
    extra = np.where(extra > 0, extra, 1.0)
    h = seen.quantized.copy() if h is None else h
    np.einsum("gkk->gk", h)[...] += extra[:, None]
    return h, extra


def target(seen: Moments, w: np.ndarray, damping: float) -> np.ndarray:
    """W*: the float weights with the least error on the quantized inputs."""
    if damping == float("inf"):
        return w
    h, extra = damped(seen, damping)
    right = extra[:, None, None] * w
    right += seen.toward
    solved = [_solved(*one) for one in zip(h, right, strict=True)]
    del h, right
    return np.stack(solved)


def _solved(h: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`h^-1 right` of a positive definite matrix, whose memory is reused."""
    factor, lower = linalg.cho_factor(h, lower=True, overwrite_a=True, check_finite=False)
    _transpose(factor)
    return linalg.cho_solve((factor.T, lower), right, check_finite=False)


def inverse_factor(h: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The upper triangular U with `U^T U = h^-1`, rows and columns of h in this order."""
    # With rows and columns in reverse order: h = L L^T, so h^-1 = L^-T L^-1. For a large layer each array of this size
    # is half a gigabyte, so all steps share one. LAPACK expects column-major order.
    back = np.ix_(order[::-1], order[::-1])
    lower = linalg.cholesky(h[back], lower=True, overwrite_a=True, check_finite=False)
    _transpose(lower)
    (invert,) = linalg.get_lapack_funcs(("trtri",), (lower,))
    inverse, failed = invert(lower.T, lower=1, overwrite_c=1)
    if failed:
        raise linalg.LinAlgError(f"a triangular factor has no inverse ({failed})")
    return inverse[::-1, ::-1]


def _transpose(x: np.ndarray) -> None:
    """Transpose a square array in place, block by block."""
    starts = range(0, len(x), 512)
    for i in starts:
        for j in starts[: i // 512 + 1]:
            first, second = x[i : i + 512, j : j + 512], x[j : j + 512, i : i + 512]
            first[...], second[...] = second.T.copy(), first.T.copy()


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Codes, [groups, K, N], scales, [groups, K or 1, N], and their costs, [groups, N]."""

    codes: np.ndarray
    scale: np.ndarray
    costs: np.ndarray


class Layer:
    """The least squares of one layer, float64 arrays [groups, K, N]; scales and bounds may be [groups, 1, N]."""

    def __init__(
        self, matrix: Matrix, seen: Moments, qparams: QParams, wanted: np.ndarray, damping: float, *, alone: bool
    ) -> None:
        """alone: no other layer reads these moments until `release`, so H is damped in place."""
        self._matrix, self._spec, self._shape = matrix, qparams.spec, matrix.shape
        low, high = bounds_of(qparams)
        self.scale = self.spread(np.asarray(qparams.scale))
        self._low, self._high = self.spread(low), self.spread(high)
        self._target = wanted
        self._seen, self._diagonal = seen.quantized, np.einsum("gkk->gk", seen.quantized).copy()
        self._h, _ = damped(seen, damping, seen.quantized if alone else None)

    def release(self) -> None:
        """Restore the moments to what they were; call nothing else afterwards."""
        np.einsum("gkk->gk", self._seen)[...] = self._diagonal

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Numbers of the scale's shape as [groups, K, N], or [groups, 1, N] if all inputs of a channel share them."""
        full = broadcast_to_tensor(jnp.asarray(values), self._spec, self._shape)
        if self._spec.per_tensor:
            full = jnp.reshape(full, (1,) * len(self._shape))
        wide = self._matrix.columns(np.broadcast_to(np.asarray(full, np.float64), self._shape))
        return wide[:, :1] if wide.strides[1] == 0 else wide

    def codes_of(self, w: np.ndarray) -> np.ndarray:
        """The nearest codes of weights in their own shape."""
        return self._nearest(self._matrix.columns(w), self.scale)

    def _nearest(self, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return _nearest(w, scale, self._low, self._high)

    def costs(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """[groups, N]: the increase of the error that weights with these codes cause."""
        d = codes * scale
        d -= self._target
        along = np.matmul(self._h, d)
        along *= d
        return np.sum(along, axis=1)

    def rounded(self) -> np.ndarray:
        """The weights after GPTQ alone, with the present scales."""
        return self._run_gptq(self.scale) * self.scale

    def solved(self, nearest: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """The final codes, and scales in the shape of the quantizer's."""
        scale = self._search_scales()
        carried = self._run_gptq(scale)
        self.__dict__.pop("_factor")  # as large as H, and no longer needed
        best = self._least(self._choice(nearest, self.scale), self._choice(carried, scale))
        del carried
        for _ in range(rounds):
            codes = self._descend(best.codes, best.scale)
            found = self._least(best, self._choice(codes, best.scale))
            if self._single:
                found = self._least(found, self._choice(codes, self._fit_scales(codes, best.scale)))
            done = found.costs.sum() > 0.9999 * best.costs.sum()
            best = found
            if done:
                break
        return best.codes, self._gather_scales(best.scale)

    def _choice(self, codes: np.ndarray, scale: np.ndarray) -> _Choice:
        return _Choice(codes, scale, self.costs(codes, scale))

    def _least(self, first: _Choice, second: _Choice) -> _Choice:
        """For every scale the choice that costs less, summed over all weights on that scale; ties take the first."""
        better = self._per_scale(second.costs) < self._per_scale(first.costs)
        wide = better[:, None, :]
        return _Choice(
            np.where(wide, second.codes, first.codes),
            np.where(wide, second.scale, first.scale),
            np.where(better, second.costs, first.costs),
        )

    def _per_scale(self, costs: np.ndarray) -> np.ndarray:
        """[groups, N]: summed over the channels that share a scale."""
        # If several columns share one scale, the whole layer chooses together.
        return costs if self._independent else np.full_like(costs, costs.sum())

    @property
    def _independent(self) -> bool:
        """Whether every column has scales of its own."""
        return {axis for _, axis in self._matrix.product.channels} <= set(self._spec.param_axes(len(self._shape)))

    @property
    def _single(self) -> bool:
        """Whether all weights of a column have one scale."""
        return self._spec.group_size is None

    def _search_scales(self) -> np.ndarray:
        """The best of several scales, by the error after nearest rounding."""
        # Clipping helps little where a channel has many codes, so try few factors.
        factors = np.linspace(1.0, 0.85, 4) if self._spec.bits >= 6 else np.linspace(1.0, 0.5, 16)
        least = np.full(self._target.shape[::2], np.inf)
        best = np.ones_like(least)
        for factor in factors:
            scale = self.scale * factor
            costs = self._per_scale(self.costs(self._nearest(self._target, scale), scale))
            best, least = np.where(costs < least, factor, best), np.minimum(costs, least)
        return self.scale * best[:, None, :]

    def _fit_scales(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """The best scales for given codes, by least squares; unchanged where they would not be positive."""
        above = self._per_scale(np.sum(codes * self._toward, axis=1))
        below = self._per_scale(np.sum(codes * np.matmul(self._h, codes), axis=1))
        with np.errstate(all="ignore"):
            ratio = above / below
        good = np.isfinite(ratio) & (ratio > 0.25 * scale[:, 0]) & (ratio < 4 * scale[:, 0])
        return np.where(good[:, None], ratio[:, None], scale)

    @functools.cached_property
    def _toward(self) -> np.ndarray:
        return np.matmul(self._h, self._target)

    def _gather_scales(self, scale: np.ndarray) -> np.ndarray:
        """Reduce scales of every weight to the shape in which the quantizer stores them."""
        full = self._matrix.restored(np.broadcast_to(scale, self._target.shape))
        sizes = self._spec.param_sizes(self._shape)
        index = tuple(np.arange(n) * (full.shape[a] // n) for a, n in enumerate(sizes))
        return full[np.ix_(*index)].reshape(self._spec.param_shape(self._shape)).astype(np.float32)

    def _run_gptq(self, scale: np.ndarray) -> np.ndarray:
        """GPTQ's codes: the Cholesky factor of the inverse passes errors on, inputs with a large diagonal first."""
        groups, size, _ = self._target.shape
        order, upper = self._factor
        rows = np.arange(groups)[:, None]
        w = self._target[rows, order]
        # Numbers that all inputs of a channel share are the same in every order.
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
        w[rows, order] = codes
        return w

    @functools.cached_property
    def _factor(self) -> tuple[np.ndarray, np.ndarray]:
        """The order of the inputs, [groups, K], and the factors of H^-1 in that order."""
        order = np.argsort(-np.einsum("gkk->gk", self._h), axis=1, kind="stable")
        upper = [inverse_factor(h, own) for h, own in zip(self._h, order, strict=True)]
        return order, upper[0][None] if len(upper) == 1 else np.stack(upper)

    def _descend(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
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
    """Codes in float64. The model computes its own from `code * scale`, and its formula restores the same `code`."""
    codes = w / scale
    np.rint(codes, out=codes)
    return np.clip(codes, low, high, out=codes)
