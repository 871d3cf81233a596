"""The quantized model under JAX's and flax's transforms: the same codes everywhere."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax import Recipe
from tests.layers.round_trip import assert_same, assert_verified, data, doubled, train_step

X = data(4, 3)


class Mlp(nnx.Module):
    """dense -> batch norm -> relu -> residual -> dense; `remat` recomputes the middle."""

    def __init__(self, seed=0, remat=False):
        rngs = nnx.Rngs(seed)
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.b = nnx.Linear(4, 4, rngs=rngs)
        self.c = nnx.Linear(4, 2, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        x = nnx.relu(self.bn(self.a(x)))
        middle = nnx.remat(_middle) if self.remat else _middle
        return self.c(middle(self.b, x))


def _middle(layer, x):
    return nnx.relu(x + layer(x))


def model(**kwargs):
    qmodel = qjax.quantize(Mlp(**kwargs), Recipe(), X)
    qmodel.eval()
    return qmodel


@pytest.fixture(scope="module")
def qmodel():
    return model()


def gradients(qmodel, x, weights):
    return nnx.grad(lambda m: jnp.sum(m(x) * weights))(qmodel)


# ---------------------------------------------------------------------------- one model


@pytest.mark.exhaustive
def test_eager_jit_and_checkpoint_give_the_same_codes(qmodel):
    eager = qmodel.codes(X)
    assert_same(nnx.jit(lambda m, x: m.codes(x))(qmodel, X), eager)
    graphdef, state = nnx.split(qmodel)
    pure = lambda state, x: nnx.merge(graphdef, state).codes(x)  # noqa: E731
    assert_same(jax.jit(pure)(state, X), eager)
    assert_same(jax.jit(jax.checkpoint(pure))(state, X), eager)
    assert_same(qmodel(X), eager[0])


@pytest.mark.exhaustive
def test_remat_inside_the_model_changes_nothing(qmodel):
    remat = model(remat=True)
    assert {name for name, _ in remat.plan.quantizers} == {name for name, _ in qmodel.plan.quantizers}
    assert_same(nnx.jit(lambda m, x: m.codes(x))(remat, X), qmodel.codes(X))
    weights = data(4, 2, seed=1)
    step = nnx.jit(gradients)
    plain, recomputed = step(qmodel, X, weights), step(remat, X, weights)
    # the quantizers of both come in another order
    learned = [m.quantizers.named(g["quantizers"]) for m, g in ((qmodel, plain), (remat, recomputed))]
    for a, b in zip(*map(jax.tree.leaves, learned), strict=True):
        # the same sums in another order
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (plain["model"], recomputed["model"])), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
    text = str(jax.make_jaxpr(lambda x: nnx.clone(remat)(x))(X))
    assert "remat" in text or "checkpoint" in text
    graph = qjax.convert(remat, X)
    assert_verified(qjax.verify(graph, remat, [X]))
    assert np.array_equal(graph(X), qjax.convert(qmodel, X)(X))


@pytest.mark.exhaustive
def test_vmap_over_examples(qmodel):
    batched = qmodel(X)
    one_by_one = nnx.vmap(lambda m, x: m(x[None])[0], in_axes=(None, 0))(qmodel, X)
    assert np.array_equal(batched, one_by_one)
    grads = jax.vmap(jax.grad(lambda x: jnp.sum(qmodel(x.reshape(1, -1)))))(X)
    assert grads.shape == X.shape
    assert np.isfinite(grads).all()
    assert np.any(np.asarray(grads) != 0)


@pytest.mark.exhaustive
def test_vmap_over_an_ensemble():
    members = [model(seed=seed) for seed in (0, 1)]
    expected = np.stack([member(X) for member in members])
    graphdef = nnx.graphdef(members[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(member) for member in members))
    ensemble = nnx.merge(graphdef, stacked)
    out = nnx.jit(nnx.vmap(lambda m, x: m(x), in_axes=(0, None)))(ensemble, X)
    assert np.array_equal(out, expected)


def test_split_and_merge(qmodel):
    graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)
    again = nnx.merge(graphdef, params, rest)
    assert np.array_equal(again(X), qmodel(X))
    assert again.plan is qmodel.plan or again.plan == qmodel.plan
    hash(graphdef)
    learned = nnx.state(qmodel, qjax.QuantParam)
    assert {path[0] for path, _ in nnx.to_flat_state(learned)} == {"quantizers"}
    assert len(jax.tree.leaves(learned)) == 1
    names = [name for name, numbers in qmodel.quantizers.named(learned["quantizers"]).items() if numbers]
    assert names == [name for name, _ in qmodel.plan.quantizers]


@pytest.mark.exhaustive
def test_one_quantizer_tree_may_be_frozen(qmodel):
    """`wrt` chooses what an optimizer moves: here the model's own parameters without the scales."""
    frozen = nnx.clone(qmodel)
    filters = nnx.All(nnx.Param, nnx.Not(qjax.QuantParam))
    optimizer = nnx.Optimizer(frozen, optax.sgd(0.1), wrt=filters)
    grads = nnx.grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, filters))(frozen)
    before = frozen.qparams()
    optimizer.update(frozen, grads)
    assert not np.array_equal(frozen.model.a.kernel[...], qmodel.model.a.kernel[...])
    assert all(np.array_equal(p.scale, before[name].scale) for name, p in frozen.qparams().items())


# ---------------------------------------------------------------------------- training loops


