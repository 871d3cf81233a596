"""The optimizer of the default training recipe: Adam with a cosine decay, weights and scales apart."""

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.model.quantizer_numbers import QuantParam

LEARNING_RATE = 4e-3
"""Of Adam, as a part of the size of each tensor."""

_SMALLEST_SIZE = 1e-2
"""A tensor of zeros moves as if its root mean square were this."""


def optimizer(
    qmodel: QuantizedModel,
    steps: int,
    *,
    learning_rate: float = LEARNING_RATE,
    scale_rate: float = 1.0,
    weight_decay: float = 0.0,
    warmup: int = 0,
) -> optax.GradientTransformation:
    """Adam for a quantized model: one learning rate that fits weights of any size, and scales with a rate of their own.

        steps = epochs * len(batches)
        optimizer = nnx.Optimizer(qmodel, qjax.training.optimizer(qmodel, steps), wrt=nnx.Param)

    A learning rate that fits the weights of one network is too great for those of another. Here the step of a tensor is
    multiplied by the tensor's root mean square (Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 8). A
    rate of 0.004 then moves a weight by about 0.4 % of the tensor's size. Scales are learned as logarithms to base 2,
    which have no size of their own: a rate of 0.004 changes a scale by about 0.3 % a step (TQT, Jain et al. 2019,
    arXiv 1903.08066, section 3.4, shows why Adam on logarithms needs no further normalisation).

    Args:
      qmodel: the model that will be trained; its structure says which parameters belong to quantizers.
      steps: of the optimizer, all epochs together. The rate falls to zero as a cosine.
      learning_rate: of the weights, as a part of each tensor's size.
      scale_rate: the rate of scales and other parameters of quantizers, as a multiple of `learning_rate`. 0 keeps them.
      weight_decay: decoupled, as a part of each weight and step at the full rate (AdamW, Loshchilov and Hutter 2017,
        arXiv 1711.05101). Parameters of quantizers do not decay: the logarithm of a scale would be pulled to a scale
        of 1.
      warmup: steps in which the rate grows from zero.

    Returns:
      An `optax.GradientTransformation` for the state of `wrt=nnx.Param`. It can be chained with others.

    Raises:
      TypeError: a model that is not quantized. ValueError: a number out of its range.
    """
    check_quantized(qmodel, "optimizer", numbers=False)
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"optimizer: {name}: expected an integer of at least {least}, got {value!r}.")
    if warmup >= steps:
        raise ValueError(f"optimizer: warmup: expected fewer than the {steps} steps, got {warmup}.")
    for name, rate in (("learning_rate", learning_rate), ("scale_rate", scale_rate), ("weight_decay", weight_decay)):
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"optimizer: {name}: expected a number of 0 or more, got {rate!r}.")

    def schedule(rate: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0 if warmup else rate, rate, warmup, steps)

    def adam(rate: float, *parts: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), *parts, optax.scale_by_learning_rate(schedule(rate)))

    size = optax.scale_by_param_block_rms(_SMALLEST_SIZE)
    decay = [optax.add_decayed_weights(weight_decay / learning_rate)] if weight_decay and learning_rate else []
    kinds: dict[Hashable, optax.GradientTransformation] = {
        "weight": adam(learning_rate, size, *decay),
        "logarithm": adam(learning_rate * scale_rate),
        "quantizer": adam(learning_rate * scale_rate, optax.stateless(_times_size)),
    }
    of_quantizers = paths_of(qmodel, QuantParam)

    def kind(path: tuple[Any, ...], _: Any) -> str:
        names = names_of(path)
        if not is_within(names, of_quantizers):
            return "weight"
        return "logarithm" if any(name.startswith("learned_log2") for name in names) else "quantizer"

    return optax.multi_transform(kinds, lambda params: jax.tree.map_with_path(kind, params))


def _times_size(updates: Any, params: Any) -> Any:
    """Each element times its own size: a vector holds the numbers of many quantizers."""
    return jax.tree.map(lambda step, x: step * jnp.maximum(jnp.abs(x), _SMALLEST_SIZE), updates, params)


def paths_of(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> set[tuple[str, ...]]:
    """The paths of all variables of a kind."""
    return {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, kind))}


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The path of a leaf, as `jax.tree_util` gives it, in names."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def is_within(names: tuple[str, ...], paths: set[tuple[str, ...]]) -> bool:
    """Whether a leaf belongs to a variable with one of these paths."""
    return any(names[: len(path)] == path for path in paths)
