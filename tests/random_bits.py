"""Random numbers without a program of their own to compile.

XLA needs half a second for the twenty rounds of JAX's random numbers, for every shape of a weight again. Numpy draws
the same bits in a callback.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import random

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def threefry(key: np.ndarray, high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of two words."""
    first, second = (np.uint32(word) for word in np.asarray(key))
    words = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    with np.errstate(over="ignore"):
        x, y = high + first, low + second
        for turn in range(5):
            for by in _ROTATIONS[turn % 2]:
                x = x + y
                y = (y << np.uint32(by) | y >> np.uint32(32 - by)) ^ x
            x, y = x + words[(turn + 1) % 3], y + words[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def _bits(key: Any, width: int, size: int) -> np.ndarray:
    x, y = threefry(np.asarray(key), np.zeros(size, np.uint32), np.arange(size, dtype=np.uint32))
    if width == 64:
        return x.astype(np.uint64) << np.uint64(32) | y
    return (x ^ y).astype(f"u{width // 8}")


def draw_flat() -> None:
    """From here on `jax.random.key` makes keys whose bits numpy draws, unless it is told an implementation."""
    own = random.threefry_prng_impl
    # JAX keeps what it traced: a test that replaces `jax.pure_callback` must not leave its own draws to later tests
    on_host = jax.pure_callback

    def bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        draw = functools.partial(_bits, width=width, size=math.prod(shape))
        if not isinstance(key, Tracer):
            return jax.device_put(draw(key).reshape(shape))
        result = jax.ShapeDtypeStruct((math.prod(shape),), np.dtype(f"u{width // 8}"))
        return on_host(draw, result, key, vmap_method="sequential").reshape(shape)

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
