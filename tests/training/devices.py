"""Runs in a process of its own, with eight devices: a sharded model against the same model on one device."""

import os
import re

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


class Model(nnx.Module):
    """A convolution, batch norm, and two layers, the first of which is split."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8 * 4 * 4, 32, rngs=rngs)
        self.down = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.down(nnx.relu(self.up(x.reshape(x.shape[0], -1))))


def equal(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def only_sums_travel() -> None:
    """A data-parallel step sums gradients over the devices; no device reads activations of another one."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layers = nnx.Sequential(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 8, rngs=nnx.Rngs(1)))
    x = np.random.default_rng(0).normal(size=(1024, 128)).astype(np.float32)
    qmodel = qjax.quantize(layers, qjax.Recipe(), x)
    nnx.update(qmodel, jax.device_put(nnx.state(qmodel), NamedSharding(mesh, P())))
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)
    gradient = jax.jit(jax.grad(lambda params, rest, x: jnp.mean(nnx.merge(graphdef, params, rest)(x) ** 2)))
    text = gradient.lower(params, rest, jax.device_put(x, NamedSharding(mesh, P("data")))).compile().as_text() or ""
    assert "all-reduce" in text
    assert not [name for name in ("collective-permute", "all-gather", "all-to-all") if f" {name}" in text]


def a_loop_sums_no_scale() -> None:
    """The steps of a recurrent layer sum gradients of weights over the devices; those of its scales follow once."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = np.random.default_rng(0).normal(size=(16, 5, 8)).astype(np.float32)
    qmodel = qjax.quantize(nnx.RNN(nnx.SimpleCell(8, 12, rngs=nnx.Rngs(0))), qjax.Recipe(), x)
    graphdef, state = nnx.split(qmodel)
    gradient = jax.jit(jax.grad(lambda state, x: jnp.mean(nnx.merge(graphdef, state)(x) ** 2), allow_int=True))
    state = jax.device_put(state, NamedSharding(mesh, P()))
    text = gradient.lower(state, jax.device_put(x, NamedSharding(mesh, P("data")))).compile().as_text() or ""
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    assert bodies
    summed: list[str] = []
    for part in text.split("\n\n"):
        if part.lstrip("%").split(" ")[0] in bodies:
            for found in re.findall(r" = (.*) all-reduce(?:-start)?\(", part):
                summed.extend(re.findall(r"f32\[[\d,]*\]", found))
    products = [name for name in qmodel.quantizers if name.endswith("kernel")]
    assert "f32[12]" in summed
    # each product sums its codes, which shows a NaN
    assert summed.count("f32[]") <= len(products)
    assert len(qmodel.quantizers) - len(products) > len(products)


def main() -> None:
    assert jax.device_count() == 8
    a_loop_sums_no_scale()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    x = np.random.default_rng(0).normal(size=(16, 4, 4, 1)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    single = qjax.quantize(Model(nnx.Rngs(0)), qjax.Recipe(observer="moving_average"), x)
    sharded = nnx.clone(single)
    state = nnx.state(sharded)
    rules = {"up/kernel": P(None, "model"), "up/bias": P("model"), "down/kernel": P("model", None)}
    places = qjax.training.shardings(state, sharded, mesh, rules)
    nnx.update(sharded, jax.device_put(state, places))
    model: Any = sharded.model
    scales: Any = sharded.quantizers
    assert model.up.kernel[...].sharding.spec == P(None, "model")
    assert scales.learned_log2_scale[...].sharding.is_fully_replicated
    assert len(scales.learned_log2_scale[...].addressable_shards) == 8
    assert len(model.up.kernel[...].addressable_shards) == 8
    assert model.up.kernel[...].addressable_shards[0].data.shape == (128, 16)

    # calibration: each device sees a part of the batch, the range is that of the whole. It runs on reals: behind the
    # layer whose sum is split over devices, floats are added in another order
    batches = [x, 2 * x, -x]
    qjax.calibrate(single, batches)
    qjax.calibrate(sharded, [jax.device_put(b, NamedSharding(mesh, P("data"))) for b in batches])
    equal(nnx.state(single.model), nnx.state(sharded.model))
    numbers = single.quantizers.named(), sharded.quantizers.named()
    for name in single.quantizers:
        if name == "down":
            for a, b in zip(*(jax.tree.leaves(one[name]) for one in numbers), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2.0**-20)
        else:
            equal(*(one[name] for one in numbers))
    nnx.update(sharded, jax.device_put(nnx.state(single), places))

    # codes are integers, sums of them are exact in any order: the forward is the same to the bit
    for one in (single, sharded):
        one.eval()
    forward = nnx.jit(lambda qmodel, x: qmodel.codes(x))
    equal(forward(single, x), forward(sharded, split))
    exact = qjax.exact(single, x)
    run = nnx.jit(lambda qmodel, x: exact(qmodel, x))
    equal(run(single, x), run(sharded, split))

    # gradients are sums of floats, in another order: apart by their rounding
    for one in (single, sharded):
        one.train()
    step = nnx.jit(nnx.grad(lambda qmodel, x: jnp.mean(qmodel(x) ** 2)))
    a, b = step(single, x), step(sharded, split)
    pairs = [
        (np.asarray(g, np.float64), np.asarray(h, np.float64))
        for g, h in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    ]
    largest = max(float(np.max(np.abs(g))) for g, _ in pairs)
    assert largest > 0.01
    assert max(float(np.max(np.abs(g - h))) for g, h in pairs) <= 2.0**-20 * largest

    only_sums_travel()

    # and the graph of the sharded model is the graph
    for one in (single, sharded):
        one.eval()
    sharded_graph = qjax.convert(sharded, x)
    equal(qjax.convert(single, x)(x), sharded_graph(x))
    assert qjax.verify(sharded_graph, sharded, [split]).exact
    print("equal")


if __name__ == "__main__":
    main()
