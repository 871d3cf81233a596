"""A network of 4 bits that trains under the bound of a narrow accumulator: A2Q and A2Q+."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import qjax
from experiments.accuracy.digits import recipe_of
from experiments.data import Digits
from experiments.lab.accumulators_widths import register
from experiments.models import MLP
from experiments.training import Schedule, accuracy, one_hot, scores, train

FLOAT = Schedule(60)
CONSTRAINED = Schedule(40)
NARROW = (12, 10, 9, 8, 7, 6)
"""Widths of accumulators: from no constraint at all to two units of weight per channel."""

METHODS = ("A2Q", "A2Q+")

CALIBRATED, CALIBRATED_BITS = "A2Q, calibrated scales", 9
"""For comparison: what happens when the scales are not chosen for the bound."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. bits: of the register. worst: the bits that the converted graph needs for its worst input.

    zeros: the share of weights whose code is 0. differing: output codes on the test images that a wrapping register of
    `bits` changes, None where it was not tried. projected: accuracy with the first weights, before training.
    """

    method: str
    bits: int
    seed: int
    accuracy: float
    projected: float
    worst: int
    zeros: float
    differing: int | None


def float_network(data: Digits, seed: int) -> MLP:
    """64-48-48-10 with relu, trained in float32."""
    model = MLP(rngs=nnx.Rngs(seed))
    train(model, data.train_images, one_hot(data.train_labels), FLOAT, seed=seed, title="float training")
    return model


def quantized(model: nnx.Module, bits: int, data: Digits) -> qjax.QuantizedModel:
    """Weights and activations of that many bits, all layers; the class scores leave with 8."""
    qmodel = qjax.quantize(model, recipe_of(bits), data.train_images[:512])
    qmodel.eval()
    return qmodel


def trainer(qmodel: qjax.QuantizedModel, schedule: Schedule, examples: int) -> Callable[..., Any]:
    """A compiled training: (qmodel's state, constraint, rows [steps, batch], images, targets) -> the state afterwards.

    The weights are projected after each step. Adam with a cosine decay, as everywhere here.
    """
    steps = schedule.epochs * (examples // schedule.batch_size)
    graphdef = nnx.graphdef(qmodel)
    transformation = optax.adam(optax.cosine_decay_schedule(schedule.learning_rate, steps))

    @jax.jit
    def run(state: Any, constraint: Any, rows: jax.Array, images: jax.Array, targets: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
        whole, first = nnx.split((model, optimizer))

        def step(state: Any, rows: jax.Array) -> tuple[Any, None]:
            model, optimizer = nnx.merge(whole, state)

            def loss(model: Any) -> jax.Array:
                return jnp.mean(optax.softmax_cross_entropy(model(images[rows]), targets[rows]))

            optimizer.update(model, nnx.grad(loss)(model))
            constraint.project(model)
            return nnx.state((model, optimizer)), None

        last, _ = lax.scan(step, first, rows)
        return nnx.state(nnx.merge(whole, last)[0])

    return run


def schedule_rows(schedule: Schedule, examples: int, seed: int) -> np.ndarray:
    """int32 [steps, batch]: every epoch in an order of its own."""
    rng, steps = np.random.default_rng(seed), examples // schedule.batch_size
    epochs = [rng.permutation(examples)[: steps * schedule.batch_size] for _ in range(schedule.epochs)]
    return np.concatenate(epochs).reshape(-1, schedule.batch_size).astype(np.int32)


def runs(qmodel: qjax.QuantizedModel, teacher: nnx.Module, data: Digits, seeds: range) -> Iterator[Run]:
    """Every width by both methods; "free" (32 bits, where nothing is projected); and `CALIBRATED`.

    All from one quantized network; the scales of weights are chosen for the bound, but for the last kind. Seeds change
    the order of the images. The targets are the float network's probabilities.
    """
    images, targets = jnp.asarray(data.train_images), jax.nn.softmax(scores(teacher, data.train_images))
    run = trainer(qmodel, CONSTRAINED, len(images))
    narrow = [(method, bits) for method in METHODS for bits in NARROW]
    for method, bits in [("free", 32), *narrow, (CALIBRATED, CALIBRATED_BITS)]:
        plus = method not in ("A2Q", CALIBRATED)  # "free" by either is the same, and needs no third compilation
        constraint = qjax.training.constrain_accumulators(qmodel, images[:1], bits, plus=plus)
        start = nnx.clone(qmodel)
        if method in METHODS:
            constraint.initialize(start)
        else:
            constraint.project(start)
        projected = accuracy(scores(start, data.test_images), data.test_labels)
        for seed in seeds:
            trained, rows = nnx.clone(qmodel), schedule_rows(CONSTRAINED, len(images), seed)
            nnx.update(trained, run(nnx.state(start), constraint, rows, images, targets))
            yield _judged(trained, Run(method, bits, seed, 0.0, projected, 0, 0.0, None), data, seed == seeds[0])


def _judged(qmodel: qjax.QuantizedModel, run: Run, data: Digits, execute: bool) -> Run:
    """Convert, ask for the worst case and, if `execute`, let a wrapping register of the run's width compute."""
    graph = qjax.convert(qmodel, data.test_images[:1])
    found = accuracy(scores(qmodel, data.test_images), data.test_labels)
    weights = [np.asarray(qjax.numerics.quantize(w, p)) for w, p in _weights(qmodel)]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.size for w in weights)
    differing = None
    if execute and run.bits < 32:
        codes = graph.quantize(data.test_images)
        narrow = graph.retarget(register(run.bits, "wrap")).run(codes)
        differing = int((np.asarray(narrow) != np.asarray(graph.run(codes))).sum())
    worst = qjax.accumulators(graph).bits
    return dataclasses.replace(run, accuracy=found, worst=worst, zeros=zeros, differing=differing)


def _weights(qmodel: qjax.QuantizedModel) -> Iterator[tuple[jax.Array, qjax.QParams]]:
    model, qparams = qmodel.model, qmodel.qparams()
    for name, layer in (*((f"layers/{i}", layer) for i, layer in enumerate(model.layers)), ("head", model.head)):  # pyright: ignore[reportAttributeAccessIssue]
        yield layer.kernel[...], qparams[f"{name}/kernel"]
