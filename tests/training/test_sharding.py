"""A quantized model on a mesh: scales lie where their weights lie, and the bits are those of one device."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import qjax


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["devices", "scanned_devices", "parallel_models"])
def test_eight_devices_compute_what_one_computes(script: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.training.{script}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


def test_a_step_inside_of_shard_map_is_the_step_outside() -> None:
    """Data-parallel training as it is written by hand: no array is an array there, nor is a literal."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    qmodel = qjax.quantize(Two(), qjax.Recipe(), x)
    definition = nnx.graphdef(qmodel)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jax.numpy.mean(nnx.merge(definition, state)(x) ** 2)

    graded = nnx.state(qmodel, nnx.Param)
    rest = nnx.state(qmodel, nnx.Not(nnx.Param))

    def whole(graded: Any, x: jax.Array) -> Any:
        return jax.grad(lambda own: loss(nnx.merge_state(own, rest), x))(graded)

    def inside(graded: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), whole(graded, x))

    sharded = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    forward = jax.shard_map(qmodel, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(forward)(x)), np.asarray(nnx.jit(lambda m, x: m(x))(qmodel, x)))
    # Gradients are sums of floats in another order, so they are apart by the rounding of their terms. The terms of a
    # small gradient may be as large as those of the others, because they cancel.
    ours, theirs = (jax.tree.leaves(f(graded, x)) for f in (jax.jit(sharded), jax.jit(whole)))
    largest = max(float(np.abs(b).max()) for b in theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2.0**-20 * largest)


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_every_kind_of_mesh_has_the_codes_of_one_device(which: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.meshes", which],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr


class Two(nnx.Module):
    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 3, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def specs_of(places: Any) -> dict[str, P]:
    leaves = jax.tree_util.tree_leaves_with_path(places)
    return {"/".join(str(getattr(key, "key", "")) for key in path).strip("/"): place.spec for path, place in leaves}


@pytest.fixture(scope="module")
def qmodel() -> qjax.QuantizedModel:
    return qjax.quantize(Two(), qjax.Recipe(), np.ones((2, 4), np.float32))


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("data", "model"))


def test_an_optimizers_moments_go_with_what_they_belong_to(
    qmodel: qjax.QuantizedModel, mesh: jax.sharding.Mesh
) -> None:
    state = nnx.state((qmodel, nnx.Optimizer(qmodel, optax.adam(1e-3), wrt=nnx.Param)))
    places = qjax.training.shardings(state, qmodel, mesh, {"up/kernel": P(None, "model"), "up/bias": P("model")})
    specs = specs_of(places)
    split = {name: spec for name, spec in specs.items() if any(spec)}
    assert split == {
        f"{where}/{name}": spec
        for where in ("0", "1/opt_state/0/mu", "1/opt_state/0/nu")
        for name, spec in (
            ("model/up/kernel", P(None, "model")),
            ("model/up/bias", P("model")),
        )
    }


def test_later_rules_win(qmodel: qjax.QuantizedModel, mesh: jax.sharding.Mesh) -> None:
    places = qjax.training.shardings(
        nnx.state(qmodel), qmodel, mesh, {".*/kernel": P("model"), "down/kernel": P(None, "model")}
    )
    specs = specs_of(places)
    assert specs["model/up/kernel"] == P("model")
    assert specs["model/down/kernel"] == P(None, "model")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"upp/kernel": P("model")}, r"'upp/kernel' match no parameter.*there are down/bias, down/kernel, up/bias"),
        ({"up/kernel": P("expert")}, r"'model/up/kernel': the mesh has the axes data, model"),
        ({"up/bias": P(None, "model")}, r"'model/up/bias' has shape \(6,\)"),
    ],
)
def test_a_rule_that_cannot_be(
    qmodel: qjax.QuantizedModel, mesh: jax.sharding.Mesh, rules: dict[str, P], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        qjax.training.shardings(nnx.state(qmodel), qmodel, mesh, rules)
