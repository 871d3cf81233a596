"""Whole models: quantization-aware training against float training, the integer interpreter against float32."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import qjax
from benchmarks.timing import Paired, paired
from experiments.data import digits
from experiments.models import MLP, ResNet
from experiments.training import one_hot

BATCH = 64


def stepper(model: Any, images: Any, targets: Any) -> Any:
    """A function that makes one training step, from the state that the last one left."""
    model.train()
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, images: Any, targets: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        gradients = nnx.grad(lambda m: optax.softmax_cross_entropy(m(images), targets).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer))

    held = [jax.tree.map(lambda x: x.copy(), state)]

    def call() -> Any:
        held[0] = step(held[0], images, targets)
        return held[0]

    return call


def training(seconds: float) -> list[Paired]:
    """QAT step time / float step time."""
    data = digits()
    images, targets = (
        jax.numpy.asarray(data.train_images[:BATCH]),
        jax.numpy.asarray(one_hot(data.train_labels[:BATCH])),
    )
    found: list[Paired] = []
    for make in (MLP, ResNet):
        model = make(rngs=nnx.Rngs(0))
        for bits in (8, 4):
            spec = qjax.QSpec(bits=bits, axis=-1)
            recipe = qjax.Recipe(weights=spec, activations=qjax.QSpec(bits=bits, symmetric=False))
            qmodel = qjax.quantize(model, recipe, data.train_images[:BATCH])
            name = f"{make.__name__}, batch {BATCH}: W{bits}A{bits} step / float step"
            float_step = stepper(nnx.clone(model), images, targets)
            found.append(paired(name, stepper(qmodel, images, targets), float_step, seconds=seconds))
    return found


def inference(seconds: float) -> list[Paired]:
    """Integer interpreter / jitted float32 forward, evaluation mode: codes in and codes out, against reals."""
    data = digits()
    model = ResNet(rngs=nnx.Rngs(0))
    qmodel = qjax.quantize(model, qjax.Recipe(), data.train_images[:BATCH])
    graph = qjax.convert(qmodel, data.train_images[:BATCH])
    model.eval()
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    found: list[Paired] = []
    for batch in (1, 32, 256):
        x = jax.numpy.asarray(np.resize(data.test_images, (batch, 8, 8, 1)))
        codes = graph.quantize(x)
        run, real = functools.partial(graph.run, codes), functools.partial(forward, state, x)
        found.append(paired(f"ResNet, batch {batch}: int8 interpreter / float32", run, real, seconds=seconds))
    return found
