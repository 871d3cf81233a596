"""The int32 accumulators that a converted network rounds, as its own kernels compute them."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

import qjax
from experiments.data import Digits
from experiments.models import CNN
from experiments.training import Schedule, one_hot, train
from qjax.graph import kernels
from qjax.run import accumulators, interpreter


@dataclasses.dataclass(frozen=True)
class Accumulators:
    """Of one node: acc int32 [n], its channels' effective scales float64 [n]."""

    name: str
    acc: np.ndarray
    scale: np.ndarray


def quantized_digits(data: Digits, epochs: int, seed: int, width: int = 16) -> qjax.QuantizedModel:
    """The convolutional network of the experiments, trained in float32 and quantized to 8 bits after training."""
    model = CNN(width, rngs=nnx.Rngs(seed))
    train(model, data.train_images, one_hot(data.train_labels), Schedule(epochs), seed=seed, title="float training")
    qmodel = qjax.quantize(model, qjax.Recipe(target="single_round"), data.train_images[:256])
    qmodel.eval()
    return qmodel


def distinct(graph: qjax.IntegerGraph, images: Any) -> list[Accumulators]:
    """Every pair of accumulator and channel that occurs, once, for each node with weights.

    Images repeat themselves (a margin of zeros gives the bias, pixel by pixel); what repeats is no new sample.
    """
    ir = graph.ir
    constants = kernels.prepare(ir)
    env = interpreter.run(ir, constants, [graph.quantize(images)])
    found: list[Accumulators] = []
    for node in ir.nodes:
        if "multiplier" not in node.constants:
            continue
        inputs = [env[name] for name in node.inputs]
        (acc,) = accumulators.accumulators(node.op, kernels.attributes(ir, node), constants[node.name], inputs)
        multiplier, shift = (np.asarray(ir.constant(node, role)) for role in ("multiplier", "shift"))
        scale = multiplier.astype(np.float64) * 2.0 ** (shift.astype(np.float64) - 31)
        channels = acc.shape[-1]
        rows = np.asarray(acc).reshape(-1, channels)
        per_channel = [np.unique(rows[:, channel]) for channel in range(channels)]
        sizes = [values.size for values in per_channel]
        each = np.repeat(np.broadcast_to(scale.reshape(-1), (channels,)), sizes)
        found.append(Accumulators(node.name, np.concatenate(per_channel), each))
    return found
