"""The networks: a ResNet, a depthwise CNN, a GRU and a transformer, all with norms; and two for the quick form."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.mobilenet import ConvNorm
from experiments.models.small import CNN, MLP, ResidualBlock
from experiments.models.vit import EncoderBlock


class ResNet(nnx.Module):
    """Six 3x3 convolutions in three residual blocks of 16, 32 and 64 channels, some 75,000 weights."""

    def __init__(self, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        widths = (width, 2 * width, 4 * width)
        self.blocks = nnx.List(
            ResidualBlock(i, o, stride=s, rngs=rngs)
            for i, o, s in zip((width, *widths[:-1]), widths, (1, 2, 2), strict=True)
        )
        self.head = nnx.Linear(4 * width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class Depthwise(nnx.Module):
    """MobileNet V1 in little: depthwise and pointwise convolutions in turn, relu6."""

    LAYERS = ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1))

    def __init__(self, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        body, inputs = [ConvNorm(1, width, 3, 1, rngs=rngs)], width
        for outputs, stride in self.LAYERS:
            body.append(ConvNorm(inputs, inputs, 3, stride, groups=inputs, rngs=rngs))
            body.append(ConvNorm(inputs, outputs, rngs=rngs))
            inputs = outputs
        for layer in body:
            layer.bn.momentum = 0.9
        self.body = nnx.Sequential(*body)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.mean(self.body(x), axis=(1, 2)))


class Gru(nnx.Module):
    """The rows of an image are a sequence: a dense layer with layer norm, a GRU, and a head on the last step."""

    def __init__(self, side: int = 28, hidden: int = 64, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(side, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(hidden, hidden, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.embed(x[..., 0])))
        states: Any = self.rnn(x)
        return self.head(states[:, -1])


class Transformer(nnx.Module):
    """Two pre-norm encoder blocks over patches of 4x4, and the mean of the tokens."""

    def __init__(self, side: int = 28, width: int = 48, depth: int = 2, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Conv(1, width, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, (side // 4) ** 2, width)))
        self.blocks = nnx.List([EncoderBlock(width, 4, 2 * width, 0.0, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and its data. rate: of the float training. quick: whether it trains in seconds."""

    make: Callable[..., Any]
    data: str
    rate: float = 3e-3
    quick: bool = False


TASKS = {
    "ResNet": Task(ResNet, "fashion"),
    "depthwise CNN": Task(Depthwise, "fashion"),
    "GRU": Task(Gru, "fashion"),
    "transformer": Task(Transformer, "fashion", rate=1e-3),
    "MLP on digits": Task(MLP, "digits", quick=True),
    "CNN on digits": Task(CNN, "digits", quick=True),
}
"""Name -> task."""
