"""ConvNeXt (Liu et al., 2022): depthwise 7x7, layer norm, GELU, layer scale."""

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """Depthwise 7x7, layer norm, a perceptron over the channels, scaled per channel and added."""

    def __init__(self, width: int, scale: float = 1e-6, *, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(width, width, (7, 7), feature_group_count=width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.project = nnx.Linear(4 * width, width, rngs=rngs)
        self.gamma = nnx.Param(scale * jnp.ones((width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.depthwise(x))
        y = jax.nn.gelu(self.expand(y), approximate=False)
        return x + self.gamma * self.project(y)


class ConvNeXt(nnx.Module):
    """The defaults are ConvNeXt-T."""

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 3, 9, 3),
        widths: tuple[int, ...] = (96, 192, 384, 768),
        classes: int = 1000,
        scale: float = 1e-6,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = nnx.Conv(3, widths[0], (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.stem_norm = nnx.LayerNorm(widths[0], epsilon=1e-6, rngs=rngs)
        downsamples, stages = [], []
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if i:
                norm = nnx.LayerNorm(widths[i - 1], epsilon=1e-6, rngs=rngs)
                conv = nnx.Conv(widths[i - 1], width, (2, 2), strides=(2, 2), rngs=rngs)
                downsamples.append(nnx.Sequential(norm, conv))
            stages.append(nnx.Sequential(*(Block(width, scale, rngs=rngs) for _ in range(depth))))
        self.downsamples, self.stages = nnx.List(downsamples), nnx.List(stages)
        self.norm = nnx.LayerNorm(widths[-1], epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem_norm(self.stem(x))
        for i, stage in enumerate(self.stages):
            if i:
                x = self.downsamples[i - 1](x)
            x = stage(x)
        x = self.norm(jnp.mean(x, axis=(1, 2)))
        return self.head(x)


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ConvNeXt((1, 1), (8, 12), 10, scale=0.1, rngs=rngs), jax.random.normal(rngs.data(), (2, 16, 16, 3))


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ConvNeXt(rngs=rngs), jax.random.normal(rngs.data(), (2, 224, 224, 3))
