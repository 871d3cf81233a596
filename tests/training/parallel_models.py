"""Runs in a process of its own, with eight devices: the ways in which large models are split, beside one device.

| model | what is split |
| --- | --- |
| `Sequence` | batch, sequence and features; parameters along "data" as well (FSDP), gathered where they are read |
| `Annotated` | kernels by the metadata of `nnx.with_partitioning`, products by `out_sharding` |
| `experts` | experts over "model", by the compiler |
| `pipeline` | layers over "stage", by `jax.shard_map` and `ppermute` |

Each has the codes of one device, and trains. A state that is donated may share weights. Orbax restores a checkpoint
onto another mesh, whose axes are explicit too.
"""

import os

if __name__ == "__main__":  # pytest imports it, too, and hands its environment on to what it starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh, reshard
from jax.sharding import PartitionSpec as P

import qjax
from tests.layers.test_experts import Ragged
from tests.training.devices import equal

BATCH, LENGTH, WIDTH = 8, 4, 16
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RULES = {"query|key|value|up|gate": P("data", "model"), "out|down": P("model", "data")}
"""Of `Sequence`."""


def is_explicit() -> bool:
    return EXPLICIT in get_abstract_mesh().axis_types


def split(*axes: str | None) -> P | None:
    """An argument `out_sharding`, which only explicit axes take."""
    return P(*axes) if is_explicit() else None


def gathered(x: jax.Array, *axes: str | None) -> jax.Array:
    """What every device needs of an array, as FSDP gathers a parameter before it is read."""
    return reshard(x, P(*axes)) if is_explicit() else x


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


class Sequence(nnx.Module):
    """Attention without heads, and a gated layer; the sequence is split along "model" between the products."""

    def __init__(self) -> None:
        key = nnx.Rngs(0).params
        self.norm = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(1))
        for name in ("query", "key", "value", "out", "up", "gate", "down"):
            setattr(self, name, nnx.Param(jax.random.normal(key(), (WIDTH, WIDTH)) / 4))

    def project(self, x: jax.Array, name: str) -> jax.Array:
        kernel = gathered(getattr(self, name)[...], None, "model")
        return jnp.einsum("bsi,ij->bsj", x, kernel, out_sharding=split("data", None, "model"))

    def join(self, x: jax.Array, name: str) -> jax.Array:
        """Sums over the features, which are split, and hands every device its part of the sequence."""
        kernel = gathered(getattr(self, name)[...], "model", None)
        return jnp.einsum("bsi,ij->bsj", x, kernel, out_sharding=split("data", "model", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = gathered(self.norm(x), "data", None, None)
        query, key, value = (self.project(h, name) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqd,bkd->bqk", query, key, out_sharding=split("data", None, None)) / np.float32(4)
        scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, np.float32(-1e30))
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), value, out_sharding=split("data", None, "model"))
        x = x + self.join(mixed, "out")
        h = gathered(self.norm(x), "data", None, None)
        return x + self.join(nnx.silu(self.project(h, "gate")) * self.project(h, "up"), "down")


class Annotated(nnx.Module):
    """Layers of Flax whose kernels say how they are split."""

    def __init__(self) -> None:
        init, rngs = nnx.initializers.lecun_normal(), nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, (None, "model")), rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, ("model", None)), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.up(x, out_sharding=split("data", "model")))
        return self.down(h, out_sharding=split("data", None))


@nnx.jit
def codes(qmodel: Any, x: Any) -> Any:
    return qmodel.codes(x)


@nnx.jit
def step(qmodel: Any, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda qmodel: jnp.mean((qmodel(x) - 1) ** 2))(qmodel)
    optimizer.update(qmodel, gradients)
    return loss


def by_rules(qmodel: Any, mesh: Any, rules: dict[str, P]) -> None:
    """Splits the parameters by their names."""
    state = nnx.state(qmodel)
    nnx.update(qmodel, jax.device_put(state, qjax.training.shardings(state, qmodel, mesh, rules)))


