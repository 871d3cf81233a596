"""One public file: read under every runtime's target, its codes counted beside the runtime's, as C, and retargeted."""

import ast
import dataclasses
import importlib
import json
import multiprocessing
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import qjax
from qjax import runtimes
from qjax.run.interpreter import Interpreter

CALLS = 3
"""Runs, one after the other: a model may keep a state from one to the next."""
TARGETS = {"reference": "tflite_reference", "XNNPACK": "tflite_xnnpack", "Micro": "tflite_micro"}
MODES = {"reference": "BUILTIN_REF", "XNNPACK": "AUTO"}
_PART = re.compile(r"with outputs=(\[.*?\]), and compute")
_LONGEST = 180
TIMEOUT = 600
"""Seconds for one measurement."""

Step = Callable[[Sequence[tuple[np.ndarray, Any]]], dict[str, np.ndarray]]
"""Codes of the inputs, each with its tensor -> arrays by the names of tensors."""


@dataclasses.dataclass
class Count:
    """Codes that were compared, and those that differ; error: why there are none."""

    compared: int = 0
    differ: int = 0
    error: str = ""


@dataclasses.dataclass
class Row:
    """What became of a file.

    operators: of the file. kinds: their names. nodes: of the graph under the reference target. part: the tensors that
    became its outputs, where the whole model is not read. error: why it is not read. counts: by the keys of `TARGETS`.
    c, onnx: the emitted C, and the graph under ONNX Runtime's target as .onnx, beside the interpreter.
    """

    repository: str
    path: str
    dtype: str = ""
    operators: int = 0
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    nodes: int = 0
    part: list[str] = dataclasses.field(default_factory=list)
    error: str = ""
    counts: dict[str, Count] = dataclasses.field(default_factory=dict)
    c: Count = dataclasses.field(default_factory=Count)
    onnx: Count = dataclasses.field(default_factory=Count)


def described(path: Path) -> tuple[list[str], str, bool] | None:
    """The operators of a file, the types of its inputs, and whether it holds codes; None for a file that is none."""
    schema: Any = importlib.import_module("ai_edge_litert.schema_py_generated")
    try:
        model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
        names = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
        types = {value: name.lower() for name, value in vars(schema.TensorType).items() if isinstance(value, int)}
        codes = [max(code.builtinCode, code.deprecatedBuiltinCode) for code in model.operatorCodes]
        operators = [names.get(codes[o.opcodeIndex], "?") for o in model.subgraphs[0].operators or []]
        tensors = model.subgraphs[0].tensors
        inputs = sorted({types[tensors[index].type] for index in model.subgraphs[0].inputs})
    except Exception:  # a file of another kind fails anywhere in there
        return None
    quantized = any(
        types[t.type] in ("int8", "uint8", "int16") and t.quantization is not None and t.quantization.scale is not None
        for t in tensors
    )
    return operators, " ".join(inputs), quantized


def run(repository: str, folder: Path, path: Path) -> Row:
    """The row of a file. Each measurement has a process of its own, because a runtime may crash it.

    The caller must not have started JAX, whose threads a fork does not copy.
    """
    found = described(path)
    assert found is not None
    row = Row(repository, path.relative_to(folder).as_posix(), found[1], len(found[0]), dict(Counter(found[0])))
    read = _apart(lambda: _looked_at(path))
    if isinstance(read, str):
        row.error = read
        return row
    row.nodes, row.part = read
    for name in TARGETS:
        row.counts[name] = _count_of(lambda name=name: _counted(name, path, row.part))
    row.c = _count_of(lambda: _emitted("c", _read(path)[0], {}))
    row.onnx = _count_of(lambda: _emitted("onnxruntime", _read(path)[0].retarget("onnxruntime"), {"style": "integer"}))
    return row


