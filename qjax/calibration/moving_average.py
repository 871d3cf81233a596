"""An observer that averages the smallest and the largest value of each batch exponentially."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qjax.calibration.channels import batch_summary
from qjax.calibration.observer import Bounds, BoundsObserver
from qjax.calibration.value_counts import Tally, counted, require_usable, zero_tally
from qjax.numerics.affine import QSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MovingAverageState:
    """Averaged bounds, float32 of the parameters' shape; zero before any data."""

    lo: Array
    hi: Array
    tally: Tally


@dataclass(frozen=True)
class MovingAverage(BoundsObserver):
    """Averages the ends of the range over batches: `average = decay * average + (1 - decay) * batch`.

    The first batch initialises the average. The result depends on the order of the batches. Both products are rounded
    to float32 before they are added, so that eager mode, `jit`, `scan` and numpy compute the same bits.

    Paper: Jacob et al. 2018 (arXiv 1712.05877), section 3.1.

    Args:
      decay: weight of the past, in [0, 1). It and `1 - decay` are each rounded once to float32.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(observer=qjax.calibration.MovingAverage(0.9))
    """

    decay: float = 0.99
    name = "moving_average"

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay: expected a number in [0, 1), got {self.decay}; the usual value is 0.99.")

    def init(self, spec: QSpec, shape: tuple[int, ...]) -> MovingAverageState:
        """A state without data; `shape` is that of one batch's tensor."""
        params = spec.param_shape(shape)
        zeros = jnp.zeros(params, jnp.float32)
        return MovingAverageState(zeros, zeros, zero_tally())

    def update(self, state: MovingAverageState, x: Array, spec: QSpec) -> MovingAverageState:
        """The state after one more batch; pure, for jit, vmap and scan."""
        # A row without a single finite value has infinite bounds here; the tally then reports the data.
        lo, hi, counts = batch_summary(x, spec)
        first = (state.tally.seen.high | state.tally.seen.low) == jnp.uint32(0)
        # The tally's top bit is 0 for every usable state, which the compiler cannot know.
        zero = (state.tally.seen.high >> jnp.uint32(31)).astype(jnp.int32)

        def step(average: Array, batch: Array) -> Array:
            batch = batch.reshape(average.shape)
            return jnp.where(first, batch, _blend(average, batch, self.decay, zero))

        return MovingAverageState(step(state.lo, lo), step(state.hi, hi), counted(state.tally, counts))

    def bounds(self, state: MovingAverageState, spec: QSpec) -> Bounds:
        """The averaged ends."""
        require_usable(state.tally, self.name)
        return np.asarray(state.lo), np.asarray(state.hi)


def _blend(average: Array, batch: Array, decay: float, zero: Array) -> Array:
    """`fl(fl(decay * average) + fl((1 - decay) * batch))`.

    The integer `^ zero` between product and sum prevents a fused multiply-add; `zero` must be 0 at run time and
    unknown at compile time.
    """

    def product(value: Array, weight: float) -> Array:
        bits = lax.bitcast_convert_type(value * jnp.float32(weight), jnp.int32)
        return lax.bitcast_convert_type(bits ^ zero, jnp.float32)

    return product(average, decay) + product(batch, 1.0 - decay)
