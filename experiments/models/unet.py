"""U-Net (Ronneberger et al., 2015) with the three usual ways up: transposed convolution, bilinear, nearest.

Group norm and SiLU as in today's variants; two outputs: a mask at full resolution and one at half of it (deep
supervision).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Up = Literal["transpose", "bilinear", "nearest"]


class DoubleConv(nnx.Module):
    """Two 3x3 convolutions, each with a norm and an activation."""

    def __init__(self, inputs: int, outputs: int, norm: str, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs)
        if norm == "group":
            self.norm1 = nnx.GroupNorm(outputs, num_groups=min(8, outputs // 2), rngs=rngs)
            self.norm2 = nnx.GroupNorm(outputs, num_groups=min(8, outputs // 2), rngs=rngs)
            self.act = nnx.silu
        else:
            self.norm1 = nnx.BatchNorm(outputs, rngs=rngs)
            self.norm2 = nnx.BatchNorm(outputs, rngs=rngs)
            self.act = nnx.relu

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class Upsample(nnx.Module):
    """Twice the height and width, half the channels."""

    def __init__(self, inputs: int, outputs: int, how: Up, *, rngs: nnx.Rngs) -> None:
        self.how = how
        if how == "transpose":
            self.conv = nnx.ConvTranspose(inputs, outputs, (2, 2), strides=(2, 2), rngs=rngs)
        else:
            self.conv = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.how != "transpose":
            n, h, w, c = x.shape
            x = jax.image.resize(x, (n, 2 * h, 2 * w, c), method=self.how)
        return self.conv(x)


class UNet(nnx.Module):
    """`widths`: channels per level; `ups`: the way up into each level but the lowest, from the bottom."""

    def __init__(
        self,
        channels: int = 1,
        widths: tuple[int, ...] = (64, 128, 256, 512, 1024),
        ups: tuple[Up, ...] = ("transpose",) * 4,
        classes: int = 2,
        norm: str = "batch",
        *,
        rngs: nnx.Rngs,
    ) -> None:
        ins = (channels, *widths[:-1])
        self.downs = nnx.List([DoubleConv(i, o, norm, rngs=rngs) for i, o in zip(ins, widths, strict=True)])
        self.ups = nnx.List([])
        self.merges = nnx.List([])
        for level, how in zip(range(len(widths) - 2, -1, -1), ups, strict=True):
            self.ups.append(Upsample(widths[level + 1], widths[level], how, rngs=rngs))
            self.merges.append(DoubleConv(2 * widths[level], widths[level], norm, rngs=rngs))
        self.head = nnx.Conv(widths[0], classes, (1, 1), rngs=rngs)
        self.half_head = nnx.Conv(widths[1], classes, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        skips = []
        for i, down in enumerate(self.downs):
            if i:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
            x = down(x)
            skips.append(x)
        half = x
        for up, merge, skip in zip(self.ups, self.merges, skips[-2::-1], strict=True):
            half = x
            x = merge(jnp.concatenate([skip, up(x)], axis=-1))
        return self.head(x), self.half_head(half)


def small_transpose(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    model = UNet(1, (4, 6, 8), ("transpose", "transpose"), rngs=rngs)
    return model, jax.random.normal(rngs.data(), (2, 8, 8, 1))


def transpose(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return UNet(rngs=rngs), jax.random.normal(rngs.data(), (2, 128, 128, 1))


def small_resize(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    model = UNet(3, (4, 6, 8), ("bilinear", "nearest"), norm="group", rngs=rngs)
    return model, jax.random.normal(rngs.data(), (2, 8, 8, 3))


def resize(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    model = UNet(3, ups=("nearest", "nearest", "bilinear", "bilinear"), norm="group", rngs=rngs)
    return model, jax.random.normal(rngs.data(), (2, 128, 128, 3))


small, full = small_transpose, transpose
