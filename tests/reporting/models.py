"""A small network with everything that a report shows: a residual sum, 4-bit weights, a table, hostile names."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import qjax

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(x))
        return self.head(x + nnx.gelu(self.second(x)))


def data(n: int = 24) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (n, 6))


def quantized(target: str = "tflite_micro") -> qjax.QuantizedModel:
    recipe = qjax.Recipe(target=target, weights=qjax.QSpec(bits=4, axis=-1), first_last_bits=8)
    qmodel = qjax.quantize(Net(nnx.Rngs(0)), recipe, data())
    qmodel.eval()
    return qmodel


def agreement(output: Any, batch: Any) -> Any:
    return jnp.mean(jnp.argmax(output, -1) == batch[1])
