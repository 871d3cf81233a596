"""Codes and decisions of real networks under a trainer's arithmetic, and trainings in bfloat16."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.methods import SETTINGS, Start, calibrated
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy, fit, scores
from experiments.lab.machine_forward import scores_on
from experiments.lab.machines import BFLOAT16, FLOAT32, TF32
from experiments.lab.network_drift import FOLDER

EMULATED = (FLOAT32, TF32, BFLOAT16)
CLASSIC, INTEGER = "classic", "integer-valued"
DTYPES = ("float32", "bfloat16 activations", "bfloat16 throughout")
BATCH = 500
"""Images at once."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """evaluated: networks of `TASKS`. images: the first of the test images, which are compared.

    trained: the network that is trained. examples: the first of the training images. epochs, seeds: of each training.
    """

    evaluated: tuple[str, ...]
    images: int
    trained: str
    examples: int
    epochs: int
    seeds: int


@dataclasses.dataclass(frozen=True)
class Compared:
    """A forward beside the integer graph. codes: share of outputs that differ. decisions: images of another class.

    points: accuracy in percent, less the graph's.
    """

    codes: float
    decisions: int
    points: float


def compared(given: np.ndarray, shipped: np.ndarray, labels: np.ndarray) -> Compared:
    """Class scores [n, classes] of a forward and of the graph; the graph's are rounded to the forward's dtype."""
    own = shipped.astype(given.dtype)
    return Compared(
        float(np.mean(given != own)),
        int(np.sum(given.argmax(-1) != own.argmax(-1))),
        accuracy(given, labels) - accuracy(own, labels),
    )


@functools.lru_cache(maxsize=4)
def network(name: str, seed: int) -> tuple[Any, Data]:
    """The float network and its data."""
    task = TASKS[name]
    data = DATA[task.data]()
    return float_model(name, task, data, seed, FOLDER), data


def shipped(model: Any, data: Data, images: int) -> np.ndarray:
    """Class scores [n, classes] of the integer graph."""
    graph = qjax.convert(model, data.test_images[:4])
    return np.concatenate([np.asarray(graph(data.test_images[i : i + BATCH])) for i in range(0, images, BATCH)])


@dataclasses.dataclass(frozen=True)
class Forwards:
    """Of one calibrated network, W8A8. ways: (way, name of a machine) -> beside the graph. own: the model's own call.

    parted: output codes in which the integer-valued way differs between machines. exact: those of `qjax.exact` that
    differ from the graph's, of the first 500 images. graph: accuracy in percent.
    """

    ways: Mapping[tuple[str, str], Compared]
    own: Compared
    parted: int
    exact: int
    graph: float


@functools.lru_cache(maxsize=4)
def forwards(plan: Plan, name: str, seed: int) -> Forwards:
    model, data = network(name, seed)
    images, labels = data.test_images[: plan.images], data.test_labels[: plan.images]
    qmodel = calibrated(Start(model, data, SETTINGS["W8A8"], 1, seed, TASKS[name].rate))
    integers = shipped(qmodel, data, plan.images)
    given = {
        (way, machine.name): scores_on(qmodel, images, machine, way == CLASSIC, BATCH)
        for way in (CLASSIC, INTEGER)
        for machine in EMULATED
    }
    first = given[INTEGER, FLOAT32.name]
    return Forwards(
        {key: compared(one, integers, labels) for key, one in given.items()},
        compared(scores(qmodel, images), integers, labels),
        sum(int(np.sum(given[INTEGER, machine.name] != first)) for machine in EMULATED[1:]),
        _unequal(qmodel, images[:BATCH], integers[:BATCH]),
        accuracy(integers, labels),
    )


def _unequal(qmodel: Any, images: np.ndarray, integers: np.ndarray) -> int:
    """Output codes of `qjax.exact` that are not the graph's."""
    return int(np.sum(np.asarray(nnx.jit(qjax.exact(qmodel, images[:4]))(qmodel, images)) != integers))


def in_dtype(model: Any, dtype: str) -> Any:
    """A copy whose layers compute in bfloat16; "bfloat16 throughout" also keeps its parameters so."""
    mine = nnx.clone(model)
    if dtype == DTYPES[0]:
        return mine
    for _, part in nnx.iter_graph(mine):
        layer: Any = part
        if isinstance(part, nnx.Module) and hasattr(part, "dtype"):
            layer.dtype = jnp.bfloat16
    if dtype == DTYPES[2]:
        nnx.update(mine, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(mine, nnx.Param)))
    return mine


@dataclasses.dataclass(frozen=True)
class Trained:
    """Of one dtype, one of each for a seed. points: of the integer graph, in percent. own: the model's call beside it.

    exact: output codes of `qjax.exact` that are not the graph's, of 500 images each.
    """

    points: list[float]
    own: list[Compared]
    exact: int


@functools.lru_cache(maxsize=2)
def trainings(plan: Plan, seed: int) -> Mapping[str, Trained]:
    """dtype -> its trainings at W4A4: same float weights, batches, optimizer and epochs."""
    model, data = network(plan.trained, seed)
    images, labels = data.train_images[: plan.examples], data.train_labels[: plan.examples]
    found: dict[str, Trained] = {}
    for dtype in DTYPES:
        start = Start(in_dtype(model, dtype), data, SETTINGS["W4A4"], plan.epochs, seed, TASKS[plan.trained].rate)
        ready = calibrated(start, other_bits=8)
        points: list[float] = []
        own: list[Compared] = []
        exact = 0
        for number in range(plan.seeds):
            mine = nnx.clone(ready)
            optimizer = qjax.training.optimizer(mine, plan.epochs * (len(images) // 128))
            fit(mine, images, labels, optimizer, epochs=plan.epochs, seed=seed + number)
            integers = shipped(mine, data, len(data.test_images))
            points.append(accuracy(integers, data.test_labels))
            own.append(compared(scores(mine, data.test_images), integers, data.test_labels))
            exact += _unequal(mine, data.test_images[:BATCH], integers[:BATCH])
        found[dtype] = Trained(points, own, exact)
    return found


def differences(found: Mapping[str, Trained], dtype: str) -> np.ndarray:
    """Points that a dtype gains on float32, one for each seed."""
    return np.array(found[dtype].points) - np.array(found[DTYPES[0]].points)
