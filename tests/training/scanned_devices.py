"""Runs in a process of its own, with eight devices: training of a scanned, rematerialised decoder beside one device.

Batches are split over four devices, heads and hidden features of every layer over two. After each step the state is
copied to one device. There it has

- the same codes of all tensors and the same output, to the bit;
- the same loss and gradients up to rounding, because they are sums of floats in another order;
- after training, the same graph.
"""

import os

if __name__ == "__main__":  # pytest imports it, too, and hands its environment on to what it starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qjax
from tests.training.devices import equal

WIDTH, HEADS, LAYERS, TOKENS, BATCH, LENGTH, STEPS = 16, 2, 3, 32, 8, 6, 3
RULES = {
    "blocks/(query|key|value|up)/kernel": P(None, None, "model"),
    "blocks/up/bias": P(None, "model"),
    "blocks/(out|down)/kernel": P(None, "model", None),
    "head/kernel": P(None, "model"),
    "head/bias": P("model"),
}
"""The first axis of what a scan reads is that of the layers."""


class Block(nnx.Module):
    """Causal attention and a GELU, each behind a norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        # A bias of keys moves all scores of a row alike: its gradient would be nothing but rounding.
        self.query, self.key, self.value = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        n, t, _ = x.shape
        h = self.first(x)
        q, k, v = (y(h).reshape(n, t, HEADS, WIDTH // HEADS) for y in (self.query, self.key, self.value))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.float32((WIDTH // HEADS) ** 0.5)
        weights = jax.nn.softmax(jnp.where(np.tri(t, dtype=bool), scores, np.float32(-1e30)), axis=-1)
        x = x + self.out(jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, t, WIDTH))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class Decoder(nnx.Module):
    """Token ids to scores of the next token; its layers are one scan whose body is rematerialised."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)
        self.blocks: Any = nnx.vmap(Block)(rngs.split(LAYERS))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        step = nnx.remat(lambda block, x: block(x))
        x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, self.embed(tokens))
        return self.head(self.norm(x))


@nnx.jit
def measured(qmodel: Any, text: Any) -> tuple[Any, Any, Any]:
    """The output and the codes of all tensors, the loss, and its gradients."""

    def loss(qmodel: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(qmodel(text[:, :-1]), text[:, 1:]).mean()

    return qmodel.codes(text[:, :-1]), *nnx.value_and_grad(loss)(qmodel)


def close(found: Any, wanted: Any) -> None:
    """Apart by 2^-20 of the greatest of all numbers, and in each array by 2^-12 of its own greatest, at most."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    ]
    largest = max(float(np.abs(b).max()) for _, b in pairs)
    assert largest > 0.01
    for a, b in pairs:
        assert float(np.abs(a - b).max()) <= min(2.0**-20 * largest, 2.0**-12 * float(np.abs(b).max()))


def main() -> None:
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    texts = np.random.default_rng(0).integers(0, TOKENS, (STEPS, BATCH, LENGTH + 1)).astype(np.int32)
    single = qjax.quantize(Decoder(), qjax.Recipe(), texts[0][:, :-1])
    sharded = nnx.clone(single)
    optimizer = nnx.Optimizer(sharded, optax.adam(1e-3), wrt=nnx.Param)
    state = nnx.state((sharded, optimizer))
    nnx.update((sharded, optimizer), jax.device_put(state, qjax.training.shardings(state, sharded, mesh, RULES)))
    model: Any = sharded.model
    scales: Any = sharded.quantizers
    assert model.blocks.up.kernel[...].addressable_shards[0].data.shape == (LAYERS, WIDTH, 2 * WIDTH)
    assert scales.learned_log2_scale[...].sharding.is_fully_replicated
    assert len(scales.learned_log2_scale[...].addressable_shards) == 8

    first = np.asarray(model.blocks.up.kernel[...])
    # One device is no different: gradients depend on the order of the examples.
    gradients, others = (measured(single, text)[2] for text in (texts[0], texts[0][::-1]))
    close(others, gradients)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (gradients, others)), strict=True))
    for text in texts:
        split = jax.device_put(text, NamedSharding(mesh, P("data")))
        codes, loss, gradients = measured(sharded, split)
        same_codes, same_loss, same_gradients = measured(single, text)
        equal(codes, same_codes)
        close(loss, same_loss)
        close(gradients, same_gradients)
        optimizer.update(sharded, gradients)
        nnx.update(single, jax.tree.map(np.asarray, nnx.state(sharded)))
    assert model.blocks.up.kernel[...].sharding.spec == P(None, None, "model")
    assert np.mean(np.abs(np.asarray(model.blocks.up.kernel[...]) - first)) > 1e-4

    x = texts[0][:, :-1]
    for one in (single, sharded):
        one.eval()
    graph = qjax.convert(sharded, x)
    equal(graph(x), qjax.convert(single, x)(x))
    assert qjax.verify(graph, sharded, [jax.device_put(x, NamedSharding(mesh, P("data")))]).exact
    print("equal")


if __name__ == "__main__":
    main()
