"""Runs in a process of its own, with eight devices: integer gradients of a split batch against those of one device."""

import os

if __name__ == "__main__":  # pytest imports it, too, and hands its environment on to what it starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qjax


def gradients(how: qjax.Gradients, kind: AxisType | None) -> Any:
    """Of a perceptron's kernels; the batch is split over all devices, or None: on one."""
    layers = nnx.Sequential(nnx.Linear(12, 24, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(24, 8, rngs=nnx.Rngs(1)))
    x = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)
    qmodel = qjax.quantize(layers, qjax.Recipe(gradients=how), x)
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)

    @jax.jit
    def gradient(params: Any, rest: Any, key: jax.Array, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            with qjax.training.gradient_key(key):
                return jnp.sum(jnp.square(nnx.merge(graphdef, params, rest)(x)))

        return jax.grad(loss)(params)["model"]["layers"]

    key = jax.random.key(1)
    if kind is None:
        found = gradient(params, rest, key, x)
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            whole = NamedSharding(mesh, P())
            split = jax.device_put(x, NamedSharding(mesh, P("data")))
            found = gradient(*jax.device_put((params, rest, key), whole), split)
    return [np.asarray(found[index]["kernel"][...]) for index in (0, 2)]


if __name__ == "__main__":
    for how in (qjax.Gradients(), qjax.Gradients(bits=16), qjax.Gradients(per="row"), qjax.Gradients(per="channel")):
        expected = gradients(how, None)
        for kind in (AxisType.Auto, AxisType.Explicit):
            for a, b in zip(gradients(how, kind), expected, strict=True):
                np.testing.assert_array_equal(a, b)
    print("equal")
