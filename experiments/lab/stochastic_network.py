"""Digits under stochastic rounding: at inference, and in the forward pass of training."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.accuracy.digits import recipe_of
from experiments.data import digits
from experiments.models import MLP
from experiments.training import Schedule, accuracy, one_hot, scores, train


class StochasticTraining(nnx.Module):
    """A quantized model that rounds stochastically in training, by a stream of keys, and to nearest in evaluation."""

    def __init__(self, qmodel: qjax.QuantizedModel, rngs: nnx.Rngs) -> None:
        self.qmodel = qmodel
        self.rngs = rngs
        self.deterministic = False

    def __call__(self, x: Any) -> Any:
        if self.deterministic:  # `eval()` says so
            return self.qmodel(x)
        return qjax.training.stochastic_forward(self.qmodel, self.rngs.rounding(), x)


@dataclasses.dataclass(frozen=True)
class Size:
    """seeds: of initial weights and order. draws: keys that inference is judged with. averaged: draws per average."""

    seeds: int
    epochs: int
    draws: int
    averaged: int = 16


@nnx.jit(static_argnames=("weights", "activations"))
def stochastic_scores(
    model: Any, images: Any, keys: jax.Array, weights: bool = True, activations: bool = True
) -> jax.Array:
    """Class scores [keys, n, classes] of a quantized model that rounds stochastically, a draw for each key."""

    def once(key: jax.Array) -> jax.Array:
        return qjax.training.stochastic_forward(model, key, images, weights=weights, activations=activations)

    return jax.lax.map(once, keys)


def run_seed(seed: int, size: Size, *, deploy: bool = False) -> dict[str, float]:
    """Accuracies in percent by the name of the run.

    deploy: also, how many outputs of the graph of the 2-bit network trained stochastically are not the exact forward's.
    """
    data = digits()
    images, labels = data.train_images, one_hot(data.train_labels)

    def judge(class_scores: Any) -> float:
        return 100 * accuracy(class_scores, data.test_labels)

    model = MLP(rngs=nnx.Rngs(seed))
    train(model, images, labels, Schedule(size.epochs), seed=seed, title="float training")
    found = {"float": judge(scores(model, data.test_images))}
    for bits in (4, 3, 2):
        qmodel = qjax.quantize(model, recipe_of(bits), images)
        qmodel.eval()
        found[f"{bits} bits, inference, nearest"] = judge(scores(qmodel, data.test_images))
        keys = jax.random.split(jax.random.key(seed), max(size.draws, size.averaged))
        drawn = np.asarray(stochastic_scores(qmodel, data.test_images, keys))
        found[f"{bits} bits, inference, stochastic"] = float(np.mean([judge(one) for one in drawn[: size.draws]]))
        found[f"{bits} bits, inference, mean of {size.averaged} draws"] = judge(drawn[: size.averaged].mean(0))
        if bits == 3:
            continue
        for rounding in ("nearest", "stochastic"):
            trained = nnx.clone(qmodel)
            wrapped = StochasticTraining(trained, nnx.Rngs(rounding=seed)) if rounding == "stochastic" else trained
            title = f"{bits} bits, {rounding}"
            train(wrapped, images, labels, Schedule(size.epochs), seed=seed + 1000, title=title)
            found[f"{bits} bits, trained, {rounding}"] = judge(scores(trained, data.test_images))
            if deploy and (bits, rounding) == (2, "stochastic"):
                found["outputs that differ"] = _differing(trained, data.test_images)
    return found


def _differing(trained: qjax.QuantizedModel, images: np.ndarray) -> int:
    """How many outputs of the graph are not those of the exact forward."""
    sample = images[:16]
    graph, forward = qjax.convert(trained, sample), qjax.exact(trained, sample)
    return int(np.count_nonzero(np.asarray(graph(images)) != np.asarray(scores(trained, images, forward))))
