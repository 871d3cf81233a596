"""A convolutional network whose inner layers have binary, ternary or real codes and weights: plain Flax."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Function = Callable[[jax.Array], jax.Array]


def straight_through(hard: Function) -> Function:
    """A step function with the gradient of a clamp to [-1, 1] (arXiv 1602.02830, section 1.3)."""

    def function(x: jax.Array) -> jax.Array:
        soft = jnp.clip(x, -1.0, 1.0)
        return soft + lax.stop_gradient(hard(x) - soft)

    return function


binary = straight_through(lambda x: jnp.where(x >= 0.0, 1.0, -1.0))
"""-1 or 1."""


def ternary(w: jax.Array) -> jax.Array:
    """-1, 0 or 1: numbers in units of their mean magnitude, rounded (arXiv 2402.17764, equations 1 to 3)."""
    return straight_through(lambda x: jnp.round(jnp.clip(x, -1.0, 1.0)))(w / jnp.mean(jnp.abs(w)))


KINDS: dict[str, tuple[Function, Function]] = {
    "8 bits": (nnx.relu, lambda w: w),
    "ternary weights, binary codes": (binary, ternary),
    "binary": (binary, binary),
}
"""Name -> what stands before an inner layer, and what its weights pass through."""


class BinaryCNN(nnx.Module):
    """A 3x3 convolution, three of one kind, a dense layer; batch norm behind every convolution."""

    def __init__(self, kind: str, width: int = 64, classes: int = 10, *, size: int = 8, rngs: nnx.Rngs) -> None:
        self.codes, self.weights = KINDS[kind]
        widths = (width, width, 2 * width, 2 * width)
        self.strides = (1, 2, 1)
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.convs = nnx.List(
            nnx.Conv(i, o, (3, 3), strides=s, use_bias=False, rngs=rngs)
            for (i, o), s in zip(itertools.pairwise(widths), self.strides, strict=True)
        )
        self.norms = nnx.List(nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in widths)
        self.head = nnx.Linear(widths[-1] * (size // 2) ** 2, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norms[0](self.stem(x))
        for conv, stride, norm in zip(self.convs, self.strides, self.norms[1:], strict=True):
            weights = self.weights(conv.kernel[...])
            x = lax.conv_general_dilated(
                self.codes(x), weights, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = norm(x)
        return self.head(nnx.relu(x).reshape(x.shape[0], -1))
