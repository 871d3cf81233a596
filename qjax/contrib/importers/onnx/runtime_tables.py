"""The result of every code between DequantizeLinear and QuantizeLinear, computed by ONNX Runtime itself.

A float function of one variable has as many results as its input has codes. The last bits of a runtime's exp or erf
depend on its build, so they are not modelled. Instead a model of that one function, built here from checked numbers, is
run over all codes once, if the package onnxruntime is installed.
"""

import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

import numpy as np

from qjax.contrib.importers.onnx.tensors import code_range
from qjax.export.onnx_ops import MICROSOFT

INT8_OPTION = "session.qdqisint8allowed"

_OFFSETS = 17
"""An element's position in a vector register, or after the last whole one, may select another formula in a kernel."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator of one variable. attributes: sorted pairs. constant: a scalar operand that follows, or None."""

    op: str
    domain: str
    attributes: tuple[tuple[str, float | int | str], ...] = ()
    constant: float | None = None


@dataclasses.dataclass(frozen=True)
class Question:
    """A chain of functions between two grids (dtype, scale, zero point); on_codes: the last one's operator on codes."""

    steps: tuple[Step, ...]
    x: tuple[str, float, int]
    y: tuple[str, float, int]
    opset: int
    on_codes: str | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of running the runtime.

    codes: one for each code of x, in order; None if they depend on an element's position in the tensor. option: a
    session option without which they would differ; None if no option is needed.
    """

    codes: np.ndarray | None
    option: str | None


def is_installed() -> bool:
    """Whether the runtime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


@functools.lru_cache(maxsize=1024)
def answer(question: Question) -> Answer:
    """Run the runtime. Raises ValueError if it has no kernel for the question."""
    runtime: Any = importlib.import_module("onnxruntime")
    data = _model(question)
    low, high = code_range(question.x[0])
    codes = np.arange(low, high + 1).astype(question.x[0])
    try:
        found = _run(runtime, data, codes, {INT8_OPTION: "1"})
        plain = _run(runtime, data, codes, {}) if "int8" in (question.x[0], question.y[0]) else found
    except Exception as error:
        raise ValueError(f"ONNX Runtime refuses it: {str(error).splitlines()[0][:200]}") from None
    if found is None or plain is None:
        return Answer(None, None)
    return Answer(found, None if np.array_equal(found, plain) else INT8_OPTION)


def _run(runtime: Any, data: bytes, codes: np.ndarray, config: dict[str, str]) -> np.ndarray | None:
    """The result for every code, or None if one code has two."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(x: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {"x": x})[0])

    found = run(codes)
    if not np.array_equal(run(codes[::-1].copy())[::-1], found):
        return None
    for offset in range(1, _OFFSETS if codes.size <= 256 else 4):
        moved = run(np.concatenate([codes[:offset], codes, codes[: offset * 7 % 19]]))
        if not np.array_equal(moved[offset : offset + codes.size], found):
            return None
    return found


def _model(question: Question) -> bytes:
    onnx: Any = importlib.import_module("onnx")
    helper, constants = onnx.helper, dict[str, Any]()
    for name, (dtype, scale, zero_point) in (("x", question.x), ("y", question.y)):
        constants |= {f"{name}_scale": np.float32(scale), f"{name}_zero_point": np.asarray(zero_point, dtype)}
    grids = [[f"{name}_scale", f"{name}_zero_point"] for name in ("x", "y")]
    nodes: list[Any] = []
    if question.on_codes is not None:
        (step,) = question.steps
        operands = ["x", *grids[0], *grids[1]]
        nodes.append(helper.make_node(question.on_codes, operands, ["y"], domain=MICROSOFT, **dict(step.attributes)))
    else:
        nodes.append(helper.make_node("DequantizeLinear", ["x", *grids[0]], ["real0"]))
        for index, step in enumerate(question.steps):
            operands = [f"real{index}"]
            if step.constant is not None:
                constants[f"constant{index}"] = np.float32(step.constant)
                operands.append(f"constant{index}")
            made = helper.make_node(
                step.op, operands, [f"real{index + 1}"], domain=step.domain or None, **dict(step.attributes)
            )
            nodes.append(made)
        nodes.append(helper.make_node("QuantizeLinear", [f"real{len(question.steps)}", *grids[1]], ["y"]))
    ports = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n"])
        for name, (dtype, _, _) in (("x", question.x), ("y", question.y))
    ]
    held = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "function", ports[:1], ports[1:], held)
    opsets = [helper.make_opsetid("", question.opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