def trains_alike(
    model: nnx.Module,
    x: np.ndarray,
    mesh: Any,
    spec: P,
    place: Callable[[Any], None],
) -> Any:
    """Three steps on a mesh: at each the codes are those of the same numbers on one device. Returns the model."""
    single = qjax.quantize(model, qjax.Recipe(), x)
    sharded = nnx.clone(single)
    with jax.set_mesh(mesh):
        place(sharded)
        rows = jax.device_put(x, NamedSharding(mesh, spec))
        optimizer = nnx.Optimizer(sharded, optax.sgd(0.05), wrt=nnx.Param)
    losses: list[float] = []
    for _ in range(3):
        nnx.update(single, jax.tree.map(np.asarray, nnx.state(sharded)))
        wanted = codes(single, x)
        with jax.set_mesh(mesh):
            equal(codes(sharded, rows), wanted)
            losses.append(float(step(sharded, optimizer, rows)))
    assert losses == sorted(losses, reverse=True)
    return sharded


def sequences() -> None:
    """FSDP, tensor parallel and a split sequence at once, on explicit axes and for the compiler."""
    for kind in (EXPLICIT, AUTO):
        mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind))
        x, place = draw(BATCH, LENGTH, WIDTH), functools.partial(by_rules, mesh=mesh, rules=RULES)
        model = trains_alike(Sequence(), x, mesh, P("data", "model"), place)
        assert model.model.query[...].addressable_shards[0].data.shape == (WIDTH // 4, WIDTH // 2)
        if kind == EXPLICIT:
            assert model.model.query[...].sharding.spec == P("data", "model")
            no_weight_is_gathered_in_codes(model, jax.device_put(x, NamedSharding(mesh, P("data", "model"))), mesh)
            another_mesh(model, x)


def no_weight_is_gathered_in_codes(qmodel: Any, rows: jax.Array, mesh: Any) -> None:
    """The compiler splits the products of codes as the model says, so it gathers no weight beside FSDP's own gather."""
    definition, params, rest = nnx.split(qmodel, nnx.Param, ...)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda params, rest, x: jnp.mean(nnx.merge(definition, params, rest)(x) ** 2)))
        text = gradient.lower(params, rest, rows).compile().as_text() or ""
    assert "all-gather" in text
    assert not re.findall(rf" = \w+\[{WIDTH},{WIDTH}\]\S* all-gather", text)


def another_mesh(qmodel: Any, x: np.ndarray) -> None:
    """A checkpoint of Orbax, restored onto a mesh of another shape whose axes are explicit."""
    wanted = codes(qmodel_on_one(qmodel), x)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (EXPLICIT, EXPLICIT))
    other = qjax.quantize(Sequence(), qjax.Recipe(), x)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", nnx.state(qmodel))
        checkpointer.wait_until_finished()
        state = nnx.state(other)
        places = qjax.training.shardings(state, other, mesh, RULES)
        shapes = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, places)
        nnx.update(other, checkpointer.restore(Path(folder) / "state", shapes))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
        equal(codes(other, rows), wanted)
    model: Any = other.model
    assert model.query[...].addressable_shards[0].data.shape == (WIDTH // 2, WIDTH // 4)


def qmodel_on_one(qmodel: Any) -> Any:
    """A copy of a model on one device."""
    copy = qjax.quantize(type(qmodel.model)(), qjax.Recipe(), draw(BATCH, LENGTH, WIDTH))
    nnx.update(copy, jax.tree.map(np.asarray, nnx.state(qmodel)))
    return copy


def annotated() -> None:
    """Kernels with metadata: Flax splits them when it makes them on automatic axes, by their specs on explicit ones.

    A quantized model keeps both, the places of the arrays and the metadata.
    """
    x = draw(BATCH, WIDTH)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AUTO, AUTO))
    with jax.set_mesh(mesh):
        eager: Any = Annotated()
        assert eager.up.kernel[...].sharding.spec == P(None, "model")
    trains_alike(eager, x, mesh, P("data"), lambda own: None)
    with nnx.use_eager_sharding(False):
        mesh = jax.make_mesh((4, 2), ("data", "model"), (EXPLICIT, EXPLICIT))
        model = trains_alike(Annotated(), x, mesh, P("data"), lambda own: by_metadata(own, mesh))
    assert model.model.up.kernel[...].sharding.spec == P(None, "model")


def by_metadata(qmodel: Any, mesh: Any) -> None:
    """As Flax's guides place a state."""
    state = nnx.state(qmodel)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(state))
    nnx.update(qmodel, jax.device_put(state, places))


def experts() -> None:
    """Experts over devices: the matrices of `lax.ragged_dot` are split along the experts."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AUTO, AUTO))
    rules = {name: P("model", None, None) for name in ("up", "gate", "down")}
    trains_alike(Ragged(), draw(12, 8), mesh, P("data"), lambda own: by_rules(own, mesh, rules))


class Layer(nnx.Module):
    """A stage of the pipeline."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


