"""Inception V1 (Szegedy et al., 2014, with the batch norm of 2015) and the blocks of V3 (Szegedy et al., 2015)."""

import jax
import jax.numpy as jnp
from flax import nnx


class ConvNorm(nnx.Module):
    """Convolution, batch norm without a learned scale (as in the reference networks), relu."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int] = (1, 1),
        stride: int = 1,
        padding: str = "SAME",
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            inputs, outputs, kernel, strides=(stride, stride), padding=padding, use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(outputs, use_scale=False, epsilon=1e-3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(self.norm(self.conv(x)))


class InceptionV1Block(nnx.Module):
    """1x1, 3x3, 5x5 and max pooling side by side; `widths` as in the paper's table."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int], *, rngs: nnx.Rngs) -> None:
        one, reduce3, three, reduce5, five, pool = widths
        self.branch1 = ConvNorm(inputs, one, rngs=rngs)
        self.branch3 = nnx.Sequential(ConvNorm(inputs, reduce3, rngs=rngs), ConvNorm(reduce3, three, (3, 3), rngs=rngs))
        self.branch5 = nnx.Sequential(ConvNorm(inputs, reduce5, rngs=rngs), ConvNorm(reduce5, five, (5, 5), rngs=rngs))
        self.project = ConvNorm(inputs, pool, rngs=rngs)
        self.outputs = one + three + five + pool

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.max_pool(x, window_shape=(3, 3), strides=(1, 1), padding="SAME")
        branches = [self.branch1(x), self.branch3(x), self.branch5(x), self.project(pooled)]
        return jnp.concatenate(branches, axis=-1)


