"""A training step with 8-bit fake quantization against the float step of the same model, beside other libraries.

Weights per channel, activations per tensor and asymmetric, all scales learned (LSQ); also with scales that are
constants, and with `qjax.Dynamic`, which is nearest to what the other libraries do. Plain SGD, so that the step is the
forward and the backward. `python -m benchmarks steps`. With gradients in integers: `python -m benchmarks gradients`.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

import qjax
from benchmarks.peers import installed
from benchmarks.timing import Failed, Result, paired
from experiments.models.mobilenet import MobileNetV2
from experiments.models.recurrent import Recurrent
from experiments.models.resnet import CifarResNet
from experiments.models.vit import VisionTransformer


class Perceptron(nnx.Module):
    """Linear layers with relu between them."""

    def __init__(self, widths: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


MODELS: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]] = {
    "MLP 784-512-512-512-10": (lambda r: Perceptron((784, 512, 512, 512, 10), rngs=r), (1024, 784)),
    "MLP 1024-1024-1024-1024-10": (lambda r: Perceptron((1024, 1024, 1024, 1024, 10), rngs=r), (1000, 1024)),
    "ResNet-20": (lambda r: CifarResNet(rngs=r), (64, 32, 32, 3)),
    "MobileNet V2, half width": (lambda r: MobileNetV2(0.5, classes=100, rngs=r), (16, 96, 96, 3)),
    "half of ViT-tiny, 65 tokens": (lambda r: VisionTransformer(64, 8, 192, 6, 3, 768, 100, rngs=r), (16, 64, 64, 3)),
    "LSTM, 2 layers of 128": (lambda r: Recurrent(nnx.LSTMCell, 40, 128, 2, 12, rngs=r), (64, 49, 40)),
}
"""Name -> a model, and the shape of its batch."""

RECIPE = qjax.Recipe(weights=qjax.QSpec(bits=8, axis=-1), activations=qjax.QSpec(bits=8, symmetric=False))

FROM_DATA = dataclasses.replace(RECIPE, overrides={"input": qjax.Override(method="static")})
"""All scales learned but the input's, for which the first layer would need a gradient that a float step has not."""

STATIC = dataclasses.replace(RECIPE, method="static", weight_method="static")
"""Every tensor between operations on a grid as well; the scales are constants."""

DYNAMIC = dataclasses.replace(RECIPE, overrides={".*": qjax.Dynamic()})
"""Nearest to the other libraries: operands of products with weights are quantized by the ranges of each step. (qwix
quantizes products of two activations as well, aqtp, as it is set up here, those of `nnx.Linear` only.)"""


GRADIENTS = {"stochastic": qjax.Gradients(), "nearest": qjax.Gradients(rounding="nearest")}
"""How 8-bit gradients are rounded."""


@dataclasses.dataclass
class Step:
    """A compiled training step that goes on from where it left; seconds: of the processor, to trace and compile it."""

    compiled: Any
    state: Any
    x: Any
    seconds: float

    def __call__(self) -> Any:
        self.state = self.compiled(self.state, self.x)
        return self.state

    @property
    def megabytes(self) -> float:
        """Of temporary arrays."""
        return self.compiled.memory_analysis().temp_size_in_bytes / 2**20


Run = Callable[[Any, Any], Any]


def lowered_step(model: Any, x: Any, forward: Run = lambda model, x: model(x)) -> tuple[Any, Any]:
    """Forward, backward and SGD, lowered for the state that is returned, too; that state may be given away."""
    model.train()
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(jnp.square(forward(m, x))))(model))
        return nnx.state((model, optimizer))

    copy = jax.tree.map(lambda a: a.copy(), state)
    return step.lower(copy, x), copy


def step_of(model: Any, x: Any, forward: Run = lambda model, x: model(x)) -> Step:
    """The same, compiled."""
    start = time.process_time()
    lowered, state = lowered_step(model, x, forward)
    return Step(lowered.compile(), state, x, time.process_time() - start)


def gradients(seconds: float, names: Collection[str]) -> list[Result]:
    """Steps whose backward pass is in floats and in integers / the float step; names: some of `MODELS`."""
    found: list[Result] = []

    def keyed(model: Any, given: tuple[jax.Array, jax.Array]) -> Any:
        with qjax.training.gradient_key(given[1]):
            return model(given[0])

    for name, (make, shape) in MODELS.items():
        if name not in names:
            continue
        x = jax.random.normal(jax.random.key(1), shape)
        reference = step_of(make(nnx.Rngs(0)), x)
        ways: dict[str, qjax.Gradients | None] = {"gradients in float": None}
        ways |= {f"8-bit gradients, {rounding}": how for rounding, how in GRADIENTS.items()}
        for way, how in ways.items():
            qmodel = qjax.quantize(make(nnx.Rngs(0)), dataclasses.replace(RECIPE, gradients=how), x[:2])
            qjax.calibrate(qmodel, [x])
            subject = step_of(qmodel, (x, jax.random.key(2)), keyed)
            result = paired(f"{name}, batch {shape[0]}: {way} / float", subject, reference, seconds=seconds, least=5)
            found.append(result)
            memory = f"{subject.megabytes:.0f} / {reference.megabytes:.0f} MB of temporary arrays"
            print(f"{result.name}: {result.ratio:.2f}, {memory}", flush=True)
    return found


def steps(seconds: float, names: Collection[str]) -> list[Result]:
    """Each way's step / the float step, and the exact forward's / the fake-quantized one's; names: some of `MODELS`."""
    found: list[Result] = []
    console = Console()
    for name, (make, shape) in MODELS.items():
        if name not in names:
            continue
        title = f"{name}, batch {shape[0]}"
        x = jax.random.normal(jax.random.key(1), shape)
        reference = step_of(make(nnx.Rngs(0)), x)

        def add(what: str, subject: Step, against: Step = reference, title: str = title) -> None:
            result = paired(f"{title}: {what}", subject, against, seconds=seconds, least=5)
            found.append(result)
            console.print(
                f"{result.name}: {result.ratio:.2f}, compiled in {subject.seconds:.1f} / {against.seconds:.1f} s, "
                f"{subject.megabytes:.0f} / {against.megabytes:.0f} MB of temporary arrays",
                soft_wrap=True,
            )

        def quantized(recipe: qjax.Recipe, make: Any = make, x: jax.Array = x) -> Any:
            made = qjax.quantize(make(nnx.Rngs(0)), recipe, x[:2])
            qjax.calibrate(made, [x])
            return made

        qmodel = quantized(RECIPE)
        fake = step_of(qmodel, x)
        add("qjax / float", fake)
        add("qjax, scale of the input not learned / float", step_of(quantized(FROM_DATA), x))
        add("qjax, scales not learned / float", step_of(quantized(STATIC), x))
        add("qjax, dynamic / float", step_of(qjax.quantize(make(nnx.Rngs(0)), DYNAMIC, x[:2]), x))
        for peer, quantize in installed().items():
            try:
                model = make(nnx.Rngs(0))
                model.train()
                other = step_of(quantize(model, x), x)
            except Exception as error:  # a peer that cannot train the model is a row of its own
                found.append(Failed(f"{title}: {peer} / float", f"fails: {type(error).__name__}"))
                console.print(f"{title}: {peer} fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                continue
            add(f"{peer} / float", other)
        exact = qjax.exact(qmodel, x)
        add("qjax exact / qjax", step_of(qmodel, x, lambda model, x, exact=exact: exact(model, x)), fake)
    return found
