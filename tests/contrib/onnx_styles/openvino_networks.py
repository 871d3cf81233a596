"""Networks for OpenVINO: whole graphs with uint8 activations, whose files its CPU plugin computes exactly."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax

RECIPE = qjax.Recipe(
    target="openvino_cpu", activations=qjax.QSpec(bits=8, signed=False, symmetric=False), weights=qjax.QSpec(axis=-1)
)


class Residual(nnx.Module):
    """A network with residual sums, a batch norm, a stride, poolings, a mean and dense layers, two without a bias."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second, self.third = (nnx.Conv(n, 16, (3, 3), rngs=rngs) for n in (3, 16, 16))
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.down = nnx.Conv(16, 32, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.dense, self.last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 10, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.first(x))
        x = nnx.relu(x + self.third(nnx.relu(self.norm(self.second(x)))))
        x = nnx.relu(self.down(nnx.max_pool(x, (2, 2), (2, 2))))
        x = nnx.avg_pool(x, (2, 2), (1, 1), padding="SAME", count_include_pad=False)
        return self.last(nnx.relu(self.dense(x.mean((1, 2)))))


class Mobile(nnx.Module):
    """Depthwise and 1x1 convolutions, hard-swish, relu6, squeeze and excitation, a residual sum of a product."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 16, (3, 3), strides=2, rngs=rngs)
        self.deep = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.wide = nnx.Conv(16, 24, (1, 1), rngs=rngs)
        self.deeper = nnx.Conv(24, 24, (5, 5), feature_group_count=24, rngs=rngs)
        self.mixed = nnx.Conv(24, 24, (1, 1), rngs=rngs)
        self.squeeze, self.excite = nnx.Linear(24, 8, rngs=rngs), nnx.Linear(8, 24, rngs=rngs)
        self.last = nnx.Linear(24, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.wide(nnx.relu6(self.deep(nnx.relu6(self.stem(x)))))
        y = nnx.hard_swish(self.mixed(nnx.hard_swish(self.deeper(x))))
        gate = nnx.sigmoid(self.excite(nnx.relu(self.squeeze(y.mean((1, 2))))))
        return self.last((x + y * gate[:, None, None, :]).mean((1, 2)))


class Moves(nnx.Module):
    """A concatenation, slices, a padding and a reshape between convolutions, and a difference of two tensors."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = (nnx.Conv(n, 16, (3, 3), rngs=rngs) for n in (3, 16))
        self.third, self.last = nnx.Conv(32, 16, (3, 3), rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        y = self.second(x)
        x = nnx.relu(self.third(jnp.concatenate([x, y - x], -1)))
        x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 1), (1, 0), (0, 0)))[:, :4, :4]
        return self.last(x.reshape(x.shape[0], -1))


class Dense(nnx.Module):
    """Dense layers only, on rows, with a gelu between them and one on three axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = (48, 96, 64, 64, 5)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x: Any) -> Any:
        x = x.reshape(x.shape[0], -1, 48)
        for layer in self.layers[:-1]:
            x = nnx.gelu(layer(x))
        return self.layers[-1](nnx.relu(x))


NETWORKS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "residual": Residual,
    "mobile": Mobile,
    "moves": Moves,
    "dense": Dense,
}
SHAPE = (16, 16, 3)


def images(count: int, seed: int) -> np.ndarray:
    """Random images."""
    return np.asarray(jax.random.normal(jax.random.key(seed), (count, *SHAPE)))


def narrowed(graph: Any) -> Any:
    """The graph with weights of 7 bits: without VNNI, pairs of products of uint8 and int8 saturate to int16."""
    weights = {k: t for k, t in graph.ir.tensors.items() if t.dtype == "int8" and t.value is not None}
    tensors = {
        key: dataclasses.replace(tensor, value=np.clip(tensor.value, -63, 63)) for key, tensor in weights.items()
    }
    return qjax.IntegerGraph(graph.ir.replace(tensors={**graph.ir.tensors, **tensors}))


def exact_here(graph: Any) -> Any:
    """The graph whose codes OpenVINO computes on this CPU: this one, or without VNNI the one of 7 bits."""
    return graph if "vnni" in Path("/proc/cpuinfo").read_text() else narrowed(graph)


def graph_of(name: str, seed: int = 0) -> tuple[Any, Any]:
    """The quantized network and its graph."""
    qmodel = qjax.quantize(NETWORKS[name](nnx.Rngs(seed)), RECIPE, images(8, seed))
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, images(2, seed))
