"""One case: a random network under a random recipe for one target, through everything that must agree to the bit."""

import dataclasses
import os
import random
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.random_networks.grammar import Network, Program, batch_of, network_of, program_of
from experiments.random_networks.recipes import recipe_of
from qjax import runtimes
from qjax.export import artifact
from qjax.graph.check import GraphError

HOME = os.path.dirname(os.path.abspath(qjax.__file__)) + os.sep
BATCH = 3
ARTIFACTS = ("reloaded", "batch", "exact", "c", "onnx")
EVERY = {"calibrate": 4, "reloaded": 4, "batch": 4, "exact": 2}
"""Left out of all but every n-th round of targets in a long run: compiling takes long. Bytes are compared in all."""


@dataclasses.dataclass
class Row:
    """What one case found.

    stage: the last one that was begun. refused: stage -> the class of a clear error. found: what is wrong, in words.
    compared: stage -> numbers that were compared.
    """

    seed: int
    target: str = ""
    network: str = ""
    recipe: str = ""
    stage: str = ""
    nodes: int = 0
    ops: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    found: list[str] = dataclasses.field(default_factory=list)
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of the whole case: "found", "refused" (no graph) or "equal"."""
        return "found" if self.found else "equal" if self.compared else "refused"


@dataclasses.dataclass(frozen=True)
class Case:
    """A seed's network and recipe."""

    seed: int
    target: str
    program: Program
    recipe: qjax.Recipe
    model: Network

    @property
    def sample(self) -> Any:
        (*args,) = batch_of(self.program, np.random.default_rng([self.seed, 1]), 2)
        return args[0] if len(args) == 1 else tuple(args)

    def batch(self, number: int, size: int = BATCH) -> tuple[Any, ...]:
        """Each is twice as wide as what calibration saw, so that codes are clipped."""
        return batch_of(self.program, np.random.default_rng([self.seed, 2, number]), size, 2.0)


def case_of(seed: int, target: str | None = None, most: int = 10) -> Case:
    """Everything that a seed stands for; targets take turns. most: steps of the network."""
    names = qjax.targets.names()
    target = target or names[seed % len(names)]
    rng = random.Random(f"network {seed}")
    program = program_of(rng, most)
    recipe = recipe_of(rng, target, program)
    model = network_of(program, np.random.default_rng([seed, 0]))
    return Case(seed, target, program, recipe, model)


