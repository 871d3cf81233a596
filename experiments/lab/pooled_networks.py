"""Additions, pools and means of trained networks: exact results in integers, and what each target makes of them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.networks import TASKS, Task
from experiments.accuracy.train import scores
from experiments.lab.exact_ties import exact, independent, kind_of, settled, tied, uniform
from experiments.lab.network_drift import FOLDER
from experiments.lab.pooling_cases import ties_of
from experiments.models.small import ResidualBlock, ResNet
from qjax.contrib.lab.study import Settings
from qjax.run.stepwise import Runner

RULES = {"additions": "add", "pools": "pool"}
"""Those whose ties have a known rule in each target."""
WAYS = ("even", "up", "away", "away from code 0")
POWERS = ", powers of two"
SMALL = 12_000
"""Training images of the pooled network, ten times each."""
CHUNK = 500


class PooledResNet(nnx.Module):
    """The ResNet with half the channels; averages over 2x2 in place of strides."""

    def __init__(self, width: int = 8, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        widths = (width, 2 * width, 4 * width)
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List(
            ResidualBlock(i, o, rngs=rngs) for i, o in zip((width, *widths[:-1]), widths, strict=True)
        )
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for index, block in enumerate(self.blocks):
            x = block(nnx.avg_pool(x, (2, 2), (2, 2)) if index else x)
        return self.head(x.mean((1, 2)))


def names(settings: Settings) -> tuple[str, ...]:
    if settings.full:
        return ("ResNet", f"ResNet{POWERS}", "pooled ResNet")
    return ("ResNet on digits", f"ResNet on digits{POWERS}")


def looked(settings: Settings) -> int:
    """Test images on which ties are counted."""
    return 1000 if settings.full else 500


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A calibrated network whose pools keep their input's grid, as TFLite has it, in arithmetic that rounds half-even.

    classes, float_classes: int [n], of the test images.
    """

    graph: qjax.IntegerGraph
    data: Data
    classes: np.ndarray
    float_classes: np.ndarray

    @property
    def moved(self) -> int:
        """Images whose class quantization changes."""
        return int((self.classes != self.float_classes).sum())


def _float(name: str, seed: int) -> tuple[Any, Data]:
    if name == "pooled ResNet":
        data = DATA["fashion"]()
        few = dataclasses.replace(data, train_images=data.train_images[:SMALL], train_labels=data.train_labels[:SMALL])
        return float_model(name, Task(PooledResNet, "fashion"), few, seed, FOLDER), data
    task = Task(ResNet, "digits") if name == "ResNet on digits" else TASKS[name]
    data = DATA[task.data]()
    return float_model(name, task, data, seed, FOLDER), data


@functools.lru_cache(maxsize=4)
def prepared(name: str, settings: Settings) -> Prepared:
    model, data = _float(name.removesuffix(POWERS), settings.seed)
    recipe = qjax.Recipe("tflite_micro")
    if name.endswith(POWERS):
        activations = qjax.QSpec(bits=8, symmetric=True)
        recipe = qjax.Recipe("tflite_micro", activations=activations, method="tqt", weight_method="tqt")
    images = data.train_images[:1024]
    batches = [images[i : i + 128] for i in range(0, len(images), 128)]
    qmodel = qjax.quantize(model, recipe, batches[0])
    qjax.calibrate(qmodel, batches, progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, batches[0][:4]).retarget("nearest_even")
    given = [np.asarray(graph(data.test_images[i : i + CHUNK])) for i in range(0, len(data.test_images), CHUNK)]
    return Prepared(graph, data, np.concatenate(given).argmax(-1), scores(model, data.test_images).argmax(-1))


@dataclasses.dataclass
class Tally:
    """A node on the images looked at. alike, expected: ties after `uniform` and `independent`.
    reach: of an addition, the greater factor times the sum of both operands' absolute values, in steps of the output.

    rules: way with ties -> [sum of differences from half-even in steps, codes that differ]. targets: the same of each
    target, and the codes that are not those of its rule.
    """

    kind: str
    count: int = 0
    ties: int = 0
    alike: float = 0.0
    expected: float = 0.0
    reach: float = 0.0
    rules: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    targets: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def runner(graph: qjax.IntegerGraph) -> Runner:
    return Runner(graph.ir, graph.target, graph.interpreter.constants)


