"""The fake-quant primitive against the least that an elementwise operation costs.

Forward: `fake_quant(x)` against `x * a + b`, which reads and writes the same. Forward and backward with a learned scale
(LSQ): against those of `x * scale`. `python -m benchmarks primitive`.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Paired, paired
from qjax import QSpec
from qjax.numerics import QParams, fake_quant

SHAPES = ((64, 32, 32, 64), (4096, 4096))

SPECS = {
    "per tensor": QSpec(bits=8),
    "per tensor, asymmetric": QSpec(bits=8, symmetric=False),
    "per channel": QSpec(bits=8, axis=-1),
}


def _both(function: Callable[..., jax.Array], zero_point: jax.Array) -> Any:
    @jax.jit
    def run(x: jax.Array, scale: jax.Array, cotangent: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, s: function(x, s, zero_point), x, scale)
        return y, pull(cotangent)

    return run


NAMES = tuple(SPECS)


def primitive(seconds: float, names: Collection[str]) -> list[Paired]:
    """fake_quant / the plain operation; names: some of `NAMES`."""
    found: list[Paired] = []
    for shape in SHAPES:
        keys = jax.random.split(jax.random.key(0))
        x, cotangent = (jax.random.normal(key, shape) for key in keys)
        for name, spec in SPECS.items():
            if name not in names:
                continue
            params = spec.param_shape(shape)
            scale = jnp.full(params, 0.02, jnp.float32)
            zero_point = jnp.full(params, 0 if spec.symmetric else 3, jnp.int32)

            def spread(v: jax.Array, shape: tuple[int, ...] = shape) -> jax.Array:
                return jnp.broadcast_to(v.reshape((1,) * (len(shape) - v.ndim) + v.shape), shape)

            def quantized(x: jax.Array, scale: jax.Array, zero: jax.Array, spec: QSpec = spec) -> jax.Array:
                return fake_quant(x, QParams(scale, zero, spec), gradient="lsq")

            forward = functools.partial(jax.jit(quantized), x, scale, zero_point)
            plain = functools.partial(jax.jit(lambda x, s: x * spread(s) + spread(s)), x, scale)
            title = f"{'x'.join(map(str, shape))}, {name}"
            found.append(paired(f"{title}: forward / x * a + b", forward, plain, seconds=seconds))
            learned = functools.partial(_both(quantized, zero_point), x, scale, cotangent)
            scaled = functools.partial(_both(lambda x, s, _: x * spread(s), zero_point), x, scale, cotangent)
            name = f"{title}: forward and backward, learned scale / those of x * s"
            found.append(paired(name, learned, scaled, seconds=seconds))
    return found