def _apart(work: Callable[[], Any]) -> Any:
    """What a function returns, which JSON holds, from a process of its own; a text that says why there is nothing."""

    def write() -> None:
        try:
            result.write_text(json.dumps(work()))
        except Exception as error:
            result.write_text(json.dumps(_short(str(error))))

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        process = multiprocessing.get_context("fork").Process(target=write)
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            return f"not done after {TIMEOUT} s"
        return json.loads(result.read_text()) if result.exists() else f"the process ended with {process.exitcode}"


def _count_of(work: Callable[[], Count]) -> Count:
    found = _apart(lambda: dataclasses.asdict(work()))
    return Count(error=found) if isinstance(found, str) else Count(**found)


def _looked_at(path: Path) -> tuple[int, list[str]] | str:
    try:
        graph, part = _read(path)
    except Exception as error:
        return _short(str(error).replace(f"{path}: ", ""))
    return len(graph.ir.nodes), part


def _read(path: Path) -> tuple[Any, list[str]]:
    """The graph under the reference target, or under TFLite Micro's where only it has a kernel.

    Of a part where the whole has operators without integers.
    """
    try:
        return qjax.read(path, TARGETS["reference"]), []
    except Exception as error:
        parts = [ast.literal_eval(text) for text in _PART.findall(str(error))]
        others = [("reference", parts[0])] if parts else [("Micro", [])]
        for name, part in others:
            try:
                return qjax.read(path, TARGETS[name], outputs=part or None), part
            except Exception:
                continue
        raise


def _counted(name: str, path: Path, part: list[str]) -> Count:
    """The file under a runtime, call after call, beside the graph: every tensor for the reference kernels."""
    try:
        graph = qjax.read(path, TARGETS[name], outputs=part or None)
        ir = graph.ir
        if name == "reference":
            rest = tuple(node.output for node in ir.nodes if node.output not in ir.outputs)
            ir = ir.replace(outputs=(*ir.outputs, *rest))
        # the last outputs are what the states become
        outputs = () if part else graph.ir.outputs[: len(graph.ir.outputs) - len(ir.metadata.get("states", []))]
        inner = frozenset(ir.outputs) if name == "reference" or part else frozenset[str]()
        runtime = _micro(path, outputs) if name == "Micro" else _litert(path, MODES[name], inner, outputs)
        count, interpreter = Count(), Interpreter(ir)
        states = {s["input"]: s for s in ir.metadata.get("states", [])}
        held = {name: np.full(_shape(ir, name), s["first"], ir.tensors[name].dtype) for name, s in states.items()}
        own = [name for name in ir.inputs if name not in states]
        for call in range(CALLS):
            given = {name: _codes(ir, name, call) for name in own}
            values = interpreter(*(given[name] if name in given else held[name] for name in ir.inputs))
            ours = dict(zip(ir.outputs, map(np.asarray, values), strict=True))
            theirs = runtime([(given[name], ir.tensors[name]) for name in own])
            held = {name: ours[s["output"]] for name, s in states.items()}
            for key in ours.keys() & theirs.keys():
                if theirs[key].shape == ours[key].shape:
                    count.compared += ours[key].size
                    count.differ += int((ours[key] != _as_codes(theirs[key], ir.tensors[key])).sum())
        return count if count.compared else Count(error="no tensor to compare")
    except Exception as error:
        return Count(error=_short(str(error).replace(f"{path}: ", "")))


def _litert(path: Path, mode: str, inner: Collection[str], outputs: Sequence[str]) -> Step:
    """LiteRT on the file itself; its outputs by the graph's names, and those of the inner tensors that it keeps."""
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keeping every tensor takes memory, it says
        interpreter = module.Interpreter(
            model_path=str(path),
            experimental_op_resolver_type=getattr(module.OpResolverType, mode),
            experimental_preserve_all_tensors=bool(inner),
            num_threads=1,
        )
    interpreter.allocate_tensors()
    inputs = interpreter.get_input_details()
    kept = [one for one in interpreter.get_tensor_details() if one["name"] in inner]

    def step(given: Sequence[tuple[np.ndarray, Any]]) -> dict[str, np.ndarray]:
        for one, (codes, tensor) in zip(inputs, given, strict=True):
            interpreter.set_tensor(one["index"], _as_input(codes, tensor, one["dtype"]))
        interpreter.invoke()
        found: dict[str, np.ndarray] = {}
        for one in kept:
            try:
                found[one["name"]] = interpreter.get_tensor(one["index"])
            except ValueError:  # a tensor within XNNPACK
                continue
        last = zip(outputs, interpreter.get_output_details(), strict=False)
        return found | {name: interpreter.get_tensor(one["index"]) for name, one in last}

    return step


