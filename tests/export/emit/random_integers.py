"""Random programs of integers, as kernels are: what a translator of traces has to get right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.rounding import Rounding, right_shift_with_headroom

_SUM = 16
"""The place of the sum among the operations."""


def random_program(seed: int, *, sums: bool = True) -> Callable[..., Any]:
    """A function of two tensors of int8: twenty random operations in int64, some of which wrap. sums: along an axis."""

    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        with jax.enable_x64(True):
            pool = [x.astype(jnp.int64), y.astype(jnp.int32).astype(jnp.int64)]
            for _ in range(20):
                a, b = (pool[rng.integers(len(pool))] for _ in range(2))
                number = np.int64(int(rng.integers(-(2 ** int(rng.integers(1, 40))), 2**20)))
                places = np.int64(rng.integers(0, 64 if rng.random() < 0.3 else 20))
                made = [
                    lambda a=a, b=b: a + b,
                    lambda a=a, b=b: a - b,
                    lambda a=a, b=b: a * b,
                    lambda a=a, n=number: a * n,
                    lambda a=a, n=number: lax.max(a, jnp.full_like(a, n)),
                    lambda a=a, b=b: jnp.minimum(a, b),
                    lambda a=a, n=number: a & n,
                    lambda a=a, b=b: a | b,
                    lambda a=a, b=b: a ^ b,
                    lambda a=a, p=places: a >> p,
                    lambda a=a, p=places: a << p,
                    lambda a=a: -a,
                    lambda a=a: jnp.abs(a),
                    lambda a=a, b=b: jnp.where(a > b, a, b + np.int64(1)),
                    lambda a=a: a.astype(jnp.int32).astype(jnp.int64),
                    lambda a=a: a.astype(jnp.int8).astype(jnp.int64),
                    lambda a=a: jnp.broadcast_to(jnp.sum(a, axis=1, keepdims=True), a.shape),
                    lambda a=a: jnp.clip(a, np.int64(-1000), np.int64(90)),
                    lambda a=a, b=b: (a >= b).astype(jnp.int64),
                    lambda a=a, p=places: right_shift_with_headroom(
                        jnp, a, jnp.full_like(a, min(p, 40)), Rounding.NEAREST_EVEN
                    ),
                    lambda a=a: a.T.reshape(a.shape),
                ]
                number_of = rng.integers(len(made))
                pool.append(made[number_of if sums or number_of != _SUM else 0]())
            return tuple(pool[-6:])

    return program
