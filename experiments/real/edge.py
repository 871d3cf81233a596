"""LiteRT's own quantizer on the same networks: `ai-edge-quantizer`, run by LiteRT.

`litert-converter` makes the float `.tflite` file of the Flax network out of JAX's StableHLO. All of it runs in a
process of its own, because it ends with a segmentation fault on minilm.
"""

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.real.methods import SETTINGS, Result, Setting, in_batches, outputs_of
from experiments.real.network import Network

TOLERANCE = 1e-4
"""How far the file's float outputs may be from the network's, in parts of the greatest output."""

_SIGNATURE = "serving_default"


def float_file(model: Any, sample: tuple[np.ndarray, ...]) -> bytes:
    """The float network for the sample's size of batch, checked against the network itself."""
    from litert_converter.mlir import ir, passmanager  # pyright: ignore[reportMissingImports]
    from litert_converter.mlir._mlir_libs import converter_api_ext as api  # pyright: ignore[reportMissingImports]

    graphdef, state = nnx.split(model)
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


def quantized(network: Network, setting: Setting, *, exact: bool, kind: str) -> Result:
    """A row of a process of its own; kind: "static" or "dynamic"."""
    del exact
    if setting.activations != 8:
        raise NotImplementedError("ai-edge-quantizer has activations of 8 or 16 bits")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "outputs.npz")
        command = [sys.executable, "-m", "experiments.real.edge", network.name, str(setting), kind, str(path)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] if done.returncode > 0 else []
            raise RuntimeError(" ".join([f"ai-edge-quantizer ended with code {done.returncode}.", *said]))
        with np.load(path) as file:
            outputs = tuple(file[name] for name in _names("output", len(file.files) - 1))
            return Result(outputs, float(file["seconds"]))


def _made(network: Network, setting: Setting, kind: str) -> Result:
    """The same in this process."""
    content = float_file(network.model, network.calibration[0])
    begin = time.perf_counter()
    made = quantized_file(content, network.calibration, setting, kind)
    seconds = time.perf_counter() - begin
    call = in_batches(_run(made), len(network.calibration[0][0]))
    return Result(outputs_of(call, network.test), seconds)


def quantized_file(content: bytes, calibration: Sequence[tuple[np.ndarray, ...]], setting: Setting, kind: str) -> bytes:
    """A float file of `float_file`, quantized; kind: "static" or "dynamic"."""
    from ai_edge_quantizer import quantizer  # pyright: ignore[reportMissingImports]

    work = quantizer.Quantizer(bytearray(content))
    options = {"regex": ".*", "operation_name": "*"}
    if kind == "static":
        work.add_static_config(activation_num_bits=setting.activations, weight_num_bits=setting.weights, **options)
    else:
        work.add_dynamic_config(num_bits=setting.weights, **options)
    found: Any = None
    if work.need_calibration:
        names = _names("input", len(calibration[0]))
        feeds = [dict(zip(names, batch, strict=True)) for batch in calibration]
        found = work.calibrate({_SIGNATURE: feeds})
    return bytes(work.quantize(found).quantized_model)


EDGE: dict[str, Callable[..., Result]] = {
    f"ai-edge-quantizer {kind}": functools.partial(quantized, kind=kind) for kind in ("static", "dynamic")
}


def main(name: str, setting: str, kind: str, path: str) -> None:
    """Write a row's outputs and its seconds."""
    from experiments.real.networks import NETWORKS

    result = _made(NETWORKS[name](), SETTINGS[setting], kind)
    outputs = dict(zip(_names("output", len(result.outputs)), result.outputs, strict=True))
    np.savez(path, allow_pickle=False, seconds=np.float64(result.seconds), **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
