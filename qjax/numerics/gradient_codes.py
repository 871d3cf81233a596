"""Gradients as integer codes, for products of the backward pass: a scale found in the step, and how codes are rounded.

The codes of a tensor g are `round(g / s)` with `s = max |g| / top`, and `top = 2^(bits - 1) - 1`. Stochastic rounding
(Gupta et al. 2015, arXiv 1502.02551, section 3.1) works on integers here: with `t = round(g / s * 2^16)` and a random
integer r of 16 bits, the code is `floor((t + r) / 2^16)`. By Hermite's identity the codes of all 2^16 values of r add
up to t exactly, so the expectation of a code is `t / 2^16`: the only error that remains is that of t, at most 2^-17.

The bits of r are a hash of two random words and of the element's index. XLA therefore computes them where the element
is, and as part of the loop that rounds it, which threefry is too slow for. Every step of the hash is a bijection, so
over all values of the first word every r is equally frequent at every index.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.qspec import known_fields
from qjax.numerics.rounding import round_float
from qjax.support.names import did_you_mean

Rounding = Literal["stochastic", "nearest"]
Per = Literal["tensor", "row", "channel", "block"]

FRACTION = 16
"""Bits of the random number that decides whether a code is rounded up."""

SMALLEST = np.float32(2.0**-100)
"""A tensor whose largest magnitude is below this is quantized as if it were this; then `1 / s` is finite."""

_GOLDEN = np.uint32(0x9E3779B9)
_WIDTHS = (4, 5, 6, 7, 8, 16)


@known_fields({"axis": "Use per: 'tensor', 'row', 'channel' or 'block'."})
@dataclasses.dataclass(frozen=True)
class Gradients:
    """How the backward pass rounds gradients to integers, so that it multiplies integers, as the forward does.

    A product y = x w has two in the backward pass, `dx = dy w^T` and `dw = x^T dy`. Both multiply the codes of dy with
    the codes that the forward multiplied; the sums are exact in int32 and scaled afterwards.

    Args:
      bits: 4 to 8, or 16, which takes two int8 products for each of the two.
      rounding: "stochastic" is unbiased and needs a key in every step, see `qjax.training.gradient_key`. "nearest"
        needs none, but loses gradients below half a step.
      per: what has a scale of its own. "tensor": the gradient of one product's result. "row": each of its rows (for a
        convolution each example) where dx is computed, which does not add them up. "channel": each of its channels
        where dw is computed. "block": each run of `block` elements along the longest axis that is summed.
      block: the number of elements in a block.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(gradients=qjax.Gradients(bits=8, rounding="nearest"))
    """

    bits: int = 8
    rounding: Rounding = "stochastic"
    per: Per = "tensor"
    block: int | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in _WIDTHS:
            raise ValueError(
                f"Gradients: bits: expected 4 to 8 or 16, got {self.bits!r}. Use 8; 16 where 8 lose accuracy."
            )
        for name, known in (("rounding", get_args(Rounding)), ("per", get_args(Per))):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"Gradients: {name}: expected one of {', '.join(map(repr, known))}, got {value!r}."
                    f"{did_you_mean(str(value), known)}"
                )
        if self.per == "block" and (type(self.block) is not int or self.block < 1):
            raise ValueError(
                f"Gradients: block: expected a positive number of elements for per='block', got {self.block!r}. Use "
                "block=1024, for example."
            )
        if self.per != "block" and self.block is not None:
            raise ValueError(f"Gradients: block={self.block!r} is for per='block', got per={self.per!r}. Leave it out.")

    @property
    def top(self) -> int:
        """The largest code. With 16 bits it is 127 * 256 + 127, so that both bytes fit int8."""
        return 127 * 257 if self.bits == 16 else 2 ** (self.bits - 1) - 1

    @property
    def stochastic(self) -> bool:
        """Whether a step needs a key."""
        return self.rounding == "stochastic"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """The tensor `(256 high + low) * scale`, or `low * scale`.

    digits: int8, the high one first. scale: float32, of the tensor's rank; NaN if the tensor holds NaN or infinity.
    """

    digits: tuple[jax.Array, ...]
    scale: jax.Array


def encode(
    x: jax.Array, shared: Sequence[int], how: Gradients, words: jax.Array | None, lost: jax.Array | None = None
) -> Coded:
    """The codes of a float32 tensor.

    Args:
      shared: the axes whose elements share a scale.
      words: two random words (uint32); None rounds to nearest, half to even.
      lost: a boolean scalar; where it is true, the scale is NaN.
    """
    largest = jnp.max(jnp.abs(x), axis=tuple(shared), keepdims=True, initial=SMALLEST)
    top = np.float32(how.top)
    valid = jnp.isfinite(largest)
    if lost is not None:
        valid = valid & ~lost
    scale = jnp.where(valid, largest * np.float32(1 / how.top), np.float32(np.nan))
    codes = round_codes(x, top / largest, how.top, words)
    if how.bits <= 8:
        return Coded((codes.astype(jnp.int8),), scale)
    high = (codes + 128) >> 8
    return Coded((high.astype(jnp.int8), (codes - (high << 8)).astype(jnp.int8)), scale)


def round_codes(x: jax.Array, inverse: jax.Array, top: int, words: jax.Array | None) -> jax.Array:
    """int32 codes in [-top, top] of `x * inverse`; inverse: float32, broadcastable to x. words: as for `encode`."""
    bits = 0 if words is None else FRACTION
    fine = x * jnp.broadcast_to(inverse * np.float32(2**bits), x.shape)
    # the product may exceed the range by its rounding error
    bound = np.float32(top * 2**bits)
    fixed = round_float(jnp.clip(fine, -bound, bound), "nearest_even").astype(jnp.int32)
    if words is None:
        return fixed
    return (fixed + random_bits(words, x.shape).astype(jnp.int32)) >> FRACTION


def key_words(key: jax.Array) -> jax.Array:
    """Two random words of a key of `jax.random`."""
    return jax.random.bits(key, (2,), jnp.uint32)


def fold(words: jax.Array, number: int | jax.Array) -> jax.Array:
    """The words of another stream, (..., 2) for numbers of shape (...)."""
    number = jnp.uint32(number) if isinstance(number, int) else number.astype(jnp.uint32)
    return jnp.stack([hashed(number, words[0], words[1]), hashed(~number, words[1], words[0])], axis=-1)


def random_bits(words: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Random integers of `FRACTION` bits (uint32), which depend on two words and on the row-major index only."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride = stride * shape[axis]
    return hashed(index, words[0], words[1]) >> (32 - FRACTION)


def hashed(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """A hash of 32 bits; a bijection in each of its arguments (uint32) for fixed values of the others.

    The multipliers and shifts are those of "lowbias32" by C. Wellons (https://nullprogram.com/blog/2018/07/31/), with a
    word added before each multiplication.
    """
    h = index * _GOLDEN + jnp.broadcast_to(first, index.shape)
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D) + jnp.broadcast_to(second, index.shape)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return h ^ (h >> 16)
