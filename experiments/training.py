"""One training loop for everything: float models, fake-quantized models, and the exact integer forward.

A quantized model is an ordinary `nnx.Module`, so nothing here asks which of them it got, except that the scales of
quantizers may have a learning rate of their own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import qjax

Forward = Callable[[Any, jax.Array], jax.Array]
"""(model, images) -> class scores."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Adam with a cosine decay to zero.

    scale_rate: the learning rate of quantizers' scales, as a part of the others'. They are learned as logarithms: a
      step of 0.001 moves a scale by 0.07%.
    """

    epochs: int
    learning_rate: float = 3e-3
    batch_size: int = 64
    scale_rate: float = 1.0

    def optimizer(self, model: nnx.Module, examples: int) -> nnx.Optimizer:
        """An optimizer for all `nnx.Param` of the model, those of quantizers included."""
        return nnx.Optimizer(model, _adam(self, self.epochs * (examples // self.batch_size)), wrt=nnx.Param)


@functools.lru_cache  # one object per schedule: jit compares optimizers by identity
def _adam(schedule: Schedule, steps: int) -> optax.GradientTransformation:
    def adam(rate: float) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(rate, steps))

    if schedule.scale_rate == 1:
        return adam(schedule.learning_rate)

    def kinds(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "scales" if "quantizers" in str(path[0]) else "weights", params)

    rates = {"weights": schedule.learning_rate, "scales": schedule.learning_rate * schedule.scale_rate}
    return optax.multi_transform({kind: adam(rate) for kind, rate in rates.items()}, kinds)


def own_forward(model: Any, images: jax.Array) -> jax.Array:
    """The model's own call."""
    return model(images)


@functools.lru_cache(maxsize=32)  # compiled once for all models of one structure, whatever their numbers
def _step_of(forward: Forward, graphdef: Any) -> Callable[..., Any]:
    """The jitted step: (state, images, targets) -> state, loss, class scores.

    One call per step: inside a `lax.scan` over an epoch, XLA's CPU runs convolutions 10 to 20 times slower.
    """

    @jax.jit
    def step(state: Any, images: jax.Array, targets: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)

        def loss_of(model: Any) -> tuple[jax.Array, jax.Array]:
            class_scores = forward(model, images)
            return jnp.mean(optax.softmax_cross_entropy(class_scores, targets)), class_scores

        (loss, class_scores), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss, class_scores

    return step


@dataclasses.dataclass
class History:
    """One number per epoch."""

    loss: list[float] = dataclasses.field(default_factory=list)
    test_accuracy: list[float] = dataclasses.field(default_factory=list)


def train(
    model: Any,
    images: Any,
    targets: Any,
    schedule: Schedule,
    *,
    seed: int,
    forward: Forward = own_forward,
    test: tuple[Any, Any] | None = None,
    title: str = "training",
    on_step: Callable[[Any, Any, jax.Array], None] | None = None,
) -> History:
    """Train in place and leave the model in evaluation mode. The last epoch's weights are kept: nothing is selected.

    Args:
      targets: float32 [n, classes]: the probabilities to learn, one-hot or a teacher's.
      test: images and labels whose accuracy the history records; it decides nothing.
      on_step: called after every step with the model as it was before the step, its batch and its class scores.
    """
    rng = np.random.default_rng(seed)
    images, targets = np.asarray(images), np.asarray(targets)
    optimizer = schedule.optimizer(model, len(images))
    steps, history = len(images) // schedule.batch_size, History()
    for _ in qjax.calibration.track(range(schedule.epochs), title):
        model.train()
        graphdef, state = nnx.split((model, optimizer))
        step = _step_of(forward, graphdef)
        losses: list[Any] = []
        for rows in rng.permutation(len(images))[: steps * schedule.batch_size].reshape(steps, -1):
            before = state
            state, loss, class_scores = step(state, images[rows], targets[rows])
            losses.append(loss)
            if on_step is not None:
                on_step(nnx.merge(graphdef, before)[0], images[rows], class_scores)
        nnx.update((model, optimizer), state)
        model.eval()
        history.loss.append(float(np.mean(losses)))
        if test is not None:
            history.test_accuracy.append(accuracy(scores(model, test[0]), test[1]))
    return history


def one_hot(labels: Any, classes: int = 10) -> np.ndarray:
    """float32 [n, classes]."""
    return np.eye(classes, dtype=np.float32)[np.asarray(labels)]


@nnx.jit(static_argnames="forward")
def scores(model: Any, images: Any, forward: Forward = own_forward) -> jax.Array:
    """Class scores of the model in the mode that it is in."""
    return forward(model, images)


def accuracy(class_scores: Any, labels: Any) -> float:
    """The share of examples whose highest score is the label's."""
    return float(np.mean(np.argmax(np.asarray(class_scores), -1) == np.asarray(labels)))


def parameter_bytes(model: nnx.Module) -> int:
    """Bytes of the float32 model: parameters and the running statistics of batch norm."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    return sum(int(np.size(leaf)) * leaf.dtype.itemsize for leaf in leaves)
