"""Finds weights that oscillate between two codes, after Nagel et al. 2022 (arXiv 2203.11086), and freezes them.

The straight-through gradient of a weight is evaluated at its code, not at the weight. If the optimum lies between two
codes, the gradient pushes the weight up at the lower code and down at the upper one, so it crosses the boundary again
and again. `Oscillations` counts these crossings. `Oscillations.freeze` stops the weights that cross too often
(iterative weight freezing, algorithm 1 of the paper). `qjax.training.dampening` is the paper's other method.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.model.quantized_model import QuantizedModel
from qjax.training.weights import code_bounds, codes_of, parameters, quantized_weights, set_codes, weights_of

Arrays = dict[str, jax.Array]
"""Name of a weight -> an array of the weight's shape."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oscillations:
    """How often each weight's code reverses: a pytree, so it passes through `jit` together with the model.

    A code oscillates at a step if it changes against the direction of its last change. Its frequency is the exponential
    moving average of these events, `f = m * o + (1 - m) * f`, starting from 0.

    Attributes:
      codes: int32, as of the last update.
      direction: int32, the sign of the last change, 0 before the first.
      frequency: float32 in [0, 1], per step.
      average: float32, the moving average of the codes.
      frozen: bool.
      held: int32, the codes of frozen weights.
      momentum: m; the paper's implementation uses 0.01, a memory of 100 steps.

    Examples:
      ```python
      tracker = qjax.training.Oscillations.start(qmodel, x, max_bits=4)
      tracker = tracker.update(qmodel)  # after each step
      # fixes the codes that change more often than that
      tracker = tracker.freeze(qmodel, 0.02)
      ```
    """

    codes: Arrays
    direction: Arrays
    frequency: Arrays
    average: Arrays
    frozen: Arrays
    held: Arrays
    momentum: float = dataclasses.field(metadata={"static": True}, default=0.01)

    @classmethod
    def start(
        cls, qmodel: QuantizedModel, sample: Any, *, max_bits: int = 16, momentum: float = 0.01
    ) -> "Oscillations":
        """Start to follow every weight that `weights_of` names.

        Args:
          sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.
          max_bits: weights with more bits are left out; the paper follows those of at most 4.

        Raises:
          ValueError: the model has no such weight.
        """
        weights = weights_of(qmodel, sample)
        by_name = qmodel.plan.by_name
        names = [name for name in weights.names if by_name[name].spec.bits <= max_bits]
        if not names:
            reasons = [f"{name}: {why}" for name, why in weights.left]
            reasons += [f"{name}: {by_name[name].spec.bits} bits, more than {max_bits}" for name in weights.names]
            text = "; ".join(reasons) or "it has no quantized weight"
            raise ValueError(f"Oscillations: expected a model with weights that can be followed. {text}.")
        return cls.of(codes_of(qmodel, names), momentum=momentum)

    @classmethod
    def of(cls, codes: Mapping[str, Any], *, momentum: float = 0.01) -> "Oscillations":
        """Follow these codes, integers of any shape; for weights that belong to no model, continue with `advance`."""
        if not 0 < momentum < 1:
            raise ValueError(f"Oscillations: expected a momentum between 0 and 1, got {momentum}.")
        now = {name: jnp.asarray(c).astype(jnp.int32) for name, c in codes.items()}

        def like(dtype: Any) -> Arrays:
            return {name: jnp.zeros(c.shape, dtype) for name, c in now.items()}

        average = {name: c.astype(jnp.float32) for name, c in now.items()}
        # No two leaves share a buffer, because they may be donated.
        held = {name: jnp.array(c) for name, c in now.items()}
        return cls(now, like(jnp.int32), like(jnp.float32), average, like(jnp.bool_), held, momentum)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights that are followed."""
        return tuple(self.codes)

    def update(self, qmodel: QuantizedModel) -> "Oscillations":
        """Record how the codes changed in a step of the optimizer; the model is only read."""
        return self.advance(codes_of(qmodel, self.names))

    def advance(self, codes: Mapping[str, Any]) -> "Oscillations":
        """Record given codes instead of a model's; frozen weights count as unchanged."""
        m = np.float32(self.momentum)
        found: dict[str, Arrays] = {key: {} for key in ("codes", "direction", "frequency", "average")}
        for name, before in self.codes.items():
            now = jnp.where(self.frozen[name], self.held[name], jnp.asarray(codes[name]).astype(jnp.int32))
            turn = jnp.sign(now - before)
            oscillated = (turn * self.direction[name] == -1).astype(jnp.float32)
            found["codes"][name] = now
            found["direction"][name] = jnp.where(turn == 0, self.direction[name], turn)
            found["frequency"][name] = m * oscillated + (1 - m) * self.frequency[name]
            found["average"][name] = m * now.astype(jnp.float32) + (1 - m) * self.average[name]
        return dataclasses.replace(self, **found)

    def freeze(self, qmodel: QuantizedModel, threshold: Any) -> "Oscillations":
        """Freeze every weight whose frequency exceeds `threshold`, and put all frozen weights back on their codes.

        From then on a weight is held at its average code, rounded. Its scale may go on learning, because the float
        weight is set to `code * scale` under the present one. Call it after every step of the optimizer and after
        `update`, so that no forward pass sees how the step changed frozen weights. It changes the model, and works
        under `nnx.jit`.

        Args:
          threshold: per step, between 0 and 1; a number or a traced scalar, so that it can be annealed. The paper's
            schedules fall from 0.04 or above to about 0.01; below 3 * momentum a single reversal may be enough. With
            infinity no further weight is frozen.
        """
        frozen, held, codes = dict(self.frozen), dict(self.held), dict(self.codes)
        for name, frequency in self.frequency.items():
            new = jnp.logical_and(frequency > threshold, ~self.frozen[name])
            held[name] = jnp.where(new, jnp.round(self.average[name]).astype(jnp.int32), self.held[name])
            frozen[name] = jnp.logical_or(new, self.frozen[name])
            codes[name] = jnp.where(frozen[name], held[name], self.codes[name])
        own = {name: p[...] for name, p in parameters(qmodel, self.names).items()}
        set_codes(qmodel, codes)
        for name, parameter in parameters(qmodel, self.names).items():
            parameter[...] = jnp.where(frozen[name], parameter[...], own[name])
        return dataclasses.replace(self, frozen=frozen, held=held, codes=codes)

    def share(self, threshold: float = 0.005) -> jax.Array:
        """float32 scalar: the share of all weights whose frequency exceeds `threshold` per step.

        Frozen weights do not change and do not count, though their moving average takes time to fall.
        """
        return self._share({name: (f > threshold) & ~self.frozen[name] for name, f in self.frequency.items()})

    def share_frozen(self) -> jax.Array:
        """float32 scalar: the share of all weights that are frozen."""
        return self._share(self.frozen)

    def _share(self, which: Arrays) -> jax.Array:
        total = sum(w.size for w in which.values())
        count = jnp.sum(jnp.stack([jnp.sum(w, dtype=jnp.int32) for w in which.values()]))
        return count.astype(jnp.float32) / np.float32(total)


# ----------------------------------------------------------------------------------------------------------------------
# A loss that pulls weights away from the boundaries between codes, after Nagel et al. 2022 (arXiv 2203.11086).


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
          return (qmodel(x) ** 2).mean() + 0.01 * qjax.training.oscillations(qmodel, names)
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
