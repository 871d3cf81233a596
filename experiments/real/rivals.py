"""The same networks, quantized by others, from the same calibration batches.

ONNX Runtime gets each float network as jax2onnx writes it, with batch norms folded as its own guide advises. qwix gets
the Flax network as it stands.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from flax import nnx
from onnxruntime import quantization

from experiments.real.methods import Result, Setting, outputs_of
from experiments.real.network import Network


def _session(path: Path, **settings: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _float_file(network: Network, folder: Path) -> Path:
    """The float network for one size of batch, batch norms folded into convolutions."""
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]

    batch = network.calibration[0]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in batch]
    made = to_onnx(network.model, inputs=shapes, model_name=network.name)
    # shapes inside are inferred anew: those that it writes are partly of another layout
    del made.graph.value_info[:]
    path, folded = folder / "float.onnx", folder / "folded.onnx"
    onnx.save(made, path)
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    _session(path, graph_optimization_level=level, optimized_model_filepath=str(folded))
    return folded


def _outputs(path: Path, network: Network) -> Any:
    """What the file returns for the test batches, which are cut to the size of the calibration batches."""
    session = _session(path)
    names = [value.name for value in session.get_inputs()]
    size = len(network.calibration[0][0])

    def call(*batch: np.ndarray) -> tuple[np.ndarray, ...]:
        parts: list[Any] = []
        for start in range(0, len(batch[0]), size):
            rows = [array[start : start + size] for array in batch]
            short = size - len(rows[0])
            full = [np.concatenate([a, np.repeat(a[-1:], short, axis=0)]) if short else a for a in rows]
            found = session.run(None, dict(zip(names, full, strict=True)))
            parts.append([np.asarray(out)[: size - short] for out in found])
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    return outputs_of(call, network.test)


class _Reader(quantization.CalibrationDataReader):
    def __init__(self, names: list[str], network: Network) -> None:
        self.feeds = iter([dict(zip(names, batch, strict=True)) for batch in network.calibration])

    def get_next(self) -> Any:
        return next(self.feeds, None)


def _type(bits: int) -> Any:
    return {8: quantization.QuantType.QInt8, 4: quantization.QuantType.QInt4}[bits]


def static(network: Network, setting: Setting, *, exact: bool, reduce_range: bool) -> Result:
    """`quantize_static` in the form QDQ with a scale per channel."""
    del exact
    if setting.activations != 8:
        raise NotImplementedError("quantize_static has no activations of 4 bits")
    with tempfile.TemporaryDirectory() as folder:
        path, written = _float_file(network, Path(folder)), Path(folder, "int8.onnx")
        begin = time.perf_counter()
        names = [value.name for value in _session(path).get_inputs()]
        quantization.quantize_static(
            str(path),
            str(written),
            _Reader(names, network),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=_type(setting.weights),
        )
        seconds = time.perf_counter() - begin
        return Result(_outputs(written, network), seconds)


def dynamic(network: Network, setting: Setting, *, exact: bool) -> Result:
    """`quantize_dynamic`: scales of activations are found at run time."""
    del exact
    if setting.activations != 8:
        raise NotImplementedError("quantize_dynamic has no activations of 4 bits")
    with tempfile.TemporaryDirectory() as folder:
        path, written = _float_file(network, Path(folder)), Path(folder, "int8.onnx")
        begin = time.perf_counter()
        quantization.quantize_dynamic(str(path), str(written), per_channel=True, weight_type=_type(setting.weights))
        seconds = time.perf_counter() - begin
        return Result(_outputs(written, network), seconds)


def qwix_ptq(network: Network, setting: Setting, *, exact: bool) -> Result:
    """qwix's PTQ; its activations have scales of their own for each call. Embeddings stay in floats."""
    del exact
    import qwix  # pyright: ignore[reportMissingImports]

    begin = time.perf_counter()
    rule = qwix.QuantizationRule(
        module_path=".*", weight_qtype=f"int{setting.weights}", act_qtype=f"int{setting.activations}"
    )
    quantized: Any = qwix.quantize_model(network.model, qwix.PtqProvider([rule]), *network.calibration[0])
    seconds = time.perf_counter() - begin
    call = nnx.jit(lambda model, *args: model(*args))
    return Result(outputs_of(lambda *args: call(quantized, *args), network.test), seconds)


RIVALS: dict[str, Callable[..., Result]] = {
    "onnxruntime quantize_static": functools.partial(static, reduce_range=False),
    "onnxruntime quantize_dynamic": dynamic,
    "qwix PTQ": qwix_ptq,
}
