"""Runs in a process of its own, with eight devices: every kind of mesh has the codes of one device.

The axes of a mesh are explicit (as `jax.make_mesh` makes them since jax 0.9), automatic, or manual (`jax.shard_map`).
The model is written as JAX wants it on each: with `out_sharding` where axes are explicit. With the argument `few` it
does what stands for the rest: a mesh of each kind, and what differs only in the number of devices is left out.
"""

import os

if __name__ == "__main__":  # pytest imports it, too, and hands its environment on to what it starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

import qjax
from tests import in_numpy
from tests.training.devices import equal

WIDTH = 16
RULES = {"up": P(None, "model"), "down": P("model", None), "embedding": P("model", None)}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def split(*axes: str | None) -> P | None:
    """An argument `out_sharding`, which only explicit axes take."""
    return P(*axes) if EXPLICIT in get_abstract_mesh().axis_types else None


class Block(nnx.Module):
    """A lookup, a norm, two products between which features may be split, a choice, a scan, a mask and a softmax."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (8, WIDTH)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 2 * WIDTH)) / 4)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (2 * WIDTH, WIDTH)) / 4)
        self.mixing = nnx.Param(jax.random.normal(rngs.params(), (2, WIDTH, WIDTH)) / 4)

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        table, rows = self.embedding[...], split("data", None)
        x = x + (table[ids] if rows is None else table.at[ids].get(out_sharding=rows))
        h = nnx.silu(jnp.einsum("bi,ij->bj", self.norm(x), self.up[...], out_sharding=split("data", "model")))
        y = x + jnp.einsum("bj,ji->bi", h, self.down[...], out_sharding=rows)
        # the constant lies beyond the data, so calibration observes what the choice returns
        y = jnp.where(x > 1, np.float32(9), y)
        y, _ = jax.lax.scan(
            lambda y, w: (y + jnp.einsum("bi,ij->bj", y, w, out_sharding=rows), None), y, self.mixing[...]
        )
        return jax.nn.softmax(jnp.where(x > 0, y, np.float32(-1e9)), axis=-1)


def place(qmodel: Any, mesh: Any, rules: Any) -> Any:
    """A copy whose parameters are split by their names."""
    copy = nnx.clone(qmodel)
    state = nnx.state(copy)
    nnx.update(copy, jax.device_put(state, qjax.training.shardings(state, copy, mesh, rules)))
    return copy


@nnx.jit
def codes(qmodel: Any, x: Any, ids: Any) -> Any:
    return qmodel.codes(x, ids)


@nnx.jit
def step(qmodel: Any, optimizer: Any, x: Any, ids: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x, ids)[:, 0] ** 2))(qmodel)
    optimizer.update(qmodel, gradients)
    return loss


def every_mesh(few: bool) -> None:
    random = np.random.default_rng(0)
    x, ids = random.normal(size=(16, WIDTH)).astype(np.float32), random.integers(0, 8, 16).astype(np.int32)
    qmodel = qjax.quantize(Block(), qjax.Recipe(), (x, ids))
    wanted = codes(qmodel, x, ids)
    meshes = [(4, 2, EXPLICIT), (4, 2, AUTO)]
    if not few:
        meshes += [(1, 1, EXPLICIT), (2, 1, EXPLICIT), (8, 1, EXPLICIT)]
    for data, model, kind in meshes:
        mesh = jax.make_mesh((data, model), ("data", "model"), (kind, kind), devices=jax.devices()[: data * model])
        with jax.set_mesh(mesh):
            placed = place(qmodel, mesh, RULES)
            rows = jax.device_put((x, ids), NamedSharding(mesh, P("data")))
            found = codes(placed, *rows)
            assert jax.typeof(found[0]).sharding.spec == (P("data", None) if kind == EXPLICIT else P(None, None))
            equal(found, wanted)

    # on a mesh with explicit axes, with parameters that are split: calibration, the graph, the exact forward
    mesh = jax.make_mesh((4, 2), ("data", "model"), (EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        placed = place(qmodel, mesh, RULES)
        rows = jax.device_put((x, ids), NamedSharding(mesh, P("data")))
        placed.eval()
        forward = qjax.exact(placed, rows)
        graph = qjax.convert(placed, rows)
        exact = nnx.jit(lambda m, *args: forward(m, *args))(placed, *rows)
        assert jax.typeof(exact).sharding.spec == jax.typeof(graph(*rows)).sharding.spec == P("data", None)
        equal(exact, graph(*rows))
        if not few:
            assert qjax.verify(graph, placed, [rows]).exact
        before = placed.qparams()["input/0"].scale
        qjax.calibrate(placed, [rows])
        equal(placed.qparams()["input/0"].scale, before)
        kernel: Any = placed.model.up
        old = np.asarray(kernel[...])
        step(placed, nnx.Optimizer(placed, optax.sgd(0.1), wrt=nnx.Param), *rows)
        assert kernel[...].sharding.spec == P(None, "model")
    single = evaluated(qmodel)
    step(single, nnx.Optimizer(single, optax.sgd(0.1), wrt=nnx.Param), x, ids)
    moved = np.asarray(single.model.up[...])
    assert np.any(moved != old)
    assert np.max(np.abs(moved - np.asarray(kernel[...]))) < 1e-6
    equal(qjax.convert(evaluated(qmodel), (x, ids))(x, ids), exact)

    inside_of_shard_map(qmodel, x, ids, wanted[1], few)


def evaluated(qmodel: Any) -> Any:
    copy = nnx.clone(qmodel)
    copy.eval()
    return copy


def inside_of_shard_map(qmodel: Any, x: Any, ids: Any, wanted: Any, few: bool) -> None:
    """JAX checks there what varies between devices; gradients of what does not are summed by it."""
    mesh = jax.make_mesh((8,), ("data",), (AUTO,))
    definition, params, rest = nnx.split(qmodel, nnx.Param, ...)

    def loss(params: Any, x: Any, ids: Any) -> Any:
        return jnp.mean(nnx.merge(definition, params, rest)(x, ids)[:, 0] ** 2)

    def gradients_of(params: Any, x: Any, ids: Any) -> Any:
        return jax.grad(lambda params: jax.lax.pmean(loss(params, x, ids), "data"))(params)

    def codes_of(params: Any, x: Any, ids: Any) -> Any:
        return nnx.merge(definition, params, rest).codes(x, ids)[1]

    def inside(function: Any, out: P) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=out))

    equal(inside(codes_of, P("data"))(params, x, ids), wanted)
    if (
        few
    ):  # JAX checks what varies when it traces; test_a_step_inside_of_shard_map_is_the_step_outside has the numbers
        jax.eval_shape(inside(gradients_of, P()), params, x, ids)
        return
    gradients = inside(gradients_of, P())(params, x, ids)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(jax.grad(loss)(params, x, ids)), strict=True):
        assert float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) < 2.0**-20


def collectives(model: Any, size: int) -> Counter[str]:
    """How often devices speak in a data-parallel step."""
    mesh = jax.make_mesh((8,), ("data",), (EXPLICIT,))
    x = np.ones((size, WIDTH), np.float32)
    with jax.set_mesh(mesh):
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
        definition, params, rest = nnx.split(model, nnx.Param, ...)
        gradient = jax.jit(jax.grad(lambda params, rest, x: jnp.mean(nnx.merge(definition, params, rest)(x) ** 2)))
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        text = gradient.lower(params, rest, rows).compile().as_text() or ""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


def as_many_collectives_as_the_float_step(few: bool) -> None:
    """Gradients of scales are sums that travel with those of weights, however deep the model and large the batch."""
    for depth, size in [(2, 1024)] if few else [(1, 64), (4, 1024)]:
        layers = [nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)), nnx.relu) for i in range(depth)]
        x = np.ones((size, WIDTH), np.float32)
        model = nnx.Sequential(*layers)
        quantized = qjax.quantize(model, qjax.Recipe(), x)
        assert collectives(quantized, size) == collectives(model, size) == Counter({"all-reduce": 1})


if __name__ == "__main__":
    assert jax.device_count() == 8
    # what runs on one device
    in_numpy.install()
    in_numpy.Switch.on = True
    few = "few" in sys.argv
    as_many_collectives_as_the_float_step(few)
    every_mesh(few)
    print("equal")
