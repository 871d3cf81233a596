"""One trained network under every target: groups of targets that answer alike, and how pairs of them part."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.data import Digits, digits
from experiments.lab.chains import codes_of
from experiments.models import MLP
from experiments.training import Schedule, accuracy, one_hot, own_forward, scores, train
from qjax.comparison.result import Difference
from qjax.graph.kernels import attributes, constants_of
from qjax.run.stepwise import Runner

HIDDEN = 32


@dataclasses.dataclass(frozen=True)
class Deployed:
    """A network under one target, or several that give the same output codes for these images.

    names: of the targets. outputs: int output codes [images, classes]. hidden: share of the first layer's codes that
    differ from those of `nearest_even`, given the same input codes. accuracy: of the class with the highest code.
    """

    names: tuple[str, ...]
    outputs: np.ndarray
    hidden: Difference
    accuracy: float


@functools.lru_cache(maxsize=4)
def float_network(seed: int, epochs: int) -> tuple[MLP, Digits]:
    """A perceptron 64-32-10 trained in float32 on digits."""
    data = digits()
    model = MLP((HIDDEN,), rngs=nnx.Rngs(seed))
    train(model, data.train_images, one_hot(data.train_labels), Schedule(epochs), seed=seed, title="float training")
    return model, data


@functools.lru_cache(maxsize=4)
def teacher(seed: int, epochs: int) -> np.ndarray:
    """float32 [images, classes]: the probabilities that the float network gives to the training images."""
    model, data = float_network(seed, epochs)
    return np.asarray(jax.nn.softmax(scores(model, data.train_images)))


def quantized_network(bits: int, seed: int, float_epochs: int, epochs: int) -> Any:
    """The network after quantization-aware training with the fake-quantized forward; every layer has those bits.

    Activations are unsigned, as onnxruntime and PyTorch on x86 want them; outputs keep 8 bits.
    """
    model, data = float_network(seed, float_epochs)
    recipe = qjax.Recipe(
        weights=qjax.QSpec(bits=bits, axis=-1), activations=qjax.QSpec(bits=bits, signed=False, symmetric=False)
    )
    qmodel = qjax.quantize(model, recipe, data.train_images)
    targets = teacher(seed, float_epochs)
    train(qmodel, data.train_images, targets, Schedule(epochs), seed=seed + 1000, title=f"W{bits}A{bits}")
    qmodel.eval()
    return qmodel


def deploy(qmodel: Any, images: Any, names: Sequence[str]) -> tuple[list[Deployed], dict[str, str]]:
    """The network under each target, those of equal output codes together; and why others cannot take it.

    The first of `names` is the reference of `Deployed.hidden`.
    """
    graphs: dict[str, list[tuple[str, qjax.IntegerGraph]]] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            graph = qjax.convert(qmodel, images[:4], target=name)
        except ValueError as error:
            refused[name] = str(error).split(". ")[0]
        else:
            graphs.setdefault(fingerprint(graph), []).append((name, graph))
    found: list[Deployed] = []
    reference: Any = None
    for group in graphs.values():
        graph = group[0][1]
        ir, codes = graph.ir, codes_of(graph, graph.quantize(images))
        first = next(node for node in ir.nodes if node.op == "dot")
        reference = codes if reference is None else reference
        runner = Runner(ir, graph.target, graph.interpreter.constants)
        own = np.asarray(runner.output(first, [reference[name] for name in first.inputs]))
        outputs = codes[ir.outputs[0]]
        hidden = Difference.of(reference[first.output], own)
        found.append(Deployed(tuple(name for name, _ in group), outputs, hidden, float("nan")))
    return merged(found), refused


def merged(found: Sequence[Deployed]) -> list[Deployed]:
    """Those of equal output codes as one, in the order of their firsts."""
    groups: dict[bytes, Deployed] = {}
    for one in found:
        key = np.ascontiguousarray(one.outputs).tobytes()
        first = groups.get(key)
        groups[key] = one if first is None else dataclasses.replace(first, names=first.names + one.names)
    return list(groups.values())


def judged(found: Sequence[Deployed], labels: np.ndarray) -> list[Deployed]:
    """The same with their accuracies."""
    return [dataclasses.replace(one, accuracy=accuracy(one.outputs, labels)) for one in found]


def fingerprint(graph: qjax.IntegerGraph) -> str:
    """Equal for graphs that compute the same from the same inputs: rules, constants, and how inputs become codes."""
    ir = graph.ir
    digest = hashlib.sha256(json.dumps([ir.quantization, list(ir.outputs)]).encode())
    for node in ir.nodes:
        digest.update(json.dumps([node.name, attributes(ir, node)], sort_keys=True).encode())
        for role, value in sorted(constants_of(ir, node).items()):
            digest.update(role.encode() + np.asarray(value).tobytes())
    for name in ir.inputs:
        quantization = ir.tensors[name].quantization
        if quantization is not None:  # an input of integers, such as ids, is read as it is
            digest.update(np.asarray(quantization.scale).tobytes() + np.asarray(quantization.zero_point).tobytes())
    return digest.hexdigest()


def flips(a: Deployed, b: Deployed) -> float:
    """The share of images whose highest score is of another class; the first of equal scores counts."""
    return float(np.mean(a.outputs.argmax(-1) != b.outputs.argmax(-1)))


def squared(a: Deployed, b: Deployed) -> float:
    """The mean squared difference of output codes, in steps."""
    return float(np.mean((a.outputs.astype(np.int64) - b.outputs.astype(np.int64)) ** 2))


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """Deployed accuracies after the same further epochs, per seed; the network before them; and a check.

    exact: trained through the target's integers. control: with the fake-quantized forward. unequal: outputs in which
    the exact forward differs from the graph converted afterwards.
    """

    before: float
    exact: list[float]
    control: list[float]
    unequal: int


def fine_tune(
    qmodel: Any, data: Digits, targets: np.ndarray, name: str, seeds: Sequence[int], epochs: int
) -> FineTuned:
    """Clones of the network, trained on in both ways from the same start with the same batches, then deployed."""
    sample = data.train_images[:4]
    forward = qjax.exact(qmodel, sample, target=name)
    schedule = Schedule(epochs, learning_rate=1e-3)

    def deployed(model: Any) -> np.ndarray:
        graph = qjax.convert(model, sample, target=name)
        return np.asarray(codes_of(graph, graph.quantize(data.test_images))[graph.ir.outputs[0]])

    before = accuracy(deployed(qmodel), data.test_labels)
    found: dict[str, list[float]] = {"exact": [], "control": []}
    unequal = 0
    for seed in seeds:
        for way in found:
            model = nnx.clone(qmodel)
            used = forward if way == "exact" else own_forward
            train(model, data.train_images, targets, schedule, seed=seed, title=f"{name}, {way}", forward=used)
            model.eval()
            outputs = deployed(model)
            found[way].append(accuracy(outputs, data.test_labels))
            if way == "exact" and seed == seeds[0]:
                graph = qjax.convert(model, sample, target=name)
                real = np.asarray(graph.dequantize(outputs))
                unequal += int(np.sum(real != np.asarray(scores(model, data.test_images, forward))))
    return FineTuned(before, found["exact"], found["control"], unequal)
