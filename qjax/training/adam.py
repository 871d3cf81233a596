"""The optimizer of the default training recipe: Adam with a cosine decay and separate rates for scales."""

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
"""Adam's learning rate, relative to the size of each tensor."""

_SMALLEST_SIZE = 1e-2
"""The least root mean square that is assumed of a tensor, so that a tensor of zeros can train."""


def optimizer(
    qmodel: QuantizedModel,
    steps: int,
    *,
    learning_rate: float = LEARNING_RATE,
    scale_rate: float = 1.0,
    weight_decay: float = 0.0,
    warmup: int = 0,
) -> optax.GradientTransformation:
    """Adam for a quantized model: one relative learning rate for weights of any size, and a separate rate for scales.

        steps = epochs * len(batches)
        optimizer = nnx.Optimizer(qmodel, qjax.training.optimizer(qmodel, steps), wrt=nnx.Param)

    A learning rate that fits the weights of one network is too great for those of another. The step of each tensor is
    therefore multiplied by its root mean square (Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 8). A
    rate of 0.004 then moves a weight by about 0.4 % of the tensor's size. Scales are learned as logarithms to base 2,
    which have no size of their own: a rate of 0.004 changes a scale by about 0.3 % a step (TQT, Jain et al. 2019,
    arXiv 1903.08066, section 3.4, shows why Adam on logarithms needs no further normalisation).

    Args:
      qmodel: the model that will be trained; its structure tells which parameters belong to quantizers.
      steps: of the optimizer, all epochs together. The rate falls to zero as a cosine.
      learning_rate: of the weights, relative to each tensor's size.
      scale_rate: the rate of scales and other parameters of quantizers, as a multiple of `learning_rate`. With 0 they
        do not train.
      weight_decay: decoupled, as a fraction of each weight per step at the full rate (AdamW, Loshchilov and Hutter
        2017, arXiv 1711.05101). Parameters of quantizers do not decay, because decay would pull the logarithm of a
        scale to 0, that is, the scale to 1.
      warmup: number of steps over which the rate grows from zero.

    Returns:
      An `optax.GradientTransformation` for the state of `wrt=nnx.Param`. It can be chained with others.

    Raises:
      TypeError: the model is not quantized. ValueError: a number is out of its range.
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
    """Scale each element's update by the element's own size, because a vector holds the numbers of many quantizers."""
    return jax.tree.map(lambda step, x: step * jnp.maximum(jnp.abs(x), _SMALLEST_SIZE), updates, params)


def paths_of(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> set[tuple[str, ...]]:
    """The paths of all variables of a kind."""
    return {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, kind))}


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The path of a leaf, as `jax.tree_util` represents it, as names."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def is_within(names: tuple[str, ...], paths: set[tuple[str, ...]]) -> bool:
    """Whether a leaf belongs to a variable with one of these paths."""
    return any(names[: len(path)] == path for path in paths)
