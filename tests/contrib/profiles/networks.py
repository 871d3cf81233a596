"""Small networks that devices take, and one thing in each that they do not."""

from typing import Any

import jax
from flax import nnx

IMAGES = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
ROWS = jax.random.normal(jax.random.key(1), (4, 6))


class Chain(nnx.Module):
    """What every profile takes: a convolution, a pooling, a mean, a dense layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.dense(x.mean((1, 2)))


class Residual(nnx.Module):
    """A sum of two layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Conv(3, 4, (1, 1), rngs=rngs), nnx.Conv(4, 4, (1, 1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.first(x))
        return x + self.second(x)


class Gelu(nnx.Module):
    """A function of its own behind a dense layer."""

    def __init__(self) -> None:
        self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return nnx.gelu(self.dense(x))


class Softmax(Gelu):
    """A softmax at the end."""

    def __call__(self, x: Any) -> Any:
        return nnx.softmax(self.dense(x))


class Subtraction(Gelu):
    """A difference of two computed tensors."""

    def __call__(self, x: Any) -> Any:
        y = self.dense(x)
        return nnx.relu(y) - y


class Maximum(Gelu):
    """The greater of two tensors on two grids."""

    def __call__(self, x: Any) -> Any:
        y = self.dense(x)
        return jax.numpy.maximum(y, nnx.relu(y * 0.25))
