"""Random numbers of several axes that compile fast.

JAX counts the places of a random array along each of its axes. With four axes, XLA needs a second or more for that
program, and every new shape of a weight is one more. Along one axis it needs a fifth of it. The numbers are the same.
"""

import functools
import math
from typing import Any

import jax
from jax.extend import random


def draw_flat() -> None:
    """From here on `jax.random.key` makes keys that draw along one axis, unless it is told an implementation."""
    own = random.threefry_prng_impl

    def bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        return own.random_bits(key, width, (math.prod(shape),)).reshape(shape)

    flat = random.define_prng_impl(
        key_shape=own.key_shape,
        seed=own.seed,
        split=own.split,
        random_bits=bits,
        fold_in=own.fold_in,
        name="flat_threefry2x32",
        tag=own.tag,
    )
    make = jax.random.key

    @functools.wraps(make)
    def key(seed: Any, *, impl: Any = None) -> jax.Array:
        return make(seed, impl=flat if impl is None else impl)

    jax.random.key = key
