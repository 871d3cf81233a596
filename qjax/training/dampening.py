"""A loss that pulls weights away from the boundaries between codes, after Nagel et al. 2022 (arXiv 2203.11086)."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from qjax.model.quantized_model import QuantizedModel
from qjax.training.weights import code_bounds, parameters, quantized_weights


def dampening(qmodel: QuantizedModel, names: Iterable[str]) -> jax.Array:
    """`sum (stop_gradient(w_q) - clip(w, s * low, s * high))**2` over all named weights (oscillation dampening).

    float32 scalar, to be added to the loss with a weight that grows from 0 (the paper's implementation lets it grow
    along a cosine to 0.1 for its networks). It pulls each weight to the float value of its code. Weights beyond the
    grid get no gradient, and neither do scales.

    Args:
      qmodel: the quantized model.
      names: quantizers of weights that are parameters: `Oscillations.names`, or `weights_of(qmodel, sample).names`.

    Examples:
      ```python
      names = qjax.training.weights_of(qmodel, x).names


      def loss(qmodel):
          return (qmodel(x) ** 2).mean() + 0.01 * qjax.training.dampening(qmodel, names)
      ```
    """
    reals, total = parameters(qmodel, names), jnp.float32(0)
    for name, grid in quantized_weights(qmodel, reals).items():
        w = reals[name][...].astype(jnp.float32)
        scale = jnp.broadcast_to(jax.lax.stop_gradient(grid.scale), w.shape)
        low, high = code_bounds(grid)
        clipped = jnp.clip(w, jax.lax.stop_gradient(low) * scale, jax.lax.stop_gradient(high) * scale)
        total = total + jnp.sum(jnp.square(jax.lax.stop_gradient(grid.real32()) - clipped))
    return total
