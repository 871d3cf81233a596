"""Small models with what makes switching quantizers hard: two readers of one tensor, products of activations, scans."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax


def data(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class Mixed(nnx.Module):
    """Convolutions that read one tensor, a residual, a gate, a product of activations, a concatenation."""

    def __init__(self):
        rngs = nnx.Rngs(3)
        self.left = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.right = nnx.Conv(2, 4, (1, 1), feature_group_count=2, rngs=rngs)
        self.gate = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.left(x)) + self.right(x)
        pixels = y.reshape(y.shape[0], -1, 4)
        scores = jnp.einsum("bik,bjk->bij", pixels, pixels)
        z = jnp.concatenate([jnp.mean(y * self.gate(y), axis=(1, 2)), scores[:, 0, :5]], axis=-1)
        return {"scores": self.head(z), "class": jnp.argmax(z, -1)}


class Deep(nnx.Module):
    """Three equal layers in a scan, under remat, between two others."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.stem = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
        self.layers = layers(nnx.Rngs(0).split(3))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(2))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return nnx.remat(lambda layer, x: nnx.relu(layer(x)))(layer, x)

        return self.head(run(self.layers, self.stem(x)))


class Small(nnx.Module):
    """Three dense layers."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.middle = nnx.Linear(8, 6, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.middle(nnx.relu(self.first(x)))))


def coarse(bits: int = 3, **changes) -> qjax.Recipe:
    """Few bits, so that every quantizer leaves a trace; ranges, since searching for the best scale takes longer."""
    return qjax.Recipe(
        weights=qjax.QSpec(bits=bits, axis=-1),
        activations=qjax.QSpec(bits=bits, symmetric=False),
        observer="minmax",
        weight_observer="minmax",
        **changes,
    )


def in_halves(model: nnx.Module, seed: int = 0) -> nnx.Module:
    """The model with parameters -1/2, 0 and 1/2. On data as short, and with scales that are powers of two, no sum or
    product rounds in float32: its order and XLA's fusions cannot show, and equal means equal in every bit.
    """
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p: jnp.asarray(rng.integers(-1, 2, p.shape) / 2, p.dtype), state))
    return model


def halves(*shape: int, seed: int = 0) -> jax.Array:
    """-1, -1/2, 0, 1/2 and 1."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32) / 2)
