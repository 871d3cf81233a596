"""Networks for images of 8x8, small enough to train in seconds: plain Flax."""

import itertools

import jax
from flax import nnx


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut: 1x1 where the shape changes, else the identity."""

    def __init__(self, inputs: int, features: int, *, stride: int = 1, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(inputs, features, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        same = stride == 1 and inputs == features
        self.shortcut = nnx.data(None if same else nnx.Conv(inputs, features, (1, 1), strides=stride, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """A small residual network for 8x8 images: stem, a block, a strided block, average pooling, linear head."""

    def __init__(self, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.block1 = ResidualBlock(width, width, rngs=rngs)
        self.block2 = ResidualBlock(width, 2 * width, stride=2, rngs=rngs)
        self.head = nnx.Linear(2 * width * 4, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        return self.head(x.reshape(x.shape[0], -1))


class CNN(nnx.Module):
    """Three convolutions with batch norm, two of them strided, and a linear head."""

    def __init__(self, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        widths = (1, width, 2 * width, 2 * width)
        self.convs = nnx.List(
            nnx.Conv(i, o, (3, 3), strides=s, use_bias=False, rngs=rngs)
            for i, o, s in zip(widths[:-1], widths[1:], (1, 2, 2), strict=True)
        )
        self.norms = nnx.List(nnx.BatchNorm(o, momentum=0.9, rngs=rngs) for o in widths[1:])
        self.head = nnx.Linear(2 * width * 4, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """64 inputs, hidden layers with relu, class scores."""

    def __init__(self, hidden: tuple[int, ...] = (48, 48), classes: int = 10, *, rngs: nnx.Rngs) -> None:
        widths = (64, *hidden)
        self.layers = nnx.List(nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths))
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)