@pytest.mark.exhaustive
def test_a_training_loop_in_a_scan_is_the_loop_in_python():
    batches = jnp.stack([data(4, 3, seed=seed) for seed in range(4)])
    target = data(4, 2, seed=9)

    def step(qmodel, optimizer, x):
        def loss(m):
            return jnp.mean(jnp.square(m(x) - target))

        value, grads = nnx.value_and_grad(loss)(qmodel)
        optimizer.update(qmodel, grads)
        return value

    def start():
        qmodel = model()
        qmodel.train()
        return qmodel, nnx.Optimizer(qmodel, optax.sgd(0.05), wrt=nnx.Param)

    python, optimizer = start()
    jitted = nnx.jit(step)
    losses = [jitted(python, optimizer, x) for x in batches]

    scanned, optimizer = start()

    @nnx.jit
    def loop(qmodel, optimizer, batches):
        def body(carry, x):
            return carry, step(*carry, x)

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))((qmodel, optimizer), batches)[1]

    in_scan = loop(scanned, optimizer, batches)
    assert losses[-1] < losses[0]
    assert np.allclose(np.stack(losses), in_scan, rtol=1e-4, atol=0)
    assert not np.array_equal(scanned.model.bn.mean[...], model().model.bn.mean[...])

    # the same in lax.scan, on the split state
    plain, optimizer = start()
    graphdef, state = nnx.split((plain, optimizer))

    def body(state, x):
        qmodel, optimizer = nnx.merge(graphdef, state)
        value = step(qmodel, optimizer, x)
        return nnx.state((qmodel, optimizer)), value

    _, in_lax = jax.jit(lambda s, xs: jax.lax.scan(body, s, xs))(state, batches)
    assert np.allclose(np.stack(losses), in_lax, rtol=1e-4, atol=0)


# ---------------------------------------------------------------------------- scans inside the model


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.fc(x))


class Stacked(nnx.Module):
    """Layers made by vmap, called by scan."""

    def __init__(self, length=3):
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Layer(rngs)

        self.layers = create(nnx.Rngs(0).split(length))
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return layer(x)

        return self.head(forward(x, self.layers))


class Unrolled(nnx.Module):
    """The same layers in a Python loop."""

    def __init__(self, stacked, length=3):
        graphdef, state = nnx.split(stacked.layers)
        self.layers = nnx.List([nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(length)])
        self.head = nnx.clone(stacked.head)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["stacked", "shared"])
@pytest.mark.exhaustive
def test_layers_in_a_scan(scan):
    qmodel = qjax.quantize(Stacked(2), Recipe(scan=scan), X)
    sizes = {name: p.scale.shape for name, p in qmodel.qparams().items()}
    kernel, activation = ((2, 3), (2,)) if scan == "stacked" else ((3,), ())
    assert sizes == {
        "input": (),
        "scan_output": (),
        "head": (),
        "head/kernel": (2,),
        "scan_input": activation,
        "layers/fc": activation,
        "layers/fc/kernel": kernel,
    }
    first = train_step(qmodel, X)
    assert train_step(qmodel, X) < first
    graph = qjax.convert(qmodel, X)
    more = doubled(X)
    assert_verified(qjax.verify(graph, qmodel, [X, more]))
    forward = nnx.jit(qjax.exact(qmodel, X))
    assert np.array_equal(forward(qmodel, more), graph(more))
    eager = qmodel.codes(X)
    assert_same(nnx.jit(lambda m, x: m.codes(x))(qmodel, X), eager)


def test_a_scan_gives_the_codes_of_the_loop():
    stacked = Stacked()
    scanned, looped = (qjax.quantize(m, Recipe(), X) for m in (stacked, Unrolled(stacked)))
    (a, in_scan), (b, in_loop) = scanned.codes(X), looped.codes(X)
    # what one iteration hands to the next is quantized where it comes in
    sums = [in_scan["scan_input[1]"], in_scan["scan_input[2]"], in_scan["scan_output"]]
    for i in range(3):
        assert np.array_equal(in_scan[f"layers/fc[{i}]"], in_loop[f"layers/{i}/fc"])
        assert np.array_equal(sums[i], in_loop[f"layers/{i}/add"])
    assert np.array_equal(a, b)


# ---------------------------------------------------------------------------- devices

_SHARDED = """
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import qjax
from tests.test_model_transforms import Mlp
from tests.layers.round_trip import data
assert jax.device_count() == 2
x = data(4, 3)
qmodel = qjax.quantize(Mlp(), qjax.Recipe(), x)
qmodel.eval()
spread = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch")))
assert len(spread.sharding.device_set) == 2
step = nnx.jit(lambda m, x: m.codes(x))
(a, one), (b, two) = step(qmodel, x), step(qmodel, spread)
assert np.array_equal(a, b)
assert one.keys() == two.keys()
assert all(np.array_equal(one[name], two[name]) for name in one)
graph = qjax.convert(qmodel, x)
out = graph(spread)
assert len(out.sharding.device_set) == 2, out.sharding
assert np.array_equal(out, graph(x))
before = qmodel.qparams()["input"].scale
qjax.calibrate(qmodel, [spread])
assert np.array_equal(before, qmodel.qparams()["input"].scale)
print("same codes")
"""


@pytest.mark.exhaustive
def test_a_batch_over_two_devices_gives_the_same_codes():
    root = pathlib.Path(__file__).parents[1]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SHARDED], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout == "same codes\n", done.stderr[-2000:]
