"""Networks for QONNX: scales that are powers of two, 8 bits to ternary weights, convolutions and dense layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax

_conv = functools.partial(nnx.Conv, bias_init=nnx.initializers.normal(0.3))
_linear = functools.partial(nnx.Linear, bias_init=nnx.initializers.normal(0.3))


class Images(nnx.Module):
    """Convolutions, one of them depthwise, a residual sum, bounds, a pooling, a mean, a dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = _conv(3, 8, (3, 3), rngs=rngs), _conv(8, 8, (3, 3), rngs=rngs)
        self.deep = _conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.last = _linear(8, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        x = nnx.relu(x + self.deep(jnp.clip(self.second(x), 0.0, 1.0)))
        return self.last(x.mean((1, 2)))


class Rows(nnx.Module):
    """Dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = _linear(16, 64, rngs=rngs), _linear(64, 32, rngs=rngs)
        self.last = _linear(32, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


NETWORKS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], tuple[int, ...]]] = {
    "images": (Images, (8, 8, 3)),
    "rows": (Rows, (16,)),
}
WIDTHS = {"w8a8": (8, 8), "w4a4": (4, 4), "ternary": (2, 4)}


def inputs(name: str, count: int, seed: int) -> np.ndarray:
    """Random inputs."""
    return np.asarray(jax.random.normal(jax.random.key(seed), (count, *NETWORKS[name][1])))


def recipe(width: str) -> qjax.Recipe:
    """All scales are powers of two, and all zero points 0."""
    weights, activations = WIDTHS[width]
    return qjax.Recipe(
        target="fpga",
        method="tqt",
        weight_method="tqt",
        weights=qjax.QSpec(bits=weights, axis=-1),
        activations=qjax.QSpec(bits=activations),
    )


def graph_of(name: str, width: str) -> Any:
    """The graph of a network with random biases."""
    model = NETWORKS[name][0](nnx.Rngs(0))
    qmodel = qjax.quantize(model, recipe(width), inputs(name, 16, 0))
    qmodel.eval()
    return qjax.convert(qmodel, inputs(name, 2, 0))
