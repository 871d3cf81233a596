"""Two tasks of a size that people put into one FPGA as a circuit, and the float network that both tools start from."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
from flax import nnx

from experiments.accuracy.data import DATA
from experiments.accuracy.train import fit, steps_of

HIDDEN, CLASSES = (32, 32), 10
"""The sizes of the network for jets that HGQ's paper and others use are 64, 32 and 32."""


class Network(nnx.Module):
    """Three dense layers."""

    def __init__(self, inputs: int, rngs: nnx.Rngs) -> None:
        sizes = (inputs, *HIDDEN, CLASSES)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows of numbers with labels.

    data: its name. pooled: the side of the squares of pixels whose mean is one input. batch, rate: of the training.
    float_epochs: of the float network. epochs: of the search for bits. prices: of one bit operation, first and last.
    budgets: lookup tables for which the page states an accuracy.
    """

    data: str
    pooled: int
    batch: int
    rate: float
    float_epochs: int
    epochs: int
    prices: tuple[float, float]
    budgets: tuple[int, ...]


TASKS = {
    "digits": Task("digits", 1, 32, 3e-3, 60, 200, (1e-7, 3e-4), (20_000, 15_000, 10_000, 7_500, 5_000)),
    "Fashion-MNIST": Task("fashion", 2, 128, 3e-3, 20, 40, (1e-8, 1e-4), (40_000, 30_000, 20_000, 10_000, 5_000)),
}
"""Name -> task. Fashion-MNIST has 14x14 pixels here."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Inputs float32 [n, size], labels int32 [n]; chosen by the validation rows, judged by the test rows."""

    train: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


@functools.lru_cache(maxsize=1)
def split(task: Task) -> Split:
    """The data of a task."""
    data = DATA[task.data]()
    held = data.validation()

    def rows(images: np.ndarray) -> np.ndarray:
        n, side, p = len(images), images.shape[1] // task.pooled, task.pooled
        return images.reshape(n, side, p, side, p).mean((2, 4), dtype=np.float64).reshape(n, -1).astype(np.float32)

    return Split(
        (rows(held.train_images), held.train_labels),
        (rows(held.test_images), held.test_labels),
        (rows(data.test_images), data.test_labels),
    )


def float_network(task: Task, seed: int) -> Network:
    """Trained in float."""
    x, y = split(task).train
    model = Network(x.shape[1], nnx.Rngs(seed))
    steps = steps_of(x, task.float_epochs, task.batch)
    optimizer = optax.adam(optax.cosine_decay_schedule(task.rate, steps))
    fit(model, x, y, optimizer, epochs=task.float_epochs, seed=seed, batch=task.batch)
    return model


def price_at(task: Task, epoch: int) -> float:
    """The price of a bit operation in an epoch; its logarithm grows evenly."""
    first, last = np.log(task.prices)
    return float(np.exp(first + (last - first) * epoch / max(1, task.epochs - 1)))


def percent(scores: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy."""
    return 100 * float(np.mean(np.asarray(scores).argmax(-1) == labels))
