"""Networks that are emitted as circuits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax


class Residual(nnx.Module):
    """Two dense layers around a residual sum."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.second(nnx.relu(self.first(x)))


class Dense(nnx.Module):
    """Two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 6, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(x)))


class Recurrent(nnx.Module):
    """Gates, products of codes, tables, a state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cells, self.last = nnx.RNN(nnx.LSTMCell(2, 3, rngs=rngs), rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        states: Any = self.cells(x)
        return self.last(states[:, -1])


class Kinds(nnx.Module):
    """A stride, a transposed and a dilated depthwise convolution, a table, an average pool."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(2, 3, (3, 3), strides=2, rngs=rngs)
        self.wider = nnx.ConvTranspose(3, 2, (2, 2), strides=2, rngs=rngs)
        self.deep = nnx.Conv(2, 2, (3, 3), feature_group_count=2, kernel_dilation=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.gelu(self.wider(self.first(x)))
        with jax.numpy_dtype_promotion("standard"):
            x = nnx.avg_pool(x, (2, 2), (2, 2))
        return jnp.concatenate([nnx.tanh(self.deep(x)), -x], -1)


class Attention(nnx.Module):
    """Products of two activations."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("btd,bsd->bts", self.query(x), self.key(x))


class Tokens(nnx.Module):
    """Indices into a table."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table, self.last = nnx.Embed(13, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.last(self.table(tokens).mean(1))


SHAPES = {Recurrent: (2, 2), Kinds: (6, 6, 2), Attention: (3, 4), Residual: (6,), Dense: (6,)}


def converted(kind: Any, **recipe: Any) -> Any:
    x = np.asarray(jax.random.normal(jax.random.key(0), (32, *SHAPES[kind])))
    qmodel = qjax.quantize(kind(nnx.Rngs(0)), qjax.Recipe(**recipe), x)
    qmodel.eval()
    return qjax.convert(qmodel, x)


def for_fpga(kind: Any) -> Any:
    spec = qjax.QSpec(bits=5)
    return converted(kind, target="fpga", weights=spec, activations=spec, method="tqt", weight_method="tqt")


def with_learned_bits(dropped: float) -> Any:
    """A network whose weights and activations have lost that many of 8 bits, more or less; some weights are 0."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (32, 6)))
    spec = qjax.QSpec(bits=8)
    recipe = qjax.Recipe("fpga", weights=spec, activations=spec, method="tqt", weight_method="tqt")
    learner = qjax.training.LearnedBits(qjax.quantize(Dense(nnx.Rngs(0)), recipe, x), x)
    for seed, k in enumerate(learner.dropped.values()):
        k[...] = dropped + 2 * jax.random.normal(jax.random.key(seed), k.shape)
    qmodel = learner.finish()
    qmodel.eval()
    return qjax.convert(qmodel, x)
