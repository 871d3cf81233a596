"""Mixtures of experts as public models write them: dense, with a capacity, and sorted with `lax.ragged_dot`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.numerics.affine import dequantize, quantize

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN, CAPACITY = 12, 8, 16, 4, 2, 8


class Experts(nnx.Module):
    """A router, and gated layers with one matrix for each expert."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)) / 3)
        self.gate = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)) / 3)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)) / 3)


class Dense(Experts):
    """All tokens meet all experts, as in MaxText's `dense_matmul` without a capacity."""

    def __call__(self, x: jax.Array) -> jax.Array:
        best, index = lax.top_k(self.router(x), CHOSEN)
        shares = jnp.sum(jax.nn.one_hot(index, EXPERTS) * jax.nn.softmax(best, axis=-1)[..., None], axis=-2)
        h = nnx.silu(jnp.einsum("td,edf->tef", x, self.gate[...])) * jnp.einsum("td,edf->tef", x, self.up[...])
        return jnp.einsum("ted,te->td", jnp.einsum("tef,efd->ted", h, self.down[...]), shares)


class Capacity(Experts):
    """Every expert takes the first tokens that chose it, by masks, as in MaxText's `generate_masks`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        best, index = lax.top_k(jax.nn.softmax(self.router(x), axis=-1), CHOSEN)
        mask = jax.nn.one_hot(index, EXPERTS, dtype=jnp.int32)
        flat = mask.reshape(-1, EXPERTS)
        place = (jnp.cumsum(flat, axis=0) * flat).reshape(mask.shape)
        kept = (place <= CAPACITY).astype(jnp.int32) * mask
        slot = jax.nn.one_hot(jnp.sum(place * kept, axis=-1) - 1, CAPACITY)
        kept = kept.astype(jnp.float32)
        inputs = jnp.einsum("td,tec->ecd", x, jnp.einsum("tke,tkc->tec", kept, slot))
        h = nnx.silu(jnp.einsum("ecd,edf->ecf", inputs, self.gate[...]))
        h = h * jnp.einsum("ecd,edf->ecf", inputs, self.up[...])
        y = jnp.einsum("ecf,efd->ecd", h, self.down[...])
        return jnp.einsum("ecd,tec->td", y, jnp.einsum("tke,tkc,tk->tec", kept, slot, best))


class Ragged(Experts):
    """Tokens sorted by their expert, as in MaxText's `sparse_matmul`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        best, index = lax.top_k(self.router(x), CHOSEN)
        flat = index.reshape(-1)
        order = jnp.argsort(flat)
        rows, sizes = jnp.take(x, order // CHOSEN, axis=0), jnp.bincount(flat, length=EXPERTS)
        h = nnx.silu(lax.ragged_dot(rows, self.gate[...], sizes)) * lax.ragged_dot(rows, self.up[...], sizes)
        y = jnp.take(lax.ragged_dot(h, self.down[...], sizes), jnp.argsort(order), axis=0)
        return jnp.einsum("tkd,tk->td", y.reshape(-1, CHOSEN, WIDTH), jax.nn.softmax(best, axis=-1))


class Biased(Experts):
    """On one device of `jax.shard_map`, with a bias for each expert, as MaxText's `sparse_matmul` runs gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nnx.Param(draw(EXPERTS, HIDDEN))

    def __call__(self, x: jax.Array) -> jax.Array:
        mesh = jax.make_mesh((1, 1), ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        whole = jax.sharding.PartitionSpec()
        routed = jax.shard_map(_routed, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return routed(x, self.router(x), self.up[...], self.bias[...], self.down[...])


def _routed(x: jax.Array, scores: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    chosen = jnp.argmax(scores, axis=-1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    expert = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=len(x))
    h = nnx.silu(lax.ragged_dot(x[order], up, sizes) + bias[expert])
    return lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]


class Layers(nnx.Module):
    """Layers of experts in one scan with remat, as MaxText has them."""

    def __init__(self) -> None:
        self.layers = nnx.vmap(lambda rngs: Ragged())(nnx.Rngs(0).split(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        body = nnx.remat(lambda layer, x: x + layer(x))
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def trained(model: nnx.Module, x: np.ndarray, steps: int = 3, recipe: qjax.Recipe | None = None) -> Any:
    """The quantized model in evaluation, after steps that lower its loss."""
    qmodel = qjax.quantize(model, recipe or qjax.Recipe(), x)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(qmodel: Any, optimizer: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda qmodel: jnp.mean((qmodel(x) - 1) ** 2))(qmodel)
        optimizer.update(qmodel, gradients)
        return loss

    losses = [float(step(qmodel, optimizer)) for _ in range(steps)]
    assert losses == sorted(losses, reverse=True)
    qmodel.eval()
    return qmodel


@pytest.mark.parametrize(
    "create",
    [Ragged, Biased, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (Dense, Capacity, Layers))],
)
def test_experts_train_and_become_integers(create: Callable[[], nnx.Module]) -> None:
    x = draw(TOKENS, WIDTH)
    qmodel = trained(create(), x)
    graph = qjax.convert(qmodel, x, batch="fixed")
    assert qjax.verify(graph, qmodel, [x]).exact
    # every expert has scales of its own
    scales = {name.rpartition("/")[2]: params.scale.shape[-2:] for name, params in qmodel.qparams().items()}
    assert scales["up"] == scales.get("gate", scales["up"]) == (EXPERTS, HIDDEN)
    assert scales["down"] == (EXPERTS, WIDTH)


class Product(nnx.Module):
    """One product of sorted rows."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(draw(3, WIDTH, 5))

    def __call__(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, self.kernel[...], sizes)


@pytest.mark.parametrize("weights", [qjax.QSpec(axis=-1), qjax.QSpec(bits=4), qjax.QSpec(symmetric=False, axis=-1)])
@pytest.mark.parametrize("sizes", [pytest.param([4, 1, 5], marks=pytest.mark.exhaustive), [3, 0, 4]])
def test_a_row_meets_the_codes_of_its_expert(weights: qjax.QSpec, sizes: list[int]) -> None:
    """Beside Python's products, also of rows without an expert; gradients are those of these products."""
    x, counts = draw(10, WIDTH) + 0.5, np.array(sizes, np.int32)
    qmodel = qjax.quantize(Product(), qjax.Recipe(weights=weights), (x, counts))
    known = qmodel.qparams()
    expert = np.repeat(np.arange(4), [*sizes, 10 - sum(sizes)])
    kernel: Any = qmodel.model.kernel  # pyright: ignore[reportAttributeAccessIssue]
    given = (known["input/0"], x), (known["kernel"], np.asarray(kernel[...]))
    a, w = (np.asarray(dequantize(quantize(value, params), params)) for params, value in given)
    rows = np.concatenate([w, np.zeros((1, WIDTH, 5), np.float32)])[expert]
    expected = np.einsum("rk,rkn->rn", a.astype(np.float64), rows.astype(np.float64))
    found = np.asarray(qmodel(x, counts))
    output = known["ragged_dot"]
    np.testing.assert_array_equal(found, dequantize(quantize(expected.astype(np.float32), output), output))
    assert not found[sum(sizes) :].any()

    unclipped = np.abs(found - expected) <= 0.501 * np.asarray(output.scale)
    along = np.where(unclipped, draw(10, 5), np.float32(0))
    gradients: Any = nnx.grad(lambda qmodel: jnp.sum(qmodel(x, counts) * along))(qmodel)
    each = np.einsum("rk,rn->rkn", a, along)
    wanted = np.stack([each[expert == e].sum(axis=0) for e in range(3)])
    inside = np.abs(np.asarray(kernel[...])) < 0.99 * np.abs(np.asarray(kernel[...])).max()
    gradient = np.asarray(gradients.model.kernel[...])
    # sums of at most five floats, in another order
    np.testing.assert_allclose(gradient[inside], wanted[inside], rtol=0, atol=2.0**-20 * np.abs(wanted).max())

    qmodel.eval()
    graph = qjax.convert(qmodel, (x, counts), batch="fixed")
    assert qjax.verify(graph, qmodel, [(x, counts)]).exact


class Ordered(nnx.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.layer, self.function = nnx.Linear(5, 5, rngs=nnx.Rngs(0)), function

    def __call__(self, x: jax.Array, ids: jax.Array) -> Any:
        return self.function(self.layer(x), ids)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, ids: (y, jnp.argsort(y, axis=-1), jnp.argsort(y, axis=-1, descending=True)),
        lambda y, ids: (y, *lax.sort_key_val(y, ids, dimension=1)),
        lambda y, ids: (*lax.sort((ids, y), dimension=1, num_keys=1), jnp.sort(ids, axis=1)),
        lambda y, ids: (y, jnp.bincount(ids.reshape(-1), length=4), jnp.argsort(ids, axis=1)),
    ],
    ids=["argsort", "key and value", "by integers", "counts"],
)
def test_orders_are_those_of_the_model(function: Callable[..., Any]) -> None:
    x, ids = draw(4, 5), np.random.default_rng(1).integers(0, 4, (4, 5)).astype(np.int32)
    x[:, 3] = x[:, 1]
    qmodel = qjax.quantize(Ordered(function), qjax.Recipe(), (x, ids))
    qmodel.eval()
    graph = qjax.convert(qmodel, (x, ids), batch="fixed")
    found, wanted = (jax.tree.leaves(model(x, ids)) for model in (graph, qmodel))
    assert len(found) == len(wanted) == len(jax.tree.leaves(qmodel.model(x, ids)))  # pyright: ignore[reportCallIssue]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert qjax.verify(graph, qmodel, [(x, ids)]).exact
