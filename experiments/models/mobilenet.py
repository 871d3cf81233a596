"""MobileNet V1 (Howard et al., 2017), V2 (Sandler et al., 2018) and V3-Small (Howard et al., 2019)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def divisible(channels: float, by: int = 8) -> int:
    """Channels rounded to a multiple, never below 90 %: the rule of the reference implementations."""
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * channels else rounded


class ConvNorm(nnx.Module):
    """Convolution, batch norm, and an activation if there is one."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: Callable[[jax.Array], jax.Array] | None = jax.nn.relu6,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel_size=(kernel, kernel),
            strides=stride,
            feature_group_count=groups,
            use_bias=False,
            rngs=rngs,
        )
        self.bn = nnx.BatchNorm(outputs, momentum=0.99, epsilon=1e-3, rngs=rngs)
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.bn(self.conv(x))
        return x if self.act is None else self.act(x)


class MobileNetV1(nnx.Module):
    """Depthwise and pointwise convolutions in turn."""

    LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))

    def __init__(
        self,
        alpha: float = 1.0,
        layers: tuple[tuple[int, int], ...] = LAYERS,
        classes: int = 1000,
        dropout: float = 1e-3,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        inputs = int(32 * alpha)
        body = [ConvNorm(3, inputs, 3, 2, rngs=rngs)]
        for channels, stride in layers:
            outputs = int(channels * alpha)
            body.append(ConvNorm(inputs, inputs, 3, stride, groups=inputs, rngs=rngs))
            body.append(ConvNorm(inputs, outputs, rngs=rngs))
            inputs = outputs
        self.body = nnx.Sequential(*body)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.body(x)
        x = jnp.mean(x, axis=(1, 2))
        return self.head(self.dropout(x))


class InvertedResidual(nnx.Module):
    """Expand, filter per channel, project linearly; added to the input where the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int, *, rngs: nnx.Rngs) -> None:
        hidden = inputs * expand
        layers = [] if expand == 1 else [ConvNorm(inputs, hidden, rngs=rngs)]
        layers.append(ConvNorm(hidden, hidden, 3, stride, groups=hidden, rngs=rngs))
        layers.append(ConvNorm(hidden, outputs, act=None, rngs=rngs))
        self.layers = nnx.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nnx.Module):
    """`settings`: expansion, channels, repeats, stride of each stage."""

    SETTINGS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(
        self,
        alpha: float = 1.0,
        settings: tuple[tuple[int, int, int, int], ...] = SETTINGS,
        last: int = 1280,
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        inputs = divisible(32 * alpha)
        self.stem = ConvNorm(3, inputs, 3, 2, rngs=rngs)
        blocks = []
        for expand, channels, repeats, first in settings:
            outputs = divisible(channels * alpha)
            for i in range(repeats):
                blocks.append(InvertedResidual(inputs, outputs, first if i == 0 else 1, expand, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.last = ConvNorm(inputs, last, rngs=rngs)
        self.head = nnx.Linear(last, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return self.head(x.mean((1, 2)))


class SqueezeExcite(nnx.Module):
    """Channels gated by a hard sigmoid of their averages."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        squeezed = divisible(channels / 4)
        self.reduce = nnx.Conv(channels, squeezed, (1, 1), rngs=rngs)
        self.expand = nnx.Conv(squeezed, channels, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        s = jnp.mean(x, axis=(1, 2), keepdims=True)
        s = self.expand(nnx.relu(self.reduce(s)))
        return x * jax.nn.hard_sigmoid(s)


class BlockV3(nnx.Module):
    """An inverted residual with squeeze-and-excite and a choice of activation."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, kernel: int, stride: int, se: bool, hs: bool, *, rngs: nnx.Rngs
    ) -> None:
        act = jax.nn.hard_swish if hs else jax.nn.relu
        self.expand = ConvNorm(inputs, hidden, act=act, rngs=rngs)
        self.depthwise = ConvNorm(hidden, hidden, kernel, stride, groups=hidden, act=act, rngs=rngs)
        self.se = SqueezeExcite(hidden, rngs=rngs) if se else (lambda x: x)
        self.project = ConvNorm(hidden, outputs, act=None, rngs=rngs)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.project(self.se(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


class MobileNetV3(nnx.Module):
    """`settings`: kernel, hidden channels, outputs, squeeze-and-excite, hard swish, stride of each block."""

    SMALL = (
        (3, 16, 16, True, False, 2),
        (3, 72, 24, False, False, 2),
        (3, 88, 24, False, False, 1),
        (5, 96, 40, True, True, 2),
        (5, 240, 40, True, True, 1),
        (5, 240, 40, True, True, 1),
        (5, 120, 48, True, True, 1),
        (5, 144, 48, True, True, 1),
        (5, 288, 96, True, True, 2),
        (5, 576, 96, True, True, 1),
        (5, 576, 96, True, True, 1),
    )

    def __init__(
        self,
        settings: tuple[tuple[int, int, int, bool, bool, int], ...] = SMALL,
        stem: int = 16,
        last: tuple[int, int] = (576, 1024),
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = ConvNorm(3, stem, 3, 2, act=jax.nn.hard_swish, rngs=rngs)
        blocks, inputs = [], stem
        for kernel, hidden, outputs, se, hs, stride in settings:
            blocks.append(BlockV3(inputs, hidden, outputs, kernel, stride, se, hs, rngs=rngs))
            inputs = outputs
        self.blocks = nnx.List(blocks)
        self.conv = ConvNorm(inputs, last[0], act=jax.nn.hard_swish, rngs=rngs)
        self.linear = nnx.Linear(*last, rngs=rngs)
        self.head = nnx.Linear(last[1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.conv(x).mean(axis=(1, 2))
        return self.head(jax.nn.hard_swish(self.linear(x)))


def images(rngs: nnx.Rngs, size: int, batch: int = 2) -> jax.Array:
    return jax.random.normal(rngs.data(), (batch, size, size, 3))


def small_v1(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return MobileNetV1(0.25, ((32, 1), (64, 2), (64, 1)), 10, rngs=rngs), images(rngs, 12)


def v1(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return MobileNetV1(rngs=rngs), images(rngs, 224)


def small_v2(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    settings = ((1, 8, 1, 1), (4, 16, 2, 2))
    return MobileNetV2(0.25, settings, 32, 10, rngs=rngs), images(rngs, 12)


def v2(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return MobileNetV2(rngs=rngs), images(rngs, 224)


def small_v3(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    settings = ((3, 16, 8, True, False, 2), (5, 24, 8, True, True, 1))
    return MobileNetV3(settings, 8, (24, 32), 10, rngs=rngs), images(rngs, 12)


def v3(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return MobileNetV3(rngs=rngs), images(rngs, 224)


small, full = small_v1, v1
