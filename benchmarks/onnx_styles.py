"""Emitted .onnx files in ONNX Runtime, beside its float32 model and what its own `quantize_static` makes of that.

Codes in, codes out, on one thread, in one process. A file whose codes are not the graph's is not timed. Times are the
processor's for that thread, which other programs on the machine lengthen little. `python -m benchmarks styles`.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from flax import nnx
from onnx import helper
from onnxruntime import quantization

import qjax
from benchmarks.float_onnx import IR_VERSION, OPSET, Writer
from benchmarks.timing import Failed, Result, paired, thread_time
from conformance.cpu import flags
from qjax.runtimes.onnx import session_of

IMAGES, TOKENS = (16, 32, 32, 3), (4, 64, 256)
"""The data by its shape; the first axis is the larger batch."""


class Convolutions(nnx.Module):
    """Four 3x3 convolutions of 32 to 128 channels on the full image, a mean, a head."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        widths = (IMAGES[-1], 32, 64, 64, 128)
        self.layers = nnx.List([nnx.Conv(i, o, (3, 3), rngs=rngs) for i, o in itertools.pairwise(widths)])
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x.mean(axis=(1, 2)))

    def written(self, w: Writer, x: str) -> str:
        """The same channels first, in float32."""
        for layer in self.layers:
            x = w.relu(w.conv(x, layer))
        return w.linear(w.add("GlobalAveragePool", x), self.head)


class Encoder(nnx.Module):
    """One post-norm layer of a transformer: a perceptron of four times the width."""

    def __init__(self, width: int = TOKENS[-1], heads: int = 4, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.query, self.key, self.value, self.out = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).reshape(split) for layer in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))

    def written(self, w: Writer, x: str) -> str:
        """The same in float32."""

        def linear(x: str, layer: nnx.Linear, factor: float = 1.0) -> str:
            assert layer.bias is not None
            weight, bias = (w.constant(np.asarray(v[...]) * np.float32(factor)) for v in (layer.kernel, layer.bias))
            return w.add("Add", w.add("MatMul", x, weight), bias)

        def norm(x: str, layer: nnx.LayerNorm) -> str:
            assert layer.scale is not None
            assert layer.bias is not None
            values = (w.constant(v[...]) for v in (layer.scale, layer.bias))
            return w.add("LayerNormalization", x, *values, epsilon=layer.epsilon)

        def heads(x: str, order: Sequence[int]) -> str:
            return w.add("Transpose", w.add("Reshape", x, w.integers(0, 0, self.heads, -1)), perm=order)

        scale = (self.heads / self.query.in_features) ** 0.5
        q = heads(linear(x, self.query, scale), (0, 2, 1, 3))
        k = heads(linear(x, self.key), (0, 2, 3, 1))
        v = heads(linear(x, self.value), (0, 2, 1, 3))
        y = w.add("MatMul", w.add("Softmax", w.add("MatMul", q, k), axis=-1), v)
        y = w.add("Reshape", w.add("Transpose", y, perm=(0, 2, 1, 3)), w.integers(0, 0, -1))
        x = norm(w.add("Add", x, linear(y, self.out)), self.norm1)
        return norm(w.add("Add", x, linear(w.add("Gelu", linear(x, self.up)), self.down)), self.norm2)


NETWORKS: dict[str, tuple[Callable[..., nnx.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, IMAGES),
    "encoder": (Encoder, TOKENS),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to write a graph."""

    title: str
    target: str
    options: dict[str, Any]


FORMS = (
    Form("qdq", "onnxruntime", {"style": "qdq", "codes": True}),
    Form("qoperator", "onnxruntime", {"style": "qoperator", "codes": True}),
    Form("qdq, vnni", "onnxruntime", {"style": "qdq", "codes": True, "vnni": True}),
    Form("qoperator, vnni", "onnxruntime", {"style": "qoperator", "codes": True, "vnni": True}),
    Form("integer, onnxruntime", "onnxruntime", {"style": "integer"}),
    Form("integer, tflite_micro", "tflite_micro", {"style": "integer"}),
)


def styles(seconds: float, names: Collection[str]) -> list[Result]:
    """The comparisons of the networks of those names."""
    return [result for name in names for result in _network(name, seconds)]


def _network(name: str, seconds: float) -> Iterator[Result]:
    make, shape = NETWORKS[name]
    model: Any = make(rngs=nnx.Rngs(0))
    data = np.asarray(jax.random.normal(jax.random.key(0), shape))
    # images lie channels first in the float model
    floats = np.ascontiguousarray(data.transpose(0, 3, 1, 2)) if data.ndim == 4 else data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "float.onnx")
        onnx.save(float_model(model, floats.shape), path)
        reference = session_of(str(path))
        got, wanted = reference.run(None, {"x": floats})[0], np.asarray(model(jnp.asarray(data)))
        if not np.allclose(got, wanted, rtol=1e-4, atol=1e-4):
            raise AssertionError(f"{name}: the float32 ONNX model is another network")

        def compared(title: str, session: Any, feeds: np.ndarray) -> Iterator[Result]:
            (port,) = session.get_inputs()
            for batch in (1, shape[0]):
                calls = (
                    functools.partial(run.run, None, {key: np.ascontiguousarray(values[:batch])})
                    for run, key, values in ((session, port.name, feeds), (reference, "x", floats))
                )
                what = f"{name}, batch {batch}: {title} / float32"
                yield paired(what, *calls, seconds=seconds, clock=thread_time)

        for form in FORMS:
            graph = _graph(model, data, form.target)
            file = Path(folder, "model.onnx")
            if form.options.get("vnni") and not {"avx512_vnni", "avx_vnni"} & flags():
                yield Failed(f"{name}: {form.title} / float32", "this CPU has no VNNI")
                continue
            graph.emit("onnx", file, **form.options)
            session = session_of(str(file))
            codes = np.asarray(graph.quantize(data))
            (found,) = session.run(None, {session.get_inputs()[0].name: codes})
            differ = int(np.sum(found != np.asarray(graph.run(codes))))
            if differ:
                yield Failed(f"{name}: {form.title} / float32", f"{differ} codes differ", differ)
                continue
            yield from compared(form.title, session, codes)
        for title, form in (("QDQ", quantization.QuantFormat.QDQ), ("QOperator", quantization.QuantFormat.QOperator)):
            static = Path(folder, "static.onnx")
            quantized(path, static, floats, form)
            yield from compared(f"quantize_static, {title}", session_of(str(static)), floats)


def _graph(model: Any, data: np.ndarray, target: str) -> qjax.IntegerGraph:
    qmodel = qjax.quantize(model, qjax.Recipe(target=target), data[:2])
    qjax.calibrate(qmodel, [data])
    qmodel.eval()
    return qjax.convert(qmodel, data[:2])


def float_model(model: Any, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The model in float32 by its method `written`, for any batch of inputs of that shape."""
    writer = Writer()
    result = model.written(writer, "x")
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        for name, sizes in (("x", ["batch", *shape[1:]]), (result, None))
    ]
    graph = helper.make_graph(writer.nodes, "float32", ports[:1], ports[1:], writer.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


class _Reader(quantization.CalibrationDataReader):
    """One batch of calibration."""

    def __init__(self, data: np.ndarray) -> None:
        self.feeds = iter([{"x": data}])

    def get_next(self) -> Any:
        return next(self.feeds, None)


def quantized(path: Path, written: Path, data: np.ndarray, form: quantization.QuantFormat) -> None:
    """ONNX Runtime's own quantizer, calibrated on one batch."""
    quantization.quantize_static(
        str(path),
        str(written),
        _Reader(data),
        quant_format=form,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
