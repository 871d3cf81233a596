"""Compiled C (`graph.native`) against ONNX Runtime on the same model: `python -m benchmarks native`.

Codes in, codes out, on one thread each and on as many as there are cores. ONNX Runtime has the fastest of its forms:
signed or unsigned codes, "qdq" or "qoperator", and those for VNNI where this processor has it. Every file's codes are
compared with the graph's first.
"""

import functools
import itertools
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import qjax
from benchmarks.speed import NETWORKS as BUILDERS
from benchmarks.speed import UNSIGNED, least_call
from benchmarks.timing import Failed, Result, paired
from conformance.cpu import flags
from qjax.runtimes.onnx import session_of

NETWORKS = ("MLP", "DS-CNN", "ResNet-20", "MobileNet V1", "MobileNet V2", "BERT-small")
BATCHES = (1, 32)

_Sessions: TypeAlias = list[tuple[qjax.IntegerGraph, Any]]


def native(seconds: float, names: Collection[str]) -> list[Result]:
    """The comparisons of the networks of those names."""
    found: list[Result] = []
    for name in names:
        model, sample = BUILDERS[name]()
        graphs: list[qjax.IntegerGraph] = []
        for recipe in (qjax.Recipe(), UNSIGNED):
            qmodel = qjax.quantize(model, recipe, sample)
            qmodel.eval()
            graphs.append(qjax.convert(qmodel, sample, target="onnxruntime"))
        for threads in dict.fromkeys([1, os.cpu_count() or 1]):
            sessions = _sessions(graphs, threads)
            for batch in BATCHES:
                x = np.resize(np.asarray(sample), (batch, *sample.shape[1:]))
                suffix = "" if threads == 1 else f", {threads} threads"
                title = f"{name}, batch {batch}: compiled C / ONNX Runtime int8{suffix}"
                found.append(_compared(title, graphs[0], sessions, x, threads, seconds))
    return found


def _compared(
    title: str, graph: qjax.IntegerGraph, sessions: _Sessions, x: Any, threads: int, seconds: float
) -> Result:
    compiled, codes = graph.native(len(x), threads=threads), np.asarray(graph.quantize(x))
    wanted = np.asarray(graph.run(codes))
    if differ := int(np.sum(compiled.run(codes) != wanted)):
        return Failed(title, f"{differ:,} codes differ", differ)
    calls: list[Any] = []
    for other, session in sessions:
        given = np.asarray(other.quantize(x))
        call = functools.partial(session.run, None, {session.get_inputs()[0].name: given})
        if differ := int(np.sum(call()[0] != np.asarray(other.run(given)))):
            return Failed(title, f"{differ:,} codes differ", differ)
        calls.append(call)
    return paired(title, functools.partial(compiled.run, codes), least_call(calls), seconds=seconds, least=5)


def _sessions(graphs: Collection[qjax.IntegerGraph], threads: int) -> _Sessions:
    vnni = (False, True) if {"avx512_vnni", "avx_vnni"} & flags() else (False,)
    found: _Sessions = []
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        path = Path(folder) / "model.onnx"
        for graph, style, signed in itertools.product(graphs, ("qdq", "qoperator"), vnni):
            graph.emit("onnx", path, style=style, codes=True, vnni=signed)
            found.append((graph, session_of(str(path), threads=threads)))
    return found
