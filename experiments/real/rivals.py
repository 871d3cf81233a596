"""The same networks, quantized by others, from the same calibration batches.

ONNX Runtime gets each float network as jax2onnx writes it, with batch norms folded as its own guide advises. qwix gets
the Flax network as it stands. Its activations have scales of their own for each call; embeddings stay in floats. Its
AWQ multiplies in floats. For LiteRT see `experiments.real.edge`.
"""

import functools
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import onnx
import onnxruntime
from flax import nnx
from onnxruntime import quantization

from experiments.real.edge import EDGE
from experiments.real.methods import Result, Setting, in_batches, outputs_of
from experiments.real.network import Network

OPSET = 21
"""The newest without the operator Attention, which ONNX Runtime's quantization gets wrong."""


def _session(path: Path, **settings: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _float_file(network: Network, folder: Path) -> Path:
    """The float network for one size of batch, batch norms folded into convolutions."""
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in network.calibration[0]]
    graphdef, state = nnx.split(network.model)
    # a model of the trace's own: Flax forbids that a scan's step takes parts of one from outside
    made = to_onnx(
        lambda *args: nnx.merge(graphdef, state, copy=True)(*args), inputs=shapes, model_name=network.name, opset=OPSET
    )
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

    def call(*batch: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(out) for out in session.run(None, dict(zip(names, batch, strict=True))))

    return outputs_of(in_batches(call, len(network.calibration[0][0])), network.test)


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


def _rule(kind: Any, setting: Setting) -> list[Any]:
    return [kind(module_path=".*", weight_qtype=f"int{setting.weights}", act_qtype=f"int{setting.activations}")]


def _qwix_outputs(model: Any, network: Network) -> Any:
    call = nnx.jit(lambda model, *args: model(*args))
    return outputs_of(lambda *args: call(model, *args), network.test)


def qwix_ptq(network: Network, setting: Setting, *, exact: bool) -> Result:
    """qwix's PTQ."""
    del exact
    import qwix  # pyright: ignore[reportMissingImports]

    begin = time.perf_counter()
    provider = qwix.PtqProvider(_rule(qwix.QuantizationRule, setting))
    quantized: Any = qwix.quantize_model(network.model, provider, *network.calibration[0])
    seconds = time.perf_counter() - begin
    return Result(_qwix_outputs(quantized, network), seconds)


def qwix_calibrated(network: Network, setting: Setting, *, exact: bool, module: str, prefix: str) -> Result:
    """GPTQ, AWQ or SmoothQuant: a pass of calibration by its own provider, then its `quantize_params`.

    They look at dense layers only; convolutions are quantized as by PTQ.
    """
    del exact
    import qwix  # pyright: ignore[reportMissingImports]

    method: Any = importlib.import_module(f"qwix.contrib.{module}")
    begin = time.perf_counter()
    rules = _rule(getattr(method, f"{prefix}Rule"), setting)
    sample = network.calibration[0]
    collecting: Any = qwix.quantize_model(
        network.model, getattr(method, f"{prefix}CalibrationProvider")(rules), *sample
    )
    for batch in network.calibration:
        collecting(*batch)
    # Its documentation wants the tree of the PTQ model here. With the tree of its own model weights stay float.
    quantized: Any = qwix.quantize_model(network.model, qwix.PtqProvider(rules), *sample)
    parameters, statistics = (nnx.to_pure_dict(nnx.state(collecting, t)) for t in (nnx.Param, qwix.QuantStat))
    own = getattr(method, f"{prefix}InferenceProvider", None)
    if own is None:
        nnx.update(quantized, method.quantize_params(parameters, quantized, statistics))
    else:
        # Given a module it returns bare arrays, without the axis that its own provider needs. Given a tree it does not.
        found = method.quantize_params(parameters, _tree(quantized, parameters), statistics)
        quantized = qwix.quantize_model(network.model, own(rules), *sample)
        _put(quantized, found)
    seconds = time.perf_counter() - begin
    return Result(_qwix_outputs(quantized, network), seconds)


def _tree(module: Any, like: dict[Any, Any]) -> dict[Any, Any]:
    """The values of a module's variables as a tree of dictionaries."""
    found: dict[Any, Any] = {}
    for key, value in like.items():
        part = module[key] if isinstance(key, int) else getattr(module, key)
        found[key] = _tree(part, cast("dict[Any, Any]", value)) if isinstance(value, dict) else part
    return found


def _put(module: Any, tree: dict[Any, Any]) -> None:
    """Set the variables of a module, whose values may change their type."""
    for key, value in tree.items():
        variable = module[key] if isinstance(key, int) else getattr(module, key)
        if isinstance(value, dict):
            _put(variable, cast("dict[Any, Any]", value))
        elif isinstance(variable, nnx.Variable):
            cast("nnx.Variable[Any]", variable).set_value(value)
        else:
            setattr(module, str(key), value)  # what stands for a quantized parameter


RIVALS: dict[str, Callable[..., Result]] = {
    "onnxruntime quantize_static": functools.partial(static, reduce_range=False),
    "onnxruntime quantize_dynamic": dynamic,
    **EDGE,
    "qwix PTQ": qwix_ptq,
    "qwix GPTQ": functools.partial(qwix_calibrated, module="gptq", prefix="Gptq"),
    "qwix AWQ": functools.partial(qwix_calibrated, module="awq", prefix="Awq"),
    "qwix SmoothQuant": functools.partial(qwix_calibrated, module="smooth_quant", prefix="Sq"),
}

STATIC = ("onnxruntime quantize_static", "ai-edge-quantizer static")
"""Those whose activations have scales from calibration; the others find them at run time."""
