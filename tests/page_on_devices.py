"""Runs the blocks of docs/distributed.md on eight devices of one CPU; a process of its own, started by test_readme."""

import os

if __name__ == "__main__":  # pytest imports it, too, and hands its environment on to what it starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qjax

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "distributed.md"


class Mlp(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, 8, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.mlp = Mlp()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(x)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (16, 8))
    qmodel = qjax.quantize(Net(), qjax.Recipe(), x)
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, params, rest)(x) ** 2)

    names: dict[str, Any] = {"jax": jax, "nnx": nnx, "ocp": ocp, "qjax": qjax, "P": P, "AxisType": AxisType}
    names |= {"NamedSharding": NamedSharding, "qmodel": qmodel, "images": x, "loss": loss}
    names["optimizer"] = nnx.Optimizer(qmodel, optax.adam(1e-3), wrt=nnx.Param)
    placed, mean, checkpoint, without = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    exec(placed, names)
    model: Any = qmodel.model
    assert model.mlp.up.kernel.get_value().sharding.spec == P(None, "model")
    exec(mean, names)
    names["step"](params, names["images"])
    with tempfile.TemporaryDirectory() as folder:
        exec(checkpoint, {**names, "folder": folder, "step": 0})
    exec(without, names)


if __name__ == "__main__":
    main()
