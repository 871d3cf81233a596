"""Trained networks whose weights are rounded to few bits in several ways, without any training on labels."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.methods import Setting, Start, calibrated
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import scores
from experiments.lab.network_drift import FOLDER
from experiments.lab.rounding_theory import Expected, Inputs, Rounded, decibels, expected, inputs_of, rounded
from qjax.contrib.lab.study import Settings

BITS = (4, 3, 2)
WAYS = ("nearest", "bias correction", "AdaRound", "AdaRound, bias correction")
SEQUENCE = "post_training"
SEQUENCES = {"ResNet": (3,), "depthwise CNN": (3,), "GRU": BITS, "CNN on digits": (3,)}
"""Network -> bits at which the sequence of `qjax.post_training` runs too: minutes for each on convolutions."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """networks: of `TASKS`. steps: of AdaRound, each layer. looked: images on which the theory looks at scores."""

    networks: tuple[str, ...]
    steps: int
    looked: int


def plan(settings: Settings) -> Plan:
    if settings.full:
        return Plan(("ResNet", "depthwise CNN", "GRU"), 1000, 512)
    return Plan(("CNN on digits",), 1000, 512)


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A float network. scores: class scores of the test images, float32 [images, classes]. rate: of its training."""

    model: Any
    data: Data
    scores: np.ndarray
    rate: float


@functools.lru_cache(maxsize=4)
def network(name: str, settings: Settings) -> Network:
    task = TASKS[name]
    data = DATA[task.data]()
    model = float_model(name, task, data, settings.seed, FOLDER)
    return Network(model, data, scores(model, data.test_images), task.rate)


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """A calibrated network with weights of few bits, rounded to nearest.

    few: names of those weights that rounding can be learned for. left: of those that it cannot, and why.
    """

    qmodel: Any
    start: Start
    few: tuple[str, ...]
    left: Mapping[str, str]


@functools.lru_cache(maxsize=16)
def ready(name: str, bits: int, settings: Settings) -> Ready:
    known = network(name, settings)
    start = Start(known.model, known.data, Setting(bits, 8), 0, settings.seed, known.rate)
    qmodel = calibrated(start)
    few = {key for key, q in qmodel.qparams().items() if q.spec.bits == bits}
    weights = qjax.training.weights_of(qmodel, start.batches()[0])
    left = {key: why for key, why in weights.left if key in few}
    return Ready(qmodel, start, tuple(key for key in weights.names if key in few), left)


@functools.lru_cache(maxsize=4)
def _inputs(name: str, settings: Settings) -> Mapping[str, Inputs]:
    """They do not depend on the bits."""
    one = ready(name, BITS[0], settings)
    return inputs_of(one.qmodel, one.start.batches(), one.few)


def products(name: str, bits: int, settings: Settings) -> dict[str, Rounded]:
    """Every product with few bits by itself, in the order of execution."""
    one = ready(name, bits, settings)
    codes, grids = qjax.training.codes_of(one.qmodel, one.few), one.qmodel.qparams()
    found: dict[str, Rounded] = {}
    for key, layer in _inputs(name, settings).items():
        own, spec = np.asarray(codes[key]), grids[key].spec
        scale = np.broadcast_to(np.asarray(grids[key].scale, np.float64), own.shape)
        columns = layer.matrix.columns
        found[key] = rounded(layer, columns(own), columns(scale), spec.qmin, spec.qmax)
    return found


@functools.lru_cache(maxsize=16)
def theory(name: str, bits: int, settings: Settings) -> Expected:
    """What single products predict of the whole network, from images that calibrate."""
    known = network(name, settings)
    images = known.data.train_images[: plan(settings).looked]
    return expected(known.model, images, _inputs(name, settings), products(name, bits, settings))


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """Of an integer graph on the test images: chosen classes int [n]; where they are right bool [n]; dB against float.

    unequal: images for which graph and model choose different classes.
    """

    classes: np.ndarray
    right: np.ndarray
    sqnr: float
    unequal: int

    @property
    def points(self) -> float:
        """Accuracy in percent."""
        return 100 * float(np.mean(self.right))


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """One network with one number of bits. layers: what AdaRound says of each product."""

    ways: Mapping[str, Way]
    layers: Sequence[qjax.training.RoundedLayer]


@functools.lru_cache(maxsize=16)
def outcome(name: str, bits: int, settings: Settings) -> Outcome:
    """Every way from the same calibrated network, with the same images."""
    one, known = ready(name, bits, settings), network(name, settings)
    batches, images = one.start.batches(), known.data.test_images
    models = {way: nnx.clone(one.qmodel) for way in WAYS}
    qjax.training.correct_bias(models["bias correction"], batches, progress=False)
    learned = qjax.training.adaround(models["AdaRound"], batches, steps=plan(settings).steps, progress=False)
    nnx.update(models["AdaRound, bias correction"], nnx.state(models["AdaRound"]))
    qjax.training.correct_bias(models["AdaRound, bias correction"], batches, reference=one.qmodel, progress=False)
    graphdef, _ = nnx.split(one.qmodel)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    ways: dict[str, Way] = {}
    for way, model in models.items():
        state = nnx.state(model)
        given = [np.asarray(run(state, images[i : i + 500])) for i in range(0, len(images), 500)]
        ways[way] = _judged(model, np.concatenate(given), known)
    if bits in SEQUENCES[name]:
        assert one.start.setting is not None
        model = qjax.post_training(known.model, one.start.setting.recipe(), batches, progress=False)
        ways[SEQUENCE] = _judged(model, scores(model, images), known)
    jax.clear_caches()  # a process can map only so many compiled kernels (Linux: vm.max_map_count)
    return Outcome(ways, learned.layers)


def _judged(model: Any, given: np.ndarray, known: Network) -> Way:
    """given: the model's class scores of the test images."""
    data = known.data
    graph = qjax.convert(model, data.test_images[:4])
    parts = [np.asarray(graph(data.test_images[i : i + 500])) for i in range(0, len(given), 500)]
    shipped = np.concatenate(parts)
    classes = shipped.argmax(-1)
    reals = known.scores.astype(np.float64)
    sqnr = decibels(float(np.sum(reals**2) / np.sum((reals - shipped) ** 2)))
    return Way(classes, classes == data.test_labels, sqnr, int((classes != given.argmax(-1)).sum()))


def paired(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Points by which `one` is right more often, and McNemar's standard error; both bool [n], of the same examples."""
    gained, lost = int(np.sum(one & ~other)), int(np.sum(other & ~one))
    n = len(one)
    return 100 * (gained - lost) / n, 100 * max(gained + lost - (gained - lost) ** 2 / n, 0.0) ** 0.5 / n
