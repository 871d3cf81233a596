"""The networks of the table of artifacts: plain Flax, trained on the digits, then trained quantized."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

import qjax
from experiments.data import Digits
from experiments.demo import recipe_of
from experiments.models import MLP, ResNet
from experiments.training import Schedule, one_hot, train

TARGET = "tflite_micro"
"""What the networks are trained for, and of the artifacts that carry any target's rounding."""


class Depthwise(nnx.Module):
    """A stem, three pairs of a depthwise 3x3 and a 1x1 convolution with batch norm, a mean over the image, a head."""

    def __init__(self, width: int = 16, classes: int = 10, *, rngs: nnx.Rngs) -> None:
        widths, strides = (width, width, 2 * width, 2 * width), (1, 2, 1)
        pairs = list(itertools.pairwise(widths))
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.depthwise = nnx.List(
            nnx.Conv(i, i, (3, 3), strides=s, feature_group_count=i, use_bias=False, rngs=rngs)
            for (i, _), s in zip(pairs, strides, strict=True)
        )
        self.pointwise = nnx.List(nnx.Conv(i, o, (1, 1), use_bias=False, rngs=rngs) for i, o in pairs)
        self.norms = nnx.List(
            nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in (width, *(n for pair in pairs for n in pair))
        )
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    @property
    def convolutions(self) -> list[nnx.Conv]:
        """In the order of `norms`."""
        pairs = zip(self.depthwise, self.pointwise, strict=True)
        return [self.stem, *(layer for pair in pairs for layer in pair)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(layer(x)))
        return self.head(x.mean(axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class Network:
    """A float model, and the same trained at some number of bits, both in evaluation mode."""

    name: str
    model: Any
    qmodel: qjax.QuantizedModel
    sample: Any

    def graph(self, target: str) -> qjax.IntegerGraph:
        """Its integers under a target."""
        return qjax.convert(self.qmodel, self.sample, target=target)


NETWORKS: dict[str, tuple[type[nnx.Module], int]] = {
    "ResNet W8A8": (ResNet, 8),
    "ResNet W4A4": (ResNet, 4),
    "Depthwise W8A8": (Depthwise, 8),
    "MLP W8A8": (MLP, 8),
}
"""Model and bits by name; 4 bits leave the first and the last layer at 8, as in the demo."""


def trained(data: Digits, names: Sequence[str], *, epochs: int, quantized_epochs: int) -> list[Network]:
    """The networks of those names; a float model is trained once for all its bits."""
    floats: dict[type[nnx.Module], Any] = {}
    found: list[Network] = []
    labels, sample = one_hot(data.train_labels), data.train_images[:16]
    for name in names:
        make, bits = NETWORKS[name]
        if make not in floats:
            construct: Any = make
            floats[make] = construct(rngs=nnx.Rngs(0))
            train(floats[make], data.train_images, labels, Schedule(epochs), seed=0, title=make.__name__)
        # TFLite's average pools keep their input's grid; the other runtimes take either
        recipe = dataclasses.replace(recipe_of(bits), target=TARGET)
        qmodel = qjax.quantize(floats[make], recipe, sample)
        qjax.calibrate(qmodel, [data.train_images[i : i + 256] for i in range(0, 1024, 256)])
        train(qmodel, data.train_images, labels, Schedule(quantized_epochs, learning_rate=2e-3), seed=1, title=name)
        qmodel.eval()
        found.append(Network(name, floats[make], qmodel, sample))
    return found
