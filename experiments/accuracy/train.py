"""One training loop for float models, quantized models and peers' models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BATCH = 128

Loss = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]
"""(model, extra, images, labels) -> a number."""
After = Callable[[Any, Any, jax.Array], Any]
"""(model, extra, progress from 0 to 1) -> extra; may change the model."""


def cross_entropy(model: Any, extra: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Of the labels."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(images), labels))


def steps_of(images: Any, epochs: int, batch: int = BATCH) -> int:
    """Steps of the optimizer; the last incomplete batch of an epoch is left out."""
    return epochs * (len(images) // batch)


def fit(
    model: Any,
    images: np.ndarray,
    labels: np.ndarray,
    optimizer: optax.GradientTransformation,
    *,
    epochs: int,
    seed: int,
    loss: Loss = cross_entropy,
    extra: Any = None,
    after: After | None = None,
    frozen_norms: bool = False,
    batch: int = BATCH,
) -> tuple[list[float], Any]:
    """Train in place and leave the model in evaluation mode; returns the mean loss of each epoch, and the last `extra`.

    extra: a pytree that goes through every step, such as a teacher. after: called behind the optimizer in every step.
    frozen_norms: the whole training runs in evaluation mode, with the running statistics of batch norm.
    """
    rng = np.random.default_rng(seed)
    if frozen_norms:
        model.eval()
    else:
        model.train()
    both = (model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))
    graphdef, state = nnx.split(both)
    state = jax.tree.map(jnp.copy, state)  # steps donate it, and other models share its arrays
    extra = jax.tree.map(jnp.copy, extra)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, extra: Any, images: jax.Array, labels: jax.Array, progress: jax.Array) -> Any:
        model, opt = nnx.merge(graphdef, state)
        value, gradients = nnx.value_and_grad(lambda m: loss(m, extra, images, labels))(model)
        opt.update(model, gradients)
        extra = extra if after is None else after(model, extra, progress)
        return nnx.state((model, opt)), extra, value

    history: list[float] = []
    total, done = steps_of(images, epochs, batch), 0
    for _ in range(epochs):
        losses: list[jax.Array] = []
        rows = rng.permutation(len(images))[: len(images) // batch * batch].reshape(-1, batch)
        for chosen in rows:
            progress = np.float32(done / total)
            state, extra, value = step(state, extra, images[chosen], labels[chosen], progress)
            losses.append(value)
            done += 1
        history.append(float(np.mean(jax.device_get(losses))))
    nnx.update(both, state)
    model.eval()
    return history, extra


def scores(model: Any, images: np.ndarray, batch: int = 500) -> np.ndarray:
    """Class scores of a model, in the mode that it is in."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return np.concatenate([np.asarray(run(state, images[i : i + batch])) for i in range(0, len(images), batch)])


def accuracy(class_scores: np.ndarray, labels: np.ndarray) -> float:
    """In percent."""
    return 100 * float(np.mean(class_scores.argmax(-1) == labels))
