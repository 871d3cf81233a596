"""The integer interpreter against XLA's float32 forward of the same network, and against ONNX Runtime's int8.

Published networks at their published sizes, W8A8, weights per channel; evaluation mode; codes in and codes out against
reals in and reals out. The interpreter rounds by the default rule, "nearest_even". ONNX Runtime gets the emitted model
(style "qdq", codes in and out) and as many threads as there are cores; how many of its codes differ from those of the
graph under the target "onnxruntime" is counted. `python -m benchmarks speed`.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from flax import nnx
from rich.console import Console

import qjax
from benchmarks.steps import Perceptron
from benchmarks.timing import Paired, paired
from experiments.architectures import build
from experiments.models.bert import Bert

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


def _session(graph: qjax.IntegerGraph) -> Any:
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        path = Path(folder) / "model.onnx"
        graph.emit("onnx", path, style="qdq", codes=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count() or 1
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def speed(seconds: float, names: list[str] | None = None, batches: tuple[int, ...] = BATCHES) -> list[Paired]:
    """int8 interpreter / float32, and int8 interpreter / ONNX Runtime, of the time."""
    found: list[Paired] = []
    console = Console()
    for name, make in NETWORKS.items():
        if names and name not in names:
            continue
        model, sample = make()
        qmodel = qjax.quantize(model, qjax.Recipe(), sample)
        qmodel.eval()
        start = time.process_time()
        graph = qjax.convert(qmodel, sample)
        converted = time.process_time() - start
        model.eval()
        definition, state = nnx.split(model)
        forward = jax.jit(lambda state, x, definition=definition: nnx.merge(definition, state)(x))
        emulating = graph.retarget("onnxruntime")
        session = _session(emulating)
        for batch in batches:
            x = jnp.asarray(np.resize(np.asarray(sample), (batch, *sample.shape[1:])))
            codes = graph.quantize(x)
            feed = {session.get_inputs()[0].name: np.asarray(codes)}
            run = functools.partial(graph.run, codes)
            other: Any = functools.partial(session.run, None, feed)
            differ = int(np.sum(np.asarray(emulating.run(codes)) != other()[0]))
            real = functools.partial(forward, state, x)
            title = f"{name}, batch {batch}"
            for reference, call in (("float32", real), ("ONNX Runtime int8", other)):
                # a runtime's threads go on spinning for a while, which is no affair of the other side
                result = paired(f"{title}: qjax / {reference}", run, call, seconds=seconds, least=5, rest=0.03)
                found.append(result)
                console.print(f"{result.name}: {1 / result.ratio:.2f} times as fast", soft_wrap=True)
            console.print(f"{title}: {differ} codes differ from ONNX Runtime's; converted in {converted:.1f} s")
    return found
