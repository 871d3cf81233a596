"""Sequence classifiers of LSTM and GRU layers (Hochreiter and Schmidhuber, 1997; Cho et al., 2014)."""

import itertools
from typing import Any

import jax
from flax import nnx


class Recurrent(nnx.Module):
    """Recurrent layers over (batch, time, features), and a linear head on the last step."""

    def __init__(
        self,
        cell: type[nnx.LSTMCell] | type[nnx.GRUCell],
        features: int,
        hidden: int,
        layers: int,
        classes: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        widths = (features, *(hidden,) * layers)
        self.layers = nnx.List([nnx.RNN(cell(i, o, rngs=rngs), rngs=rngs) for i, o in itertools.pairwise(widths)])
        self.head = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def small_lstm(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Recurrent(nnx.LSTMCell, 4, 8, 1, 5, rngs=rngs), jax.random.normal(rngs.data(), (2, 4, 4))


def lstm(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    """Two layers of 128 over 49 frames of 40 features, as in keyword spotting."""
    return Recurrent(nnx.LSTMCell, 40, 128, 2, 12, rngs=rngs), jax.random.normal(rngs.data(), (2, 49, 40))


def small_gru(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    return Recurrent(nnx.GRUCell, 4, 8, 1, 5, rngs=rngs), jax.random.normal(rngs.data(), (2, 4, 4))


def gru(rngs: nnx.Rngs) -> tuple[nnx.Module, jax.Array]:
    """Two layers of 128 over 49 frames of 40 features, as in keyword spotting."""
    return Recurrent(nnx.GRUCell, 40, 128, 2, 12, rngs=rngs), jax.random.normal(rngs.data(), (2, 49, 40))


small, full = small_lstm, lstm
