"""Compiled C (`graph.native`) against ONNX Runtime on the same model, one thread each: `python -m benchmarks native`.

Codes in, codes out. ONNX Runtime has the fastest of its forms: signed or unsigned codes, "qdq" or "qoperator", and
those for VNNI where this processor has it. Every file's codes are compared with the graph's first.
"""

import functools
import itertools
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

import qjax
from benchmarks.speed import NETWORKS as BUILDERS
from benchmarks.speed import UNSIGNED, least_call
from benchmarks.timing import Failed, Result, paired
from conformance.cpu import flags
from qjax.runtimes.onnx import session_of

NETWORKS = ("MLP", "DS-CNN", "ResNet-20", "MobileNet V1", "MobileNet V2", "BERT-small")
BATCHES = (1, 32)


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
        sessions = _sessions(graphs)
        for batch in BATCHES:
            x = np.resize(np.asarray(sample), (batch, *sample.shape[1:]))
            title = f"{name}, batch {batch}: compiled C / ONNX Runtime int8"
            compiled, codes = graphs[0].native(batch), np.asarray(graphs[0].quantize(x))
            wanted = np.asarray(graphs[0].run(codes))
            if differ := int(np.sum(compiled.run(codes) != wanted)):
                found.append(Failed(title, f"{differ:,} codes differ", differ))
                continue
            calls: list[Any] = []
            for graph, session in sessions:
                given = np.asarray(graph.quantize(x))
                call = functools.partial(session.run, None, {session.get_inputs()[0].name: given})
                if differ := int(np.sum(call()[0] != np.asarray(graph.run(given)))):
                    found.append(Failed(title, f"{differ:,} codes differ", differ))
                    break
                calls.append(call)
            else:
                run = functools.partial(compiled.run, codes)
                found.append(paired(title, run, least_call(calls), seconds=seconds, least=5))
    return found


def _sessions(graphs: Collection[qjax.IntegerGraph]) -> list[tuple[qjax.IntegerGraph, Any]]:
    vnni = (False, True) if {"avx512_vnni", "avx_vnni"} & flags() else (False,)
    found: list[tuple[qjax.IntegerGraph, Any]] = []
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        path = Path(folder) / "model.onnx"
        for graph, style, signed in itertools.product(graphs, ("qdq", "qoperator"), vnni):
            graph.emit("onnx", path, style=style, codes=True, vnni=signed)
            found.append((graph, session_of(str(path), threads=1)))
    return found
