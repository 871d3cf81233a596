"""Two autoencoders: MLPerf Tiny's for anomalies in machine sounds, and one of transposed convolutions for images."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx


class DenseAutoencoder(nnx.Module):
    """640 features through a bottleneck of 8: linear layers with batch norm and relu."""

    def __init__(
        self,
        features: int = 640,
        widths: tuple[int, ...] = (128, 128, 128, 128, 8, 128, 128, 128, 128),
        *,
        rngs: nnx.Rngs,
    ) -> None:
        layers = []
        for inputs, outputs in itertools.pairwise((features, *widths)):
            layers += [nnx.Linear(inputs, outputs, rngs=rngs), nnx.BatchNorm(outputs, rngs=rngs), nnx.relu]
        self.layers = nnx.Sequential(*layers, nnx.Linear(widths[-1], features, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


class ConvAutoencoder(nnx.Module):
    """Strided convolutions down to a vector, transposed ones back to pixels in [0, 1]."""

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        widths: tuple[int, ...] = (32, 64, 128),
        latent: int = 64,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = nnx.List(
            [nnx.Conv(i, o, (3, 3), strides=(2, 2), rngs=rngs) for i, o in itertools.pairwise((channels, *widths))]
        )
        self.side = size // 2 ** len(widths)
        self.to_latent = nnx.Linear(self.side**2 * widths[-1], latent, rngs=rngs)
        self.from_latent = nnx.Linear(latent, self.side**2 * widths[-1], rngs=rngs)
        back = (*reversed(widths), channels)
        self.decoder = nnx.List(
            [nnx.ConvTranspose(i, o, (3, 3), strides=(2, 2), rngs=rngs) for i, o in itertools.pairwise(back)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv in self.encoder:
            x = nnx.leaky_relu(conv(x), 0.1)
        z = self.to_latent(jnp.reshape(x, (x.shape[0], -1)))
        x = nnx.elu(self.from_latent(z))
        x = jnp.reshape(x, (x.shape[0], self.side, self.side, -1))
        for i, conv in enumerate(self.decoder):
            x = conv(x)
            if i < len(self.decoder) - 1:
                x = nnx.leaky_relu(x, 0.1)
        return nnx.sigmoid(x)


def small_dense(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return DenseAutoencoder(12, (8, 3, 8), rngs=rngs), jax.random.normal(rngs.data(), (2, 12))


def dense(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return DenseAutoencoder(rngs=rngs), jax.random.normal(rngs.data(), (2, 640))


def small_conv(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ConvAutoencoder(8, 1, (4, 6), 4, rngs=rngs), jax.random.uniform(rngs.data(), (2, 8, 8, 1))


def conv(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return ConvAutoencoder(rngs=rngs), jax.random.uniform(rngs.data(), (2, 32, 32, 3))


small, full = small_dense, dense
