"""EfficientNet (Tan and Le, 2019): MBConv blocks with squeeze-and-excite, SiLU and stochastic depth."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


class SqueezeExcite(nnx.Module):
    """Channels gated by a sigmoid of their averages."""

    def __init__(self, channels: int, squeezed: int, *, rngs: nnx.Rngs) -> None:
        self.reduce = nnx.Linear(channels, squeezed, rngs=rngs)
        self.expand = nnx.Linear(squeezed, channels, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        s = jnp.mean(x, axis=(1, 2))
        s = nnx.silu(self.reduce(s))
        s = nnx.sigmoid(self.expand(s))
        return x * s[:, None, None, :]


class MBConv(nnx.Module):
    """Expansion, depthwise convolution, squeeze-and-excite, projection, and a residual that is dropped at times."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expand: int, drop: float = 0.0, *, rngs: nnx.Rngs
    ) -> None:
        hidden = inputs * expand
        self.has_expansion = expand != 1
        if self.has_expansion:
            self.expand_conv = nnx.Conv(inputs, hidden, (1, 1), use_bias=False, rngs=rngs)
            self.norm0 = nnx.BatchNorm(hidden, momentum=0.99, epsilon=1e-3, rngs=rngs)
        self.depthwise = nnx.Conv(
            hidden, hidden, (kernel, kernel), stride, feature_group_count=hidden, use_bias=False, rngs=rngs
        )
        self.norm1 = nnx.BatchNorm(hidden, momentum=0.99, epsilon=1e-3, rngs=rngs)
        self.se = SqueezeExcite(hidden, max(1, inputs // 4), rngs=rngs)
        self.project = nnx.Conv(hidden, outputs, (1, 1), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(outputs, momentum=0.99, epsilon=1e-3, rngs=rngs)
        self.residual = stride == 1 and inputs == outputs
        self.drop_path = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = inputs
        if self.has_expansion:
            x = nnx.silu(self.norm0(self.expand_conv(x)))
        x = nnx.silu(self.norm1(self.depthwise(x)))
        x = self.norm2(self.project(self.se(x)))
        return self.drop_path(x) + inputs if self.residual else x


class EfficientNet(nnx.Module):
    """`settings`: expansion, channels, repeats, stride, kernel of each stage; the defaults are B0."""

    SETTINGS = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )

    def __init__(
        self,
        settings: tuple[tuple[int, int, int, int, int], ...] = SETTINGS,
        stem: int = 32,
        last: int = 1280,
        classes: int = 1000,
        depth: float = 1.0,
        drop: float = 0.2,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = nnx.Conv(3, stem, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(stem, momentum=0.99, epsilon=1e-3, rngs=rngs)
        blocks, inputs = [], stem
        total = sum(math.ceil(depth * repeats) for _, _, repeats, _, _ in settings)
        for expand, outputs, repeats, first, kernel in settings:
            for i in range(math.ceil(depth * repeats)):
                rate = drop * len(blocks) / total
                blocks.append(MBConv(inputs, outputs, kernel, first if i == 0 else 1, expand, rate, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.last = nnx.Conv(inputs, last, (1, 1), use_bias=False, rngs=rngs)
        self.last_norm = nnx.BatchNorm(last, momentum=0.99, epsilon=1e-3, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(last, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.silu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = nnx.silu(self.last_norm(self.last(x)))
        x = self.dropout(x.mean(axis=(1, 2)))
        return self.head(x)


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    settings = ((1, 8, 1, 1, 3), (4, 8, 2, 2, 5))
    return EfficientNet(settings, 8, 16, 10, rngs=rngs), jax.random.normal(rngs.data(), (2, 12, 12, 3))


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return EfficientNet(rngs=rngs), jax.random.normal(rngs.data(), (2, 224, 224, 3))