def runs(known: Prepared, images: int) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """The codes of all tensors, chunk by chunk."""
    own = runner(known.graph)
    for start in range(0, images, CHUNK):
        part = slice(start, min(start + CHUNK, images))
        env = {own.ir.inputs[0]: np.asarray(known.graph.quantize(known.data.test_images[part]))}
        for node in own.ir.nodes:
            env[node.output] = np.asarray(own.output(node, [env[key] for key in node.inputs]))
        yield part, env


@functools.lru_cache(maxsize=4)
def counted(name: str, settings: Settings, targets: tuple[str, ...] = ()) -> Mapping[str, Tally]:
    """Node -> what was counted, on the reference's inputs; of the targets too, if there are any."""
    known = prepared(name, settings)
    ir = known.graph.ir
    found = {node.name: Tally(kind) for node in ir.nodes if (kind := kind_of(node))}
    theirs = {target: runner(known.graph.retarget(target)) for target in targets}
    for _, env in runs(known, looked(settings)):
        for node in (node for node in ir.nodes if kind_of(node)):
            codes, tally = [env[key] for key in node.inputs], found[node.name]
            one = exact(ir, node, codes)
            tally.count += one.numerator.size
            tally.ties += int(tied(ir, node, one).sum())
            tally.alike += uniform(ir, node, one)
            tally.expected += independent(ir, node, one)
            whole = sum(int(np.abs(x).sum()) for x in one.operands)
            tally.reach += max(one.factors) / one.denominator * whole
            ways = {way: settled(ir, node, one, way) for way in WAYS}
            for way, wanted in ways.items():
                _add(tally.rules, way, wanted - ways["even"])
            for target, other in theirs.items():
                own = np.asarray(other.output(other.nodes[node.name], codes)).astype(np.int64)
                rule = ways[ties_of(RULES[tally.kind], target)] if tally.kind in RULES else ways["even"]
                _add(tally.targets, target, own - ways["even"], own - rule)
    return found


def _add(into: dict[str, list[int]], key: str, difference: np.ndarray, *others: np.ndarray) -> None:
    new = [int(difference.sum()), *(int(np.count_nonzero(d)) for d in (difference, *others))]
    into[key] = [a + b for a, b in zip(into.get(key, [0] * len(new)), new, strict=True)]


def mixed(name: str, settings: Settings, targets: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Target -> classes int [n] where it computes additions, pools and means, and the reference everything else.

    Raises:
      ValueError: a target writes other nodes than the reference.
    """
    known = prepared(name, settings)
    own = runner(known.graph)
    theirs = {target: runner(known.graph.retarget(target)) for target in targets}
    for target, other in theirs.items():
        if list(other.nodes) != list(own.nodes):
            raise ValueError(f"expected a target with the nodes of nearest_even; {target} writes others.")
    found: dict[str, list[np.ndarray]] = {target: [] for target in targets}
    for _, env in runs(known, len(known.data.test_labels)):
        for target, other in theirs.items():
            mine = {own.ir.inputs[0]: env[own.ir.inputs[0]]}
            for node in own.ir.nodes:
                inputs = [mine[key] for key in node.inputs]
                if kind_of(node):
                    mine[node.output] = np.asarray(other.output(other.nodes[node.name], inputs))
                elif all(x is env[key] for x, key in zip(inputs, node.inputs, strict=True)):
                    mine[node.output] = env[node.output]
                else:
                    mine[node.output] = np.asarray(own.output(node, inputs))
            found[target].append(mine[own.ir.outputs[0]].argmax(-1))
    jax.clear_caches()  # a process can map only so many compiled kernels (Linux: vm.max_map_count)
    return {target: np.concatenate(parts) for target, parts in found.items()}