def run(
    seed: int,
    target: str | None = None,
    stages: Sequence[str] = ARTIFACTS,
    *,
    most: int = 10,
    sparse: bool = False,
    verbose: bool = False,
) -> Row:
    """One case; an error that is not ours to raise is something found. sparse: without some of what takes long."""
    row = Row(seed)
    left_out = {stage for stage, n in EVERY.items() if sparse and (seed // len(qjax.targets.names())) % n}
    try:
        _run(
            row,
            seed,
            target,
            most,
            [stage for stage in stages if stage == "reloaded" or stage not in left_out],
            left_out,
        )
    except Exception as error:
        _judge(row, row.stage, error)
        if verbose:
            traceback.print_exc()
    return row


def _run(row: Row, seed: int, target: str | None, most: int, stages: Sequence[str], left_out: set[str]) -> None:
    with _Stage(row, "make"):
        case = case_of(seed, target, most)
        row.target, row.network, row.recipe = case.target, str(case.program), str(case.recipe)
        sample = case.sample
    with _Stage(row, "quantize"):
        qmodel = qjax.quantize(case.model, case.recipe, sample)
    if "calibrate" not in left_out:
        with _Stage(row, "calibrate"):
            qjax.calibrate(qmodel, [sample, case.batch(9, 2)])
    qmodel.eval()
    with _Stage(row, "convert"):
        graph = qjax.convert(qmodel, sample)
        row.nodes, row.ops = len(graph.ir.nodes), sorted({node.op for node in graph.ir.nodes})
    with _Stage(row, "graph"):
        batch = case.batch(0)
        feeds = [[np.asarray(codes) for codes in _tuple(graph.quantize(*batch))], *_extremes(graph, seed)]
        wanted = [[np.asarray(y) for y in _tuple(graph.run(*codes))] for codes in feeds]
        outputs = graph(*batch)
        _compare(row, "graph", jax.tree.leaves(outputs), jax.tree.leaves(graph.dequantize(*wanted[0])))
    for stage in stages:
        with _Stage(row, stage):
            try:
                given = (feeds, wanted) if stage not in left_out else ([], [])
                _STAGES[stage](row, case, qmodel, sample, graph, *given, batch, outputs)
            except Exception as error:
                _judge(row, stage, error)


class _Stage:
    def __init__(self, row: Row, name: str) -> None:
        self.row, self.name = row, name

    def __enter__(self) -> None:
        self.row.stage, self.begin = self.name, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.row.seconds[self.name] = round(time.perf_counter() - self.begin, 3)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _extremes(graph: Any, seed: int) -> list[list[np.ndarray]]:
    """The least codes, the greatest, any: of inputs with a scale; indices and masks as random ones."""
    rng = np.random.default_rng([seed, 3])
    found: list[list[np.ndarray]] = []
    for draw in (lambda low, high, shape: np.full(shape, low), lambda low, high, shape: np.full(shape, high), None):
        codes: list[np.ndarray] = []
        for name in graph.ir.inputs:
            tensor = graph.ir.tensors[name]
            shape = tuple(BATCH if n is None else n for n in tensor.shape)
            q = tensor.quantization
            if tensor.dtype == "float32":
                codes.append(rng.normal(size=shape).astype(np.float32))
                continue
            low, high = (q.qmin, q.qmax) if q is not None else (0, 1 if tensor.dtype == "bool" else 4)
            make = draw or (lambda low, high, shape: rng.integers(low, high + 1, shape))
            codes.append(make(low, high, shape).astype(tensor.dtype))
        found.append(codes)
    return found


def _compare(row: Row, stage: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    """Same number, shapes and values; types too where both are codes."""
    if len(got) != len(want):
        row.found.append(f"{stage}: {len(got)} outputs, not {len(want)}")
        return
    for index, (a, b) in enumerate(zip(map(np.asarray, got), map(np.asarray, want), strict=True)):
        row.compared[stage] = row.compared.get(stage, 0) + b.size
        if a.shape != b.shape or a.dtype != b.dtype:
            row.found.append(f"{stage}: output {index} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
            row.found.append(f"{stage}: output {index}: {np.sum(a != b)} of {a.size} differ, by up to {distance.max()}")


def _judge(row: Row, stage: str, error: Exception) -> None:
    """A clear error is one that qjax itself raises, of the kinds that it documents."""
    frames = traceback.extract_tb(error.__traceback__)
    last = os.path.abspath(frames[-1].filename) if frames else ""
    # a graph that is wrong in itself is no answer to what a user asked for
    ours = isinstance(error, (ValueError, TypeError)) and not isinstance(error, GraphError) and last.startswith(HOME)
    if ours and stage != "make":
        row.refused[stage] = class_of(f"{type(error).__name__}: {error}")
        return
    place = f"{os.path.relpath(last, os.path.dirname(HOME[:-1]))}:{frames[-1].lineno}" if frames else "?"
    inside = [f for f in frames if os.path.abspath(f.filename).startswith(HOME)]
    through = f", from {os.path.relpath(inside[-1].filename, HOME)}:{inside[-1].lineno}" if inside else ""
    row.found.append(f"{stage}: {type(error).__name__} at {place}{through}: {str(error)[:300]}")


def class_of(message: str) -> str:
    """A message without what differs from case to case: names, numbers, paths."""
    text = message.split("\n")[0]
    text = re.sub(r"\S+\.py:\d+", "PLACE", text)
    text = re.sub(r"'[^']*'", "NAME", text)
    text = re.sub(r"\([\d, ]*\)|\[[\d, ]*\]|\d+(x\d+)+", "SHAPE", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "N", text)
    return re.sub(r"QSpec\(.*?\)", "QSPEC", text)[:220]


# ------------------------------------------------------------------ what must agree with the graph


def _reloaded(row: Row, case: Case, qmodel: Any, sample: Any, graph: Any, feeds: Any, wanted: Any, *_: Any) -> None:
    data = artifact.to_bytes(graph.ir)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.qjax")
        graph.save(path)
        loaded = qjax.load(path)
    row.compared["reloaded"] = 0
    if artifact.to_bytes(loaded.ir) != data:
        row.found.append("reloaded: saved again, the file differs")
    for codes, want in zip(feeds, wanted, strict=True):
        _compare(row, "reloaded", _tuple(loaded.run(*codes)), want)


def _batch(row: Row, case: Case, qmodel: Any, sample: Any, graph: Any, feeds: Any, wanted: Any, *_: Any) -> None:
    """One example alone is what it is among others; a float island's products are summed in another order there."""
    if any(graph.ir.tensors[node.output].dtype.startswith("float") for node in graph.ir.nodes):
        return
    codes, want = feeds[-1], wanted[-1]
    _compare(row, "batch", _tuple(graph.run(*(x[1:2] for x in codes))), [y[1:2] for y in want])


def _exact(row: Row, case: Case, qmodel: Any, sample: Any, graph: Any, feeds: Any, wanted: Any, *rest: Any) -> None:
    batch, outputs = rest
    forward = nnx.jit(qjax.exact(qmodel, sample))
    _compare(row, "exact", jax.tree.leaves(forward(qmodel, *batch)), jax.tree.leaves(outputs))


def _runtime(name: str, stage: str, **options: Any) -> Any:
    def check(row: Row, case: Case, qmodel: Any, sample: Any, graph: Any, feeds: Any, wanted: Any, *_: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            execute = runtimes.prepare(name, graph, folder, BATCH, options)
            for codes, want in zip(feeds, wanted, strict=True):
                _compare(row, stage, execute(codes), want)

    return check


_STAGES = {
    "reloaded": _reloaded,
    "batch": _batch,
    "exact": _exact,
    "c": _runtime("c", "c"),
    "onnx": _runtime("onnxruntime", "onnx", style="integer"),
}
