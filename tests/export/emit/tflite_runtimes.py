"""The living runtimes of .tflite files: every tensor that they compute, by name."""

import importlib
import warnings
from collections.abc import Sequence

import numpy as np

from conformance.runtimes.litert import RESOLVERS
from qjax.export.emit.tflite import to_bytes
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter

MODES = {
    "tflite_reference": "reference",
    "tflite_optimized_x86": "optimized",
    "tflite_xnnpack": "xnnpack",
}
"""By target, the mode of LiteRT that it models."""

TARGETS = ("tflite_micro", *MODES)


def litert(data: bytes, mode: str, inputs: Sequence[np.ndarray], *, every: bool = True) -> dict[str, np.ndarray]:
    """The tensors of a model under LiteRT; every: all of them, else the outputs only (and every optimisation)."""
    module = importlib.import_module("ai_edge_litert.interpreter")
    with warnings.catch_warnings():
        # it says that keeping every tensor takes memory
        warnings.filterwarnings("ignore", "Warning: Enabling `experimental_preserve_all_tensors`")
        interpreter = module.Interpreter(
            model_content=data,
            experimental_op_resolver_type=getattr(module.OpResolverType, RESOLVERS[mode]),
            experimental_preserve_all_tensors=every,
            num_threads=1,
        )
    for details, x in zip(interpreter.get_input_details(), inputs, strict=True):
        if tuple(details["shape"]) != x.shape:
            interpreter.resize_tensor_input(details["index"], x.shape)
    interpreter.allocate_tensors()
    for details, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(details["index"], np.ascontiguousarray(x))
    interpreter.invoke()
    wanted = interpreter.get_tensor_details() if every else interpreter.get_output_details()
    found = {}
    for details in wanted:
        try:
            found[details["name"]] = interpreter.get_tensor(details["index"])
        except ValueError:
            # an intermediate that lives inside of XNNPACK
            continue
    return found


def micro(data: bytes, inputs: Sequence[np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
    """The outputs of a model under TFLite Micro."""
    interpreter = importlib.import_module("tflite_micro").runtime.Interpreter.from_bytes(data, arena_size=1 << 24)
    for index, x in enumerate(inputs):
        interpreter.set_input(np.ascontiguousarray(x), index)
    interpreter.invoke()
    return {name: np.array(interpreter.get_output(index)) for index, name in enumerate(outputs)}


def everything(graph: Graph) -> Graph:
    """The graph with every intermediate tensor among its outputs."""
    rest = tuple(node.output for node in graph.nodes if node.output not in graph.outputs)
    return graph.replace(outputs=(*graph.outputs, *rest))


def random_codes(graph: Graph, batch: int, seed: int = 0) -> list[np.ndarray]:
    """Inputs over the whole range of codes, all edges among them."""
    rng = np.random.default_rng(seed)
    found = []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        shape = tuple(batch if size is None else size for size in tensor.shape)
        q = tensor.quantization
        low, high = (-3, 12) if q is None else (q.qmin, q.qmax)
        codes = rng.integers(low, high + 1, shape)
        for index, example in enumerate(codes):
            if index % 4 == 1:
                # blocks of extremes
                example[...] = np.where(rng.random(example.shape) < 0.5, low, high)
            elif index % 4 == 2:
                example[...] = low if index % 8 == 2 else high
        found.append(codes.astype(tensor.dtype))
    return found


def compared(graph: Graph, batch: int = 8, seed: int = 0, **options) -> tuple[int, dict[str, int]]:
    """Values compared, and mismatches by node, of a graph and the runtime of its target, node by node and whole."""
    inputs = random_codes(graph, batch, seed)
    whole = everything(graph)
    expected = dict(zip(whole.outputs, map(np.asarray, Interpreter(whole)(*inputs)), strict=True))
    runs = []
    if graph.target == "tflite_micro":
        runs.append(micro(to_bytes(whole, batch=batch, **options), inputs, whole.outputs))
        runs.append(micro(to_bytes(graph, batch=batch, **options), inputs, graph.outputs))
    else:
        mode = MODES[graph.target]
        runs.append(litert(to_bytes(graph, batch=batch, **options), mode, inputs))
        runs.append(litert(to_bytes(whole, batch=batch, **options), mode, inputs, every=False))
        runs.append(litert(to_bytes(graph, batch=batch, **options), mode, inputs, every=False))
    count, wrong = 0, {}
    for index, run in enumerate(runs):
        names = graph.outputs if index == len(runs) - 1 else whole.outputs
        for name in names:
            if name not in run and index == 0 and graph.target == "tflite_xnnpack":
                continue
            same = run[name] == expected[name]
            assert run[name].shape == expected[name].shape, name
            count += same.size
            if not same.all():
                wrong[name] = wrong.get(name, 0) + int((~same).sum())
    return count, wrong