def pipeline(stages: int = 4, parts: int = 4) -> None:
    """Each stage is a quantized model, whose state is stacked and split along "stage". Its codes travel as floats."""
    x, qmodels = draw(parts * BATCH, WIDTH), list[Any]()
    y = x
    for seed in range(stages):
        qmodels.append(qjax.quantize(Layer(seed), qjax.Recipe(), y))
        y = np.asarray(qmodels[-1](y))
    definition = nnx.graphdef(qmodels[0])
    params, rest = (
        jax.tree.map(lambda *own: jnp.stack(own), *(nnx.state(qmodel, kind) for qmodel in qmodels))
        for kind in (nnx.Param, nnx.Not(nnx.Param))
    )

    def stage(params: Any, rest: Any, index: int) -> Any:
        return nnx.merge(definition, *(jax.tree.map(lambda own: own[index], state) for state in (params, rest)))

    def one_device(params: Any, rest: Any, x: Any) -> Any:
        for index in range(stages):
            x = stage(params, rest, index)(x)
        return x

    def staged(params: Any, rest: Any, x: jax.Array) -> jax.Array:
        own, model = lax.axis_index("stage"), stage(params, rest, 0)
        inputs = x.reshape(parts, BATCH, WIDTH)
        first, last = own == 0, own == stages - 1

        def tick(carry: tuple[jax.Array, jax.Array], time: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            received, results = carry
            y = model(jnp.where(first, inputs[jnp.clip(time, 0, parts - 1)], received))
            written = results.at[jnp.clip(time - stages + 1, 0, parts - 1)].set(y)
            results = jnp.where(last & (time >= stages - 1), written, results)
            return (lax.ppermute(y, "stage", [(i, (i + 1) % stages) for i in range(stages)]), results), None

        empty = (jnp.zeros((BATCH, WIDTH)), jnp.zeros((parts, BATCH, WIDTH)))
        empty = jax.tree.map(lambda array: lax.pcast(array, ("stage",), to="varying"), empty)
        (_, results), _ = lax.scan(tick, empty, jnp.arange(parts + stages - 1))
        return lax.psum(jnp.where(last, results, jnp.zeros_like(results)), "stage").reshape(x.shape)

    mesh = jax.make_mesh((stages,), ("stage",), (AUTO,), devices=jax.devices()[:stages])
    piped = jax.jit(jax.shard_map(staged, mesh=mesh, in_specs=(P("stage"), P("stage"), P()), out_specs=P()))
    equal(piped(params, rest, x), jax.jit(one_device)(params, rest, x))
    gradients = [
        jax.jit(jax.grad(lambda params, run=run: jnp.mean((run(params, rest, x) - 1) ** 2)))(params)
        for run in (piped, one_device)
    ]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) < 2.0**-20


class Shared(nnx.Module):
    """Two layers of one weight, which a donated state holds once."""

    def __init__(self) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.second = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def donated() -> None:
    """Steps that give their state away: the same numbers, and no array is used after it."""
    mesh = jax.make_mesh((8,), ("data",), (EXPLICIT,))
    x = draw(BATCH, WIDTH)
    qmodel = qjax.quantize(Shared(), qjax.Recipe(), x)
    optimizer = nnx.Optimizer(qmodel, optax.adam(1e-2), wrt=nnx.Param)
    definition, state = nnx.split((qmodel, optimizer))

    def update(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        qmodel, optimizer = nnx.merge(definition, state)
        loss = step(qmodel, optimizer, x)
        return nnx.state((qmodel, optimizer)), loss

    def trained(update: Any) -> tuple[Any, list[float]]:
        with jax.set_mesh(mesh):
            own = jax.device_put(jax.tree.map(jnp.copy, state), NamedSharding(mesh, P()))
            rows, losses = jax.device_put(x, NamedSharding(mesh, P("data"))), list[float]()
            for _ in range(3):
                own, loss = update(own, rows)
                losses.append(float(loss))
        return own, losses

    found, wanted = trained(jax.jit(update, donate_argnums=0)), trained(jax.jit(update))
    equal(found[0], wanted[0])
    assert found[1] == wanted[1] == sorted(wanted[1], reverse=True)


CHECKS = {check.__name__: check for check in (sequences, annotated, experts, pipeline, donated)}

if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
    print("equal")
