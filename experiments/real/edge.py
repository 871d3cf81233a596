"""LiteRT's own quantizer on the same networks: `ai-edge-quantizer`, run by LiteRT.

`litert-converter` makes the float `.tflite` file of the Flax network out of JAX's StableHLO.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.real.methods import Result, Setting, in_batches, outputs_of
from experiments.real.network import Network

TOLERANCE = 1e-4
"""How far the file's float outputs may be from the network's, in parts of the greatest output."""

_SIGNATURE = "serving_default"


def _float_file(network: Network) -> bytes:
    """The float network for one size of batch, checked against the network itself."""
    from litert_converter.mlir import ir, passmanager  # pyright: ignore[reportMissingImports]
    from litert_converter.mlir._mlir_libs import converter_api_ext as api  # pyright: ignore[reportMissingImports]

    sample = network.calibration[0]
    graphdef, state = nnx.split(network.model)
    call = jax.jit(lambda *args: jax.tree.leaves(nnx.merge(graphdef, state, copy=True)(*args)))
    lowered: Any = call.lower(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in sample))
    text = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=None)
    wanted = call(*sample)
    context = ir.Context()
    api.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        names = {"input_names": _names("input", len(sample)), "output_names": _names("output", len(wanted))}
        api.set_signature(module.operation, signature_name=_SIGNATURE, **names)
        module = api.merge_modules([module])
        config = api.ConvertToTFLConfig()
        config.model_origin_framework = "JAX"
        api.run_convert_to_tfl_passes(module, passmanager.PassManager(), config)
        content = api.export_flatbuffer_to_bytes(module.operation)
    for y, x in zip(wanted, _run(content)(*sample), strict=True):
        worst = float(np.abs(y - x).max() / np.abs(y).max())
        if not worst <= TOLERANCE:
            raise ValueError(f"litert-converter: expected the network's outputs to {TOLERANCE}, got {worst}.")
    return content


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}{index}" for index in range(count)]


def _run(content: bytes) -> Callable[..., tuple[np.ndarray, ...]]:
    """The file, as a function of floats."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter: Any = Interpreter(model_content=content, num_threads=2)
    runner = interpreter.get_signature_runner(_SIGNATURE)
    inputs, outputs = runner.get_input_details(), runner.get_output_details()

    def call(*batch: np.ndarray) -> tuple[np.ndarray, ...]:
        feed = {name: codes(x, inputs[name]) for name, x in zip(_names("input", len(batch)), batch, strict=True)}
        found = runner(**feed)
        return tuple(reals(found[name], outputs[name]) for name in _names("output", len(found)))

    return call


def codes(x: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """An input as its tensor holds it."""
    scale, zero_point = detail["quantization"]
    if not scale:
        return x
    kind = np.iinfo(detail["dtype"])
    return np.clip(np.round(x / scale) + zero_point, kind.min, kind.max).astype(detail["dtype"])


def reals(y: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """An output in floats."""
    scale, zero_point = detail["quantization"]
    return (y.astype(np.float32) - zero_point) * np.float32(scale) if scale else y


def _quantized(network: Network, setting: Setting, *, exact: bool, static: bool, algorithm: str) -> Result:
    del exact
    from ai_edge_quantizer import quantizer  # pyright: ignore[reportMissingImports]

    if setting.activations != 8:
        raise NotImplementedError("ai-edge-quantizer has activations of 8 or 16 bits")
    content = _float_file(network)
    begin = time.perf_counter()
    work = quantizer.Quantizer(bytearray(content))
    options = {"regex": ".*", "operation_name": "*", "algorithm_key": algorithm}
    if static:
        work.add_static_config(activation_num_bits=setting.activations, weight_num_bits=setting.weights, **options)
    else:
        work.add_dynamic_config(num_bits=setting.weights, **options)
    found: Any = None
    if work.need_calibration:
        names = _names("input", len(network.calibration[0]))
        feeds = [dict(zip(names, batch, strict=True)) for batch in network.calibration]
        found = work.calibrate({_SIGNATURE: feeds})
    made = bytes(work.quantize(found).quantized_model)
    seconds = time.perf_counter() - begin
    call = in_batches(_run(made), len(network.calibration[0][0]))
    return Result(outputs_of(call, network.test), seconds)


EDGE: dict[str, Callable[..., Result]] = {
    "ai-edge-quantizer static": functools.partial(_quantized, static=True, algorithm="min_max_uniform_quantize"),
    "ai-edge-quantizer dynamic": functools.partial(_quantized, static=False, algorithm="min_max_uniform_quantize"),
}
