"""MLP-Mixer (Tolstikhin et al., 2021): perceptrons over the patches and over the channels in turn."""

import jax
import jax.numpy as jnp
from flax import nnx


class MlpBlock(nnx.Module):
    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(width, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.gelu(self.fc1(x)))


class MixerBlock(nnx.Module):
    """Mixes tokens (on the transposed tensor), then channels."""

    def __init__(self, tokens: int, width: int, token_hidden: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.token_mixing = MlpBlock(tokens, token_hidden, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.channel_mixing = MlpBlock(width, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.swapaxes(self.norm1(x), 1, 2)
        y = self.token_mixing(y)
        x = x + jnp.swapaxes(y, 1, 2)
        return x + self.channel_mixing(self.norm2(x))


class Mixer(nnx.Module):
    """The defaults are Mixer-B/16."""

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        token_hidden: int = 384,
        hidden: int = 3072,
        classes: int = 1000,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.patch = patch
        tokens = (size // patch) ** 2
        self.stem = nnx.Linear(3 * patch * patch, width, rngs=rngs)
        self.blocks = nnx.Sequential(
            *(MixerBlock(tokens, width, token_hidden, hidden, rngs=rngs) for _ in range(depth))
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, kernel_init=nnx.initializers.lecun_normal(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # einops: "n (h p) (w q) c -> n (h w) (p q c)"
        n, height, width, channels = x.shape
        p = self.patch
        x = x.reshape(n, height // p, p, width // p, p, channels)
        x = jnp.transpose(x, (0, 1, 3, 2, 4, 5))
        x = x.reshape(n, (height // p) * (width // p), p * p * channels)
        x = self.norm(self.blocks(self.stem(x)))
        return self.head(jnp.mean(x, axis=1))


def small(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Mixer(8, 4, 16, 1, 8, 32, 10, rngs=rngs), jax.random.normal(rngs.data(), (2, 8, 8, 3))


def full(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Mixer(rngs=rngs), jax.random.normal(rngs.data(), (2, 224, 224, 3))
