"""ResNet-20 for CIFAR, ResNet-18 and ResNet-50 (He et al., 2015, "Deep Residual Learning for Image Recognition").

ResNet-20 has the paper's parameter-free shortcut (option A): every second pixel, and zeros for the new channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            inputs, outputs, (kernel, kernel), strides=(stride, stride), padding="SAME", use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class CifarBlock(nnx.Module):
    """Two 3x3 convolutions; the shortcut has no parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.conv1 = ConvNorm(inputs, outputs, 3, stride, rngs=rngs)
        self.conv2 = ConvNorm(outputs, outputs, 3, rngs=rngs)
        self.stride = stride
        self.extra = outputs - inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv2(nnx.relu(self.conv1(x)))
        if self.extra:
            before = self.extra // 2
            x = x[:, :: self.stride, :: self.stride, :]
            x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (before, self.extra - before)))
        return nnx.relu(x + y)


class CifarResNet(nnx.Module):
    """6n + 2 layers for images of 32x32."""

    def __init__(self, n: int = 3, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(3, width, 3, rngs=rngs)
        blocks = []
        inputs = width
        for stage in range(3):
            for i in range(n):
                outputs = width * 2**stage
                blocks.append(CifarBlock(inputs, outputs, 2 if stage and i == 0 else 1, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions and a projection where the shape changes."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.conv1 = ConvNorm(inputs, width, 3, stride, rngs=rngs)
        self.conv2 = ConvNorm(width, width, 3, rngs=rngs)
        self.project = inputs != width or stride != 1
        if self.project:
            self.shortcut = ConvNorm(inputs, width, 1, stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = self.shortcut(x) if self.project else x
        return nnx.relu(self.conv2(nnx.relu(self.conv1(x))) + shortcut)


class Bottleneck(nnx.Module):
    """1x1, 3x3, 1x1 with four times the channels; the stride is in the 3x3, as torchvision has it."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        outputs = width * self.expansion
        self.conv1 = ConvNorm(inputs, width, 1, rngs=rngs)
        self.conv2 = ConvNorm(width, width, 3, stride, rngs=rngs)
        self.conv3 = ConvNorm(width, outputs, 1, rngs=rngs)
        self.project = inputs != outputs or stride != 1
        if self.project:
            self.shortcut = ConvNorm(inputs, outputs, 1, stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = self.shortcut(x) if self.project else x
        y = nnx.relu(self.conv1(x))
        y = nnx.relu(self.conv2(y))
        return nnx.relu(self.conv3(y) + shortcut)


class ResNet(nnx.Module):
    """The ImageNet networks: a 7x7 stem, max pooling, four stages, average pooling."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        width: int = 64,
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = ConvNorm(3, width, 7, 2, rngs=rngs)
        stages, inputs = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stages.append(block(inputs, width * 2**stage, 2 if stage and i == 0 else 1, rngs=rngs))
                inputs = width * 2**stage * block.expansion
        self.blocks = nnx.List(stages)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def images(rngs: nnx.Rngs, size: int, batch: int = 2) -> jax.Array:
    return jax.random.normal(rngs.data(), (batch, size, size, 3))


def small_resnet20(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return CifarResNet(1, 8, rngs=rngs), images(rngs, 8)


def resnet20(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return CifarResNet(rngs=rngs), images(rngs, 32)


def small_resnet18(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ResNet(BasicBlock, (1, 1), 8, 10, rngs=rngs), images(rngs, 16)


def resnet18(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ResNet(rngs=rngs), images(rngs, 224)


def small_resnet50(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ResNet(Bottleneck, (1, 1), 4, 10, rngs=rngs), images(rngs, 16)


def resnet50(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ResNet(Bottleneck, (3, 4, 6, 3), rngs=rngs), images(rngs, 224)


small, full = small_resnet20, resnet20
