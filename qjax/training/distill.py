"""Distillation: quantization-aware training without labels, with the float model's outputs as targets.

Sources: Hinton, Vinyals and Dean 2015 (arXiv 1503.02531), and Mishra and Marr 2017 (arXiv 1711.05852) for quantized
students. On request intermediate tensors are targets too (Romero et al. 2014, arXiv 1412.6550). Student and teacher
have the same architecture, so every tensor of one has a counterpart in the other.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.ops import Quantized
from qjax.support.batches import Batches, Inputs
from qjax.support.progress import track
from qjax.support.tables import table
from qjax.tracing import Place
from qjax.training.adam import LEARNING_RATE
from qjax.training.adam import optimizer as recipe

Measure = Literal["noise", "classes"]
"""How outputs are compared, see `Distillation.start`."""

STEPS = 500
"""The default number of epochs is at least so many steps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distillation:
    """The float model as a teacher: a pytree that is passed to a training step with the quantized model.

        distillation = qjax.training.Distillation.start(qmodel, sample, tensors=["blocks/.*"])
        optimizer = distillation.optimizer(qmodel, steps=1000)

        @nnx.jit
        def step(qmodel, optimizer, distillation, x):
            loss, gradients = nnx.value_and_grad(distillation.loss)(qmodel, x)
            optimizer.update(qmodel, gradients)
            return loss

    Args:
      state: the teacher's numbers.
      graphdef: the teacher's structure. `start` makes both.
      tensors: labels of the intermediate tensors that are compared.
      measure: how outputs are compared.
      share: weight of the tensors' mean relative to the outputs.
    """

    state: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    tensors: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    measure: Measure = dataclasses.field(metadata={"static": True})
    share: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def start(
        cls,
        qmodel: QuantizedModel,
        sample: Any,
        *,
        inputs: Inputs | None = None,
        teacher: nnx.Module | None = None,
        tensors: Collection[str] = (),
        measure: Measure = "noise",
        share: float = 1.0,
    ) -> "Distillation":
        """Record the float model as it is now.

        Args:
          qmodel: the quantized model. sample: one batch, as for `quantize`. inputs: picks the call's arguments from it.
          teacher: a float model of the same class and shapes, such as the one that was passed to `quantize`. None: the
            parameters that `qmodel` has now, which calibration does not change (GPTQ and AdaRound do).
          tensors: intermediate tensors to compare: regular expressions that match their labels in full. The labels are
            those of `qmodel.summary()`.
          measure: "noise": `sum (y - t)^2 / sum t^2`, which suits any output. "classes": the cross entropy of the two
            distributions from a softmax over the last axis, minus the teacher's own entropy.
          share: the weight of the mean noise of the tensors, relative to 1 for the outputs.

        Raises:
          ValueError: an expression matches no tensor, or the teacher has another structure.
        """
        check_quantized(qmodel, "distill")
        if measure not in get_args(Measure):
            raise ValueError(
                f"distill: measure: expected one of {', '.join(map(repr, get_args(Measure)))}, got {measure!r}."
            )
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"distill: share: expected a number of 0 or more, got {share!r}.")
        own = nnx.clone(qmodel)
        if teacher is not None:
            _take(own, teacher)
        own.eval()
        args = next(iter(Batches([sample], inputs, "distill")))[1]
        graphdef, state = nnx.split(own)
        return cls(state, graphdef, _match_labels(own.trace(*args).places, tensors), measure, share)

    def teach(self, *args: Any, **kwargs: Any) -> tuple[Any, Mapping[str, jax.Array]]:
        """The float model's output for a call, and its intermediate tensors by label. No gradient flows back."""
        teacher: QuantizedModel = nnx.merge(self.graphdef, self.state)
        found = teacher.trace(*args, **kwargs).evaluate(quantize=None, record=self._record)
        return jax.lax.stop_gradient((found.output, found.recorded))

    def loss(self, qmodel: QuantizedModel, *args: Any, **kwargs: Any) -> jax.Array:
        """The distance of the quantized model's call from the teacher's: a float32 number of 0 or more.

        The loss works in `jit` and `grad`. In training mode the model's own state is updated, as in any call.
        """
        wanted, tensors = self.teach(*args, **kwargs)
        call = qmodel.trace(*args, **kwargs)
        found = call.evaluate(record=self._record)
        call.write(found)
        compare = _noise if self.measure == "noise" else _classes
        pairs = list(zip(jax.tree.leaves(found.output), jax.tree.leaves(wanted), strict=True))
        losses = [compare(y, t) for y, t in pairs if jnp.issubdtype(jnp.result_type(t), jnp.floating)]
        total = functools.reduce(jnp.add, losses) / np.float32(len(losses))
        if self.tensors:
            noises = [_noise(found.recorded[label], tensors[label]) for label in self.tensors]
            total = total + np.float32(self.share / len(noises)) * functools.reduce(jnp.add, noises)
        return total

    def optimizer(
        self, qmodel: QuantizedModel, steps: int, learning_rate: float = LEARNING_RATE
    ) -> nnx.Optimizer[QuantizedModel]:
        """The optimizer of the default recipe, for `steps` steps, see `qjax.training.optimizer`."""
        return nnx.Optimizer(qmodel, recipe(qmodel, steps, learning_rate=learning_rate), wrt=nnx.Param)

    def _record(self, place: Place, x: jax.Array, quantized: Quantized | None) -> jax.Array | None:
        if place.label not in self.tensors:
            return None
        return x if quantized is None else quantized.real32()


