"""A small convolutional network in Flax Linen, with batch norm and dropout."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx


class CNN(nn.Module):
    """Convolutions with batch norm, relu and pooling; `train` chooses the statistics and the dropout."""

    features: Sequence[int] = (32, 64)
    hidden: int = 256
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in self.features:
            x = nn.Conv(features=features, kernel_size=(3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(features=self.hidden)(x)
        x = nn.relu(x)
        x = nn.Dropout(rate=0.5, deterministic=not train)(x)
        return nn.Dense(features=self.classes, name="logits")(x)


def _build(model: CNN, shape: tuple[int, ...], rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    x = jax.random.normal(rngs.data(), shape)
    variables = model.init(rngs.params(), x)
    return model, variables, x


def small(rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    return _build(CNN((4, 6), 8), (2, 8, 8, 1), rngs)


def full(rngs: nnx.Rngs) -> tuple[nn.Module, Any, jax.Array]:
    return _build(CNN(), (2, 28, 28, 1), rngs)
