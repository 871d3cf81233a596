"""Tokens per second of one step of a decoder with a key-value cache: `python -m benchmarks.decoding`.

The decoder of `experiments.language_cache`, with random weights, writes one token in the middle of its cache. float32
is the model itself, compiled by XLA. The others compute the W8A8 graph: the interpreter (`graph.step` under `jax.jit`),
ONNX Runtime (style "integer") and the emitted C (simd=True), which has one thread. All take turns, step by step, and a
ratio is the median over the turns. Their codes are compared first. Exit code 1: codes differ.
"""

import argparse
import ctypes
import dataclasses
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
from flax import nnx

import qjax
from experiments import language_cache
from experiments.language import Decoder
from qjax.contrib.lab.machine import machine
from qjax.graph import state as states

COMPILER = ("cc", "-std=c99", "-O3", "-march=native", "-shared", "-fPIC")
_SIZE = '#include <stddef.h>\n#include "net.h"\nsize_t net_state_size(void) { return sizeof(net_state); }\n'


@dataclasses.dataclass(frozen=True)
class Row:
    """seconds: of each step, in the order of the turns."""

    name: str
    seconds: np.ndarray


class InC:
    """The emitted C as a library of this process."""

    def __init__(self, graph: qjax.IntegerGraph, folder: Path) -> None:
        graph.emit("c", folder, name="net", batch=1, vectors=0, simd=True)
        (folder / "size.c").write_text(_SIZE)
        subprocess.run([*COMPILER, "-o", "net.so", "net.c", "size.c"], cwd=folder, check=True)
        library = ctypes.CDLL(str(folder / "net.so"))
        library.net_state_size.restype = ctypes.c_size_t
        found = re.search(r"^#define NET_ARENA_SIZE (\d+)$", (folder / "net.h").read_text(), flags=re.M)
        assert found is not None
        self._state = np.zeros(library.net_state_size() // 8 + 1, np.int64)
        self._arena = np.zeros(int(found[1]) // 8 + 1, np.int64)
        self._step = library.net_step
        self._step.restype, self._step.argtypes = None, [ctypes.c_void_p] * 5
        library.net_init(ctypes.c_void_p(self._state.ctypes.data))
        (scores, *_) = graph.ir.outputs
        tensor = graph.ir.tensors[scores]
        self._scores = np.zeros([1 if n is None else n for n in tensor.shape], tensor.dtype)

    def __call__(self, token: np.ndarray, place: np.ndarray) -> np.ndarray:
        arrays = (self._state, token, place, self._scores, self._arena)
        self._step(*(array.ctypes.data for array in arrays))
        return self._scores


class InOnnx:
    """The ONNX file in ONNX Runtime, whose session gets the state of the step before."""

    def __init__(self, graph: qjax.IntegerGraph, folder: Path) -> None:
        graph.emit("onnx", folder / "net.onnx", style="integer", batch=1)
        self._session = onnxruntime.InferenceSession(str(folder / "net.onnx"), providers=["CPUExecutionProvider"])
        names = dict(zip(graph.ir.inputs, (x.name for x in self._session.get_inputs()), strict=True))
        self._next = {names[part.input]: part.output for part in states.parts(graph.ir) if part.input is not None}
        self._token, self._place = (name for name in names.values() if name not in self._next)
        leaves = jax.tree.leaves(graph.state(batch=1))
        self._state = dict(zip(self._next, map(np.asarray, leaves), strict=True))

    def __call__(self, token: np.ndarray, place: np.ndarray) -> np.ndarray:
        found = self._session.run(None, {self._token: token, self._place: place, **self._state})
        self._state = {name: found[position] for name, position in self._next.items()}
        return np.asarray(found[0])


def compiled(step: Callable[..., Any], state: Any) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """(token, place) -> scores of a pure step, which keeps its state between the calls."""
    run, kept = jax.jit(step), [state]

    def call(token: np.ndarray, place: np.ndarray) -> jax.Array:
        scores, kept[0] = run(kept[0], token, place)
        return scores

    return call


def sides(width: int, layers: int, length: int, folder: Path) -> tuple[int, dict[str, Callable[..., Any]], int]:
    """The parameters, what takes turns, and how many codes of a text differ from the interpreter's."""
    model = language_cache.Cached(Decoder(width, layers, length))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, (4, length)).astype(np.int32) for _ in range(2)]
    arguments = [language_cache.arguments(model, text) for text in texts]
    qmodel = qjax.quantize(model, language_cache.RECIPES["W8A8, int8 cache"], arguments[0])
    qjax.calibrate(qmodel, arguments)
    qmodel.eval()
    graph = qjax.convert(qmodel, language_cache.arguments(model, texts[0][:, :1]), state="cache")
    definition, numbers = nnx.split(model)

    def floats(cache: Any, token: Any, place: Any) -> Any:
        return nnx.merge(definition, numbers)(token, place, cache)

    empty = language_cache.arguments(model, texts[0][:1, :1])[2]
    integers: dict[str, Callable[..., Any]] = {
        "interpreter": compiled(graph.step, graph.state(batch=1)),
        "ONNX Runtime": InOnnx(graph, folder),
        "C": InC(graph, folder),
    }
    (output,) = graph.ir.outputs[:1]
    quantization = graph.ir.tensors[output].quantization
    assert quantization is not None
    differ = 0
    for place in range(min(length, 16)):
        token, at = texts[0][:1, place : place + 1], np.full((1, 1), place, np.int32)
        scores = np.asarray(integers["interpreter"](token, at))
        codes = np.rint(scores / np.float64(quantization.scale)) + quantization.zero_point
        differ += sum(int((integers[name](token, at) != codes).sum()) for name in ("ONNX Runtime", "C"))
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(numbers))
    return parameters, {"float32, XLA": compiled(floats, empty), **integers}, differ


def turns(calls: dict[str, Callable[..., Any]], place: int, count: int) -> list[Row]:
    """Every side in turn."""
    token, at = np.full((1, 1), 7, np.int32), np.full((1, 1), place, np.int32)
    for call in calls.values():
        jax.block_until_ready(call(token, at))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call(token, at))
            seconds[name].append(time.perf_counter() - begin)
    return [Row(name, np.asarray(found)) for name, found in seconds.items()]


def table(rows: list[Row]) -> str:
    """As Markdown; the first row is what the others are compared with."""
    lines = ["| step | tokens per second | times as fast as float32 | quartiles |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        low, middle, high = np.quantile(rows[0].seconds / row.seconds, (0.25, 0.5, 0.75))
        lines.append(f"| {row.name} | {1 / np.median(row.seconds):,.0f} | {middle:.2f} | {low:.2f} .. {high:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    for name, value in {"width": 192, "layers": 4, "length": 128, "turns": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        parameters, calls, differ = sides(args.width, args.layers, args.length, Path(folder))
        rows = turns(calls, args.length // 2, args.turns)
    print(f"{parameters:,} parameters, a cache of {args.length + 1} places, batch 1: {differ} codes differ.\n")
    print(table(rows))
    made = machine()
    print(f"\n{made['cpu']}, {made['cores']} cores, Python {made['python']}, jax {made['jax']}.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