@dataclasses.dataclass(frozen=True)
class Distilled:
    """The result of `distill`; `str()` is a table.

    Attributes:
      losses: the mean of each epoch.
      before, after: the loss on the held-out batches.
      kept: whether the loss there fell; otherwise the model has its earlier numbers.
      steps: of the optimizer.
      held_out: how many batches were held out; with 0, all were used both for training and for the comparison.
      seconds: how long it took.
    """

    losses: tuple[float, ...]
    before: float
    after: float
    kept: bool
    steps: int
    held_out: int
    seconds: float

    def __str__(self) -> str:
        shown = sorted({0, len(self.losses) // 2, len(self.losses) - 1})
        rows = [[str(index + 1), f"{self.losses[index]:.4g}"] for index in shown]
        where = f"{self.held_out} held-out batches" if self.held_out else "the batches it was trained on"
        verdict = "kept" if self.kept else "undone: the model is as it was before"
        last = f"loss on {where}: {self.before:.4g} before, {self.after:.4g} after {self.steps} steps; {verdict}"
        return "\n".join([table(["epoch", "loss"], rows), last])


def distill(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    teacher: nnx.Module | None = None,
    tensors: Collection[str] = (),
    measure: Measure = "noise",
    share: float = 1.0,
    epochs: int | None = None,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    progress: bool | None = None,
) -> Distilled:
    """Train a quantized model to reproduce the outputs of the float model; no labels are needed.

    Weights, biases and learned scales are trained; batch norm always uses its running statistics. A quarter of the
    batches is held out. If the loss on them does not fall, the model gets its earlier numbers back. Afterwards the
    model is in evaluation mode.

    Args:
      qmodel: the calibrated model; it is changed in place.
      batches: a list of arrays or of tuples of the call's arguments, all of one size; with `inputs`, a list of
        anything. They stay in memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      teacher, tensors, measure, share: see `Distillation.start`.
      epochs: passes over the batches; None: as many as make 500 steps, at least 5.
      learning_rate: see `qjax.training.optimizer`.
      seed: of the order of the batches.
      progress: whether to show progress on stderr; None shows it on a terminal only.

    Raises:
      ValueError: there is no batch, or numbers or the loss are not finite.

    Examples:
      ```python
      print(qjax.training.distill(qmodel, batches, teacher=model, epochs=2))
      ```
    """
    started = time.perf_counter()
    everything = [args for _, args in Batches(batches, inputs, "distill")]
    if not everything:
        raise ValueError("distill: expected at least one batch, got none.")
    held = everything[len(everything) - len(everything) // 4 :]
    fit = everything[: len(everything) - len(held)]
    distillation = Distillation.start(
        qmodel, everything[0], teacher=teacher, tensors=tensors, measure=measure, share=share
    )
    qmodel.eval()
    epochs = max(5, math.ceil(STEPS / len(fit))) if epochs is None else epochs
    if epochs < 1:
        raise ValueError(f"distill: epochs: expected at least 1, got {epochs}.")
    optimizer = distillation.optimizer(qmodel, epochs * len(fit), learning_rate)

    @nnx.jit
    def step(qmodel: Any, optimizer: Any, distillation: Distillation, args: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(distillation.loss)(qmodel, *args)
        optimizer.update(qmodel, gradients)
        return loss

    mean_loss = _judge(distillation, held or fit)
    before, first = mean_loss(qmodel), nnx.clone(qmodel)
    order, losses = np.random.default_rng(seed), list[float]()
    for _ in track(range(epochs), "distill: epoch", enabled=progress):
        found = [step(qmodel, optimizer, distillation, fit[index]) for index in order.permutation(len(fit))]
        losses.append(float(np.mean([float(loss) for loss in found])))
        if not math.isfinite(losses[-1]):
            break
    after = mean_loss(qmodel)
    kept = math.isfinite(after) and after < before
    if not kept:
        nnx.update(qmodel, nnx.state(first))
    return Distilled(
        tuple(losses), before, after, kept, len(losses) * len(fit), len(held), time.perf_counter() - started
    )


def _judge(distillation: Distillation, batches: Sequence[Any]) -> Callable[[QuantizedModel], float]:
    @nnx.jit
    def one(qmodel: Any, distillation: Distillation, args: Any) -> jax.Array:
        return distillation.loss(qmodel, *args)

    def mean_loss(qmodel: QuantizedModel) -> float:
        loss = float(np.mean([float(one(qmodel, distillation, args)) for args in batches]))
        if math.isnan(loss):
            raise ValueError("distill: the loss is NaN. Look for NaN or infinity in the batches and the parameters.")
        return loss

    return mean_loss


def _take(own: QuantizedModel, teacher: nnx.Module) -> None:
    """Copy the float model's parameters and statistics into the copy of a quantized model."""
    mine, theirs = (
        {path: jnp.shape(value[...]) for path, value in nnx.to_flat_state(nnx.state(model, _numbers))}
        for model in (own.model, teacher)
    )
    if mine != theirs:
        missing = sorted("/".join(map(str, path)) for path in mine.keys() ^ theirs.keys())
        other = [path for path in mine if path in theirs and mine[path] != theirs[path]]
        what = f"{', '.join(missing[:3])} in one of them only" if missing else ""
        what = what or f"{'/'.join(map(str, other[0]))} of shape {theirs[other[0]]} instead of {mine[other[0]]}"
        raise ValueError(f"distill: expected a teacher with the parameters of the quantized model, got {what}.")
    nnx.update(own.model, nnx.state(teacher, _numbers))


def _numbers(path: Any, value: Any) -> bool:
    del path
    return isinstance(value, (nnx.Param, nnx.BatchStat))


def _match_labels(places: Mapping[str, Place], wanted: Collection[str]) -> tuple[str, ...]:
    """The labels that the expressions match, in the order of execution."""
    if isinstance(wanted, str):
        raise TypeError(f"distill: tensors: expected a list of expressions, got {wanted!r}. Write [{wanted!r}].")
    labels = [label for label, place in places.items() if place.kind == "activation"]
    for expression in wanted:
        if not any(re.fullmatch(expression, label) for label in labels):
            raise ValueError(
                f"distill: tensors: {expression!r} matches none of the tensors {', '.join(map(repr, labels))}. An "
                "expression must match in full: '.*' matches any part."
            )
    return tuple(label for label in labels if any(re.fullmatch(one, label) for one in wanted))


def _noise(y: jax.Array, t: jax.Array) -> jax.Array:
    """`sum (y - t)^2 / sum t^2` in float32; if the teacher is all zeros, the power of y."""
    y, t = y.astype(jnp.float32), t.astype(jnp.float32)
    power = jnp.sum(t * t)
    return jnp.sum((y - t) ** 2) / jnp.where(power > 0, power, np.float32(1))


def _classes(y: jax.Array, t: jax.Array) -> jax.Array:
    """Kullback-Leibler divergence of the student's distribution from the teacher's, mean over all but the last axis."""
    y, t = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (y, t))
    return jnp.mean(jnp.sum(jnp.exp(t) * (t - y), axis=-1))
