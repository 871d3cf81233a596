"""Finds the result of a runtime's kernel for every code by running it.

An elementwise kernel of codes is a table of 256 or 65,536 entries, whatever its formula: a model of that one operator
is written and run by the runtime that is the target. Float steps between codes are such a table too (`chains`).
"""

import dataclasses
import functools
import importlib
import platform
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.chains import Chain, Source
from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.file import File, Scales
from qjax.graph.ir import Quantization

_LITERT = {
    "tflite_reference": ("BUILTIN_REF", ("x86_64", "AMD64", "aarch64", "arm64")),
    "tflite_optimized_x86": ("BUILTIN_WITHOUT_DEFAULT_DELEGATES", ("x86_64", "AMD64")),
    "tflite_xnnpack": ("AUTO", ("x86_64", "AMD64")),
    "tflite_optimized_arm": ("BUILTIN_WITHOUT_DEFAULT_DELEGATES", ("aarch64", "arm64")),
    "tflite_xnnpack_arm": ("AUTO", ("aarch64", "arm64")),
}
"""target -> the set of kernels in LiteRT, and the machines that have them."""

RUNTIMES = (*_LITERT, "tflite_micro", "cmsis_nn")


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """An operator of one tensor of codes, element by element; options: fields of its options in the schema."""

    operator: str
    options: Mapping[str, Any]
    dtype: str
    x: Quantization
    y: Quantization


def codes_of(function: Function | Chain, target: str) -> np.ndarray:
    """The codes that the kernel computes for every code of its input, in order; for a chain, for every pair.

    Raises:
      ReadError: the runtime is not installed, is not that of this machine, or has no such kernel.
    """
    if isinstance(function, Chain):
        names = [*(_leaf(source) for source in function.sources), *(step.operator for step in function.steps)]
        what = f"{function.operator or ', '.join(names) + ' and QUANTIZE to'} {function.dtype}"
        return _run(_model_of_chain(function), [x[None] for x in function.values], target, what)
    info = np.iinfo(function.dtype)
    codes = np.arange(info.min, int(info.max) + 1).astype(function.dtype)[None]
    return _run(_model(function), [codes], target, f"{function.operator} of {function.dtype}")


def _model(function: Function) -> bytes:
    info = np.iinfo(function.dtype)
    shape = (1, int(info.max) - int(info.min) + 1)
    file = File()
    indices = [
        file.tensor(name, shape, function.dtype, Scales(grid.scale, grid.zero_point))
        for name, grid in (("x", function.x), ("y", function.y))
    ]
    file.operator(function.operator, indices[:1], indices[1:], **function.options)
    return bytes(file.to_bytes(indices[:1], indices[1:]))


def _leaf(source: Source) -> str:
    """The operator that turns a source into floats."""
    return "CAST" if source.grid is None else "DEQUANTIZE"


def _model_of_chain(chain: Chain) -> bytes:
    file, shape = File(), (1, chain.values[0].size)
    inputs: list[int] = []
    values: list[int] = []
    for source in chain.sources:
        scales = None if source.grid is None else Scales(source.grid.scale, source.grid.zero_point)
        inputs.append(file.tensor(f"x{len(inputs)}", shape, source.dtype, scales))
        if chain.operator:
            continue
        values.append(file.tensor(f"real{len(inputs)}", shape, "float32"))
        options = {"inDataType": source.dtype, "outDataType": "float32"} if source.grid is None else {}
        file.operator(_leaf(source), inputs[-1:], values[-1:], **options)
    for step in () if chain.operator else chain.steps:
        operands = [
            values[operand]
            if isinstance(operand, int)
            else file.tensor(f"number{len(file.tensors)}", (1,), "float32", None, np.asarray([operand], np.float32))
            for operand in step.operands
        ]
        values.append(file.tensor(f"step{len(values)}", shape, "float32"))
        file.operator(step.operator, operands, values[-1:])
    y = file.tensor("y", shape, chain.dtype, Scales(chain.y.scale, chain.y.zero_point))
    file.operator(chain.operator or "QUANTIZE", values[-1:] or inputs, [y])
    return bytes(file.to_bytes(inputs, [y]))


def _run(model: bytes, inputs: Sequence[np.ndarray], target: str, what: str) -> np.ndarray:
    other = "Read it with the target of another runtime, or with target='nearest_even' for the correctly rounded table."
    kernel = f"{what} under {target!r}"
    if target not in _LITERT and target != "tflite_micro":
        raise ReadError(f"{kernel}: its kernel is not on this machine, and qjax has no formula of it. {other}")
    resolver, machines = _LITERT.get(target, ("", (platform.machine(),)))
    if platform.machine() not in machines:
        raise ReadError(f"{kernel}: that runtime is on {machines[0]}, this machine is {platform.machine()}. {other}")
    package = "ai_edge_litert.interpreter" if resolver else "tflite_micro"
    try:
        module = importlib.import_module(package)
    except ImportError:
        name = package.split(".")[0].replace("_", "-")
        raise ReadError(f"{kernel}: qjax runs the runtime to get its codes, but {name} is missing. {other}") from None
    run = functools.partial(_litert, module, resolver) if resolver else functools.partial(_micro, module)
    try:
        return run(model, inputs)[0]
    except (RuntimeError, ValueError, SystemError) as error:
        raise ReadError(f"{kernel}: the runtime has no such kernel ({str(error)[:120]}). {other}") from None


def _litert(module: Any, resolver: str, model: bytes, inputs: Sequence[np.ndarray]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = module.Interpreter(
            model_content=model,
            experimental_op_resolver_type=getattr(module.OpResolverType, resolver),
            num_threads=1,
        )
    interpreter.allocate_tensors()
    for details, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(details["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def _micro(module: Any, model: bytes, inputs: Sequence[np.ndarray]) -> np.ndarray:
    interpreter = module.runtime.Interpreter.from_bytes(model, arena_size=(1 << 16) + 64 * inputs[0].size)
    for place, x in enumerate(inputs):
        interpreter.set_input(x, place)
    interpreter.invoke()
    return np.array(interpreter.get_output(0))
