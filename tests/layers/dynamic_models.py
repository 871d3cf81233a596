"""What the tests of dynamic activation scales run on."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax import Dynamic, QSpec
from qjax.ops.dynamic import DynamicProduct
from qjax.tracing import from_jaxpr

F32 = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


X = normal(6, 8) * F32(3) + F32(1)

ASYMMETRIC = QSpec(bits=8, symmetric=False)


def product_of(function: Any, x: np.ndarray, w: np.ndarray, setting: Dynamic) -> DynamicProduct:
    (eqn,) = from_jaxpr(jax.make_jaxpr(function)(x, w)).equations
    return DynamicProduct(eqn, 1, setting)


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(8, 5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class Conv(nnx.Module):
    def __init__(self, **kwargs: Any) -> None:
        self.conv = nnx.Conv(4, 8, (3, 3), strides=2, padding="SAME", use_bias=False, rngs=nnx.Rngs(0), **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x)


class MLP(nnx.Module):
    def __init__(self) -> None:
        self.first, self.last = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


class Feed(nnx.Module):
    """What stands in a transformer beside attention."""

    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(8, 16, rngs=nnx.Rngs(1)), nnx.Linear(16, 8, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self) -> None:
        self.norm, self.mlp = nnx.LayerNorm(8, rngs=nnx.Rngs(0)), Feed()

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.norm(x))


class Stack(nnx.Module):
    def __init__(self) -> None:
        self.embed, self.block = nnx.Linear(8, 8, rngs=nnx.Rngs(3)), Block()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block(self.embed(x))