def _micro(path: Path, outputs: Sequence[str]) -> Step:
    runtime: Any = importlib.import_module("tflite_micro").runtime
    interpreter = runtime.Interpreter.from_file(str(path), arena_size=1 << 26)

    def step(given: Sequence[tuple[np.ndarray, Any]]) -> dict[str, np.ndarray]:
        for index, (codes, tensor) in enumerate(given):
            kind = interpreter.get_input_details(index)["dtype"]
            interpreter.set_input(_as_input(codes, tensor, kind), index)
        interpreter.invoke()
        return {name: np.array(interpreter.get_output(index)) for index, name in enumerate(outputs)}

    return step


def _shape(ir: Any, name: str) -> list[int]:
    return [size or 1 for size in ir.tensors[name].shape]


def _codes(ir: Any, name: str, seed: int) -> np.ndarray:
    """Codes over the whole range, then around zero."""
    tensor = ir.tensors[name]
    rng, shape, q = np.random.default_rng(seed), _shape(ir, name), tensor.quantization
    if tensor.dtype == "int32" and shape == [4] and not any(name in node.inputs for node in ir.nodes):
        # the size of a transposed convolution's result, which the graph has from the file
        return np.asarray(_shape(ir, ir.outputs[0]), np.int32)
    if q is None:
        return rng.integers(0, {"bool": 2, "uint8": 256}.get(tensor.dtype, 100), shape).astype(tensor.dtype)
    spread = (q.qmax - q.qmin) / (1 if seed % 2 == 0 else 8)
    codes = rng.integers(-int(spread), int(spread) + 1, shape) // 2 + int(q.zero_point)
    return codes.clip(q.qmin, q.qmax).astype(tensor.dtype)


def _as_input(codes: np.ndarray, tensor: Any, dtype: Any) -> np.ndarray:
    """Codes as they are; for an input of floats, what its QUANTIZE turns into these codes."""
    q = tensor.quantization
    if np.dtype(dtype) != np.float32 or q is None:
        return np.ascontiguousarray(codes.astype(dtype))
    return ((codes.astype(np.float64) - int(q.zero_point)) * float(q.scale)).astype(np.float32)


def _as_codes(values: np.ndarray, tensor: Any) -> np.ndarray:
    """The codes of an output of floats."""
    q = tensor.quantization
    if values.dtype != np.float32 or q is None:
        return values
    return np.rint(values.astype(np.float64) / float(q.scale)) + int(q.zero_point)


def _emitted(runtime: str, graph: Any, options: dict[str, Any]) -> Count:
    """What is emitted for a runtime, beside the interpreter, for one call."""
    ir = graph.ir
    inputs = [_codes(ir, name, 0) for name in ir.inputs]
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = runtimes.prepare(runtime, graph, folder, 1, options)(inputs)
        wanted = [np.asarray(value) for value in Interpreter(ir)(*inputs)]
    except Exception as error:
        return Count(error=_short(str(error)))
    differ = sum(int((a != b).sum()) for a, b in zip(found, wanted, strict=True))
    return Count(sum(value.size for value in wanted), differ)


def _short(message: str) -> str:
    """The first obstacle of an error, and how many there are."""
    lines = message.strip().splitlines() or [""]
    text = lines[1].strip() if len(lines) > 1 and lines[1].startswith("  ") else lines[0]
    text = re.sub(r"'([^' ]{12})[^']{12,}'", r"'\1...'", text)  # names of fused layers are long
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    return text if len(lines) < 3 else f"{text} And {len(lines) - 2} more."
