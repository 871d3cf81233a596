"""An observer of the smallest and the largest value of the data."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qjax.calibration.channels import batch_summary
from qjax.calibration.observer import Bounds, BoundsObserver
from qjax.calibration.value_counts import Tally, counted, require_usable, zero_tally
from qjax.numerics.affine import QSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MinMaxState:
    """Bounds so far, float32 of the parameters' shape; +inf and -inf before any data."""

    lo: Array
    hi: Array
    tally: Tally


@dataclass(frozen=True)
class MinMax(BoundsObserver):
    """Records the exact minimum and maximum of all batches, per scale.

    The range is [min(x), max(x)], extended to contain 0. The result does not depend on the order of the batches, or on
    how the data is split into them. One outlier sets the scale; `Percentile`, `MSE` and `Entropy` clip it.

    Paper: Jacob et al. 2018 (arXiv 1712.05877), section 3, for weights.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(observer="minmax")
    """

    name = "minmax"

    def init(self, spec: QSpec, shape: tuple[int, ...]) -> MinMaxState:
        """A state without data; `shape` is that of one batch's tensor."""
        params = spec.param_shape(shape)
        return MinMaxState(
            jnp.full(params, jnp.inf, jnp.float32), jnp.full(params, -jnp.inf, jnp.float32), zero_tally()
        )

    def update(self, state: MinMaxState, x: Array, spec: QSpec) -> MinMaxState:
        """The state after one more batch; pure, for jit, vmap and scan."""
        lo, hi, counts = batch_summary(x, spec)
        return MinMaxState(
            jnp.minimum(state.lo, lo.reshape(state.lo.shape)),
            jnp.maximum(state.hi, hi.reshape(state.hi.shape)),
            counted(state.tally, counts),
        )

    def bounds(self, state: MinMaxState, spec: QSpec) -> Bounds:
        """The smallest and the largest value seen."""
        require_usable(state.tally, self.name)
        return np.asarray(state.lo), np.asarray(state.hi)
