"""The integer interpreter against XLA's float32 forward of the same network, and against ONNX Runtime's int8.

Published networks at their published sizes, W8A8, weights per channel; evaluation mode; codes in and codes out against
reals in and reals out. The interpreter rounds by the default rule, "nearest_even". ONNX Runtime gets the emitted model
(codes in and out) in the form that it is fastest with: activations int8 or uint8, styles "qdq" or "qoperator"; as many
threads as there are cores. Its codes are those of that graph under the target "onnxruntime", or it is not timed.
`python -m benchmarks speed`.
"""

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import qjax
from benchmarks.steps import Perceptron
from benchmarks.timing import Failed, Paired, Result, paired
from experiments.architectures import build
from experiments.models.bert import Bert
from qjax.runtimes.onnx import session_of

BATCHES = (1, 32)


def _mlp() -> tuple[Any, Any]:
    return Perceptron((784, 512, 512, 512, 10), rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 784))


class Encoder(nnx.Module):
    """BERT-small's layers (width 512, 4 layers, 8 heads) on vectors: a runtime gets them from its own embedding."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        whole = Bert(100, 128, 512, 4, 8, 2048, rngs=rngs)
        self.layers = whole.layers

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.ones(x.shape[:2], bool)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _encoder() -> tuple[Any, Any]:
    return Encoder(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 128, 512))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "MLP": _mlp,
    "BERT-small": _encoder,
    **{
        name: functools.partial(build, name, full=True)
        for name in (
            *("ResNet-20", "ResNet-50", "Inception V1", "Inception V3"),
            *("MobileNet V1", "MobileNet V2", "DS-CNN", "LSTM"),
        )
    },
}
"""Name -> a model and two of its inputs."""


UNSIGNED = qjax.Recipe(activations=qjax.QSpec(bits=8, signed=False, symmetric=False))


def _sessions(graphs: Sequence[qjax.IntegerGraph]) -> list[tuple[qjax.IntegerGraph, Any]]:
    """Every graph in every style of operators that ONNX Runtime computes on codes."""
    found: list[tuple[qjax.IntegerGraph, Any]] = []
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        for graph, style in itertools.product(graphs, ("qdq", "qoperator")):
            path = str(Path(folder) / "model.onnx")
            graph.emit("onnx", path, style=style, codes=True)
            found.append((graph, session_of(path, threads=os.cpu_count() or 1)))
    return found


def _runtime(sessions: Sequence[tuple[qjax.IntegerGraph, Any]], x: jax.Array) -> Callable[[], Any]:
    """ONNX Runtime on the form of the model that it is fastest with.

    Raises:
      AssertionError: its codes are not those of the graph; the second argument is how many.
    """
    calls: list[Callable[[], Any]] = []
    for graph, session in sessions:
        codes: Any = graph.quantize(x)
        call = functools.partial(session.run, None, {session.get_inputs()[0].name: np.asarray(codes)})
        if differ := int(np.sum(call()[0] != np.asarray(graph.run(codes)))):
            raise AssertionError(f"{differ:,} codes differ", differ)
        calls.append(call)
    return least_call(calls)


def least_call(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """The fastest of some calls."""
    return min(calls, key=_least)


def _least(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(10))


def speed(seconds: float, names: Collection[str], batches: tuple[int, ...] = BATCHES) -> list[Result]:
    """int8 interpreter / float32, and int8 interpreter / ONNX Runtime, of the time; names: some of `NETWORKS`."""
    found: list[Result] = []
    console = Console()
    for name, make in NETWORKS.items():
        if name not in names:
            continue
        model, sample = make()
        qmodel, unsigned = (qjax.quantize(model, recipe, sample) for recipe in (qjax.Recipe(), UNSIGNED))
        qmodel.eval()
        unsigned.eval()
        start = time.process_time()
        graph = qjax.convert(qmodel, sample)
        console.print(f"{name}: converted in {time.process_time() - start:.1f} s")
        model.eval()
        definition, state = nnx.split(model)
        forward = jax.jit(lambda state, x, definition=definition: nnx.merge(definition, state)(x))
        sessions = _sessions([qjax.convert(either, sample, target="onnxruntime") for either in (qmodel, unsigned)])
        for batch in batches:
            x = jnp.asarray(np.resize(np.asarray(sample), (batch, *sample.shape[1:])))
            codes = graph.quantize(x)
            title, run = f"{name}, batch {batch}: qjax", functools.partial(graph.run, codes)
            found.append(_compared(f"{title} / float32", run, functools.partial(forward, state, x), seconds))
            against = f"{title} / ONNX Runtime int8"
            try:
                found.append(_compared(against, run, _runtime(sessions, x), seconds))
            except AssertionError as error:
                found.append(Failed(against, *error.args))
            for result in found[-2:]:
                ratio = f"{1 / result.ratio:.2f} times as fast" if isinstance(result, Paired) else result.reason
                console.print(f"{result.name}: {ratio}", soft_wrap=True)
    return found


def _compared(name: str, run: Callable[[], Any], other: Callable[[], Any], seconds: float) -> Paired:
    # a runtime's threads go on spinning for a while, which is no affair of the other side
    return paired(name, run, other, seconds=seconds, least=5, rest=0.03)