class InceptionV1(nnx.Module):
    """GoogLeNet. `stages`: the blocks between two poolings."""

    STAGES = (
        ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
        (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ),
        ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    )

    def __init__(
        self,
        stem: tuple[int, int, int] = (64, 64, 192),
        stages: tuple[tuple[tuple[int, int, int, int, int, int], ...], ...] = STAGES,
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv1 = ConvNorm(3, stem[0], (7, 7), 2, rngs=rngs)
        self.conv2 = ConvNorm(stem[0], stem[1], rngs=rngs)
        self.conv3 = ConvNorm(stem[1], stem[2], (3, 3), rngs=rngs)
        inputs, built = stem[2], []
        for stage in stages:
            blocks = []
            for widths in stage:
                blocks.append(InceptionV1Block(inputs, widths, rngs=rngs))
                inputs = blocks[-1].outputs
            built.append(nnx.Sequential(*blocks))
        self.stages = nnx.List(built)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(self.conv1(x), (3, 3), (2, 2), "SAME")
        x = self.conv3(self.conv2(x))
        for stage in self.stages:
            x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
            x = stage(x)
        x = jnp.mean(x, axis=(1, 2))
        return self.head(self.dropout(x))


class BlockA(nnx.Module):
    """35x35: 1x1, 5x5, double 3x3, average pooling."""

    def __init__(self, inputs: int, pool: int, unit: int = 16, *, rngs: nnx.Rngs) -> None:
        self.one = ConvNorm(inputs, 4 * unit, rngs=rngs)
        self.five = nnx.Sequential(
            ConvNorm(inputs, 3 * unit, rngs=rngs), ConvNorm(3 * unit, 4 * unit, (5, 5), rngs=rngs)
        )
        self.double = nnx.Sequential(
            ConvNorm(inputs, 4 * unit, rngs=rngs),
            ConvNorm(4 * unit, 6 * unit, (3, 3), rngs=rngs),
            ConvNorm(6 * unit, 6 * unit, (3, 3), rngs=rngs),
        )
        self.pool = ConvNorm(inputs, pool, rngs=rngs)
        self.outputs = 14 * unit + pool

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME", count_include_pad=False)
        return jnp.concatenate([self.one(x), self.five(x), self.double(x), self.pool(pooled)], axis=-1)


class ReductionA(nnx.Module):
    """From 35x35 to 17x17: strided convolutions beside max pooling, all without padding."""

    def __init__(self, inputs: int, unit: int = 16, *, rngs: nnx.Rngs) -> None:
        self.three = ConvNorm(inputs, 24 * unit, (3, 3), 2, "VALID", rngs=rngs)
        self.double = nnx.Sequential(
            ConvNorm(inputs, 4 * unit, rngs=rngs),
            ConvNorm(4 * unit, 6 * unit, (3, 3), rngs=rngs),
            ConvNorm(6 * unit, 6 * unit, (3, 3), 2, "VALID", rngs=rngs),
        )
        self.outputs = inputs + 30 * unit

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.max_pool(x, (3, 3), strides=(2, 2))
        return jnp.concatenate([self.three(x), self.double(x), pooled], axis=-1)


class BlockB(nnx.Module):
    """17x17: a 7x7 convolution as 1x7 and 7x1, once and twice."""

    def __init__(self, inputs: int, middle: int, unit: int = 16, *, rngs: nnx.Rngs) -> None:
        out = 12 * unit
        self.one = ConvNorm(inputs, out, rngs=rngs)
        self.seven = nnx.Sequential(
            ConvNorm(inputs, middle, rngs=rngs),
            ConvNorm(middle, middle, (1, 7), rngs=rngs),
            ConvNorm(middle, out, (7, 1), rngs=rngs),
        )
        self.double = nnx.Sequential(
            ConvNorm(inputs, middle, rngs=rngs),
            ConvNorm(middle, middle, (7, 1), rngs=rngs),
            ConvNorm(middle, middle, (1, 7), rngs=rngs),
            ConvNorm(middle, middle, (7, 1), rngs=rngs),
            ConvNorm(middle, out, (1, 7), rngs=rngs),
        )
        self.pool = ConvNorm(inputs, out, rngs=rngs)
        self.outputs = 4 * out

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME", count_include_pad=False)
        return jnp.concatenate([self.one(x), self.seven(x), self.double(x), self.pool(pooled)], axis=-1)


class ReductionB(nnx.Module):
    """From 17x17 to 8x8."""

    def __init__(self, inputs: int, unit: int = 16, *, rngs: nnx.Rngs) -> None:
        middle = 12 * unit
        self.three = nnx.Sequential(
            ConvNorm(inputs, middle, rngs=rngs), ConvNorm(middle, 20 * unit, (3, 3), 2, "VALID", rngs=rngs)
        )
        self.seven = nnx.Sequential(
            ConvNorm(inputs, middle, rngs=rngs),
            ConvNorm(middle, middle, (1, 7), rngs=rngs),
            ConvNorm(middle, middle, (7, 1), rngs=rngs),
            ConvNorm(middle, middle, (3, 3), 2, "VALID", rngs=rngs),
        )
        self.outputs = inputs + 32 * unit

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.max_pool(x, (3, 3), strides=(2, 2))
        return jnp.concatenate([self.three(x), self.seven(x), pooled], axis=-1)


class BlockC(nnx.Module):
    """8x8: branches that split into 1x3 and 3x1 once more."""

    def __init__(self, inputs: int, unit: int = 64, *, rngs: nnx.Rngs) -> None:
        self.one = ConvNorm(inputs, 5 * unit, rngs=rngs)
        self.three = ConvNorm(inputs, 6 * unit, rngs=rngs)
        self.three_a = ConvNorm(6 * unit, 6 * unit, (1, 3), rngs=rngs)
        self.three_b = ConvNorm(6 * unit, 6 * unit, (3, 1), rngs=rngs)
        self.double = nnx.Sequential(
            ConvNorm(inputs, 7 * unit, rngs=rngs), ConvNorm(7 * unit, 6 * unit, (3, 3), rngs=rngs)
        )
        self.double_a = ConvNorm(6 * unit, 6 * unit, (1, 3), rngs=rngs)
        self.double_b = ConvNorm(6 * unit, 6 * unit, (3, 1), rngs=rngs)
        self.pool = ConvNorm(inputs, 3 * unit, rngs=rngs)
        self.outputs = 32 * unit

    def __call__(self, x: jax.Array) -> jax.Array:
        three, double = self.three(x), self.double(x)
        three = jnp.concatenate([self.three_a(three), self.three_b(three)], axis=-1)
        double = jnp.concatenate([self.double_a(double), self.double_b(double)], axis=-1)
        pooled = nnx.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME", count_include_pad=False)
        return jnp.concatenate([self.one(x), three, double, self.pool(pooled)], axis=-1)


class InceptionV3(nnx.Module):
    """`depths`: how many blocks A, B and C, with a reduction between; `unit` 16 is the paper's width."""

    def __init__(
        self,
        unit: int = 16,
        depths: tuple[int, ...] = (3, 4, 2),
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = nnx.Sequential(
            ConvNorm(3, 2 * unit, (3, 3), 2, "VALID", rngs=rngs),
            ConvNorm(2 * unit, 2 * unit, (3, 3), padding="VALID", rngs=rngs),
            ConvNorm(2 * unit, 4 * unit, (3, 3), rngs=rngs),
            lambda x: nnx.max_pool(x, (3, 3), (2, 2)),
            ConvNorm(4 * unit, 5 * unit, rngs=rngs),
            ConvNorm(5 * unit, 12 * unit, (3, 3), padding="VALID", rngs=rngs),
            lambda x: nnx.max_pool(x, (3, 3), (2, 2)),
        )
        inputs, blocks = 12 * unit, []
        for stage, depth in enumerate(depths):
            if stage:
                blocks.append((ReductionA, ReductionB)[stage - 1](inputs, unit, rngs=rngs))
                inputs = blocks[-1].outputs
            for i in range(depth):
                if stage == 0:
                    block = BlockA(inputs, (2 if i == 0 else 4) * unit, unit, rngs=rngs)
                elif stage == 1:
                    block = BlockB(inputs, (8, 10, 10, 12)[i] * unit, unit, rngs=rngs)
                else:
                    block = BlockC(inputs, 4 * unit, rngs=rngs)
                blocks.append(block)
                inputs = block.outputs
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.blocks(self.stem(x))
        return self.head(x.mean(axis=(1, 2)))


def images(rngs: nnx.Rngs, size: int, batch: int = 2) -> jax.Array:
    return jax.random.normal(rngs.data(), (batch, size, size, 3))


def small_v1(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    stages = (((4, 4, 6, 2, 4, 2),), ((6, 4, 6, 2, 4, 4),))
    return InceptionV1((4, 4, 8), stages, 10, rngs=rngs), images(rngs, 16)


def v1(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return InceptionV1(rngs=rngs), images(rngs, 224)


def small_v3(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return InceptionV3(1, (1, 1), 10, rngs=rngs), images(rngs, 43)


def v3(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return InceptionV3(rngs=rngs), images(rngs, 299)


small, full = small_v1, v1
