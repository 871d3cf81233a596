"""One row of the table: a public model quantized, calibrated, converted and compared."""

import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.public.models import Public, examples, random_batch

OTHER_SIZE = 5
"""A batch size that is not the sample's."""


@dataclasses.dataclass
class Row:
    """What the table says about one model.

    differ: codes of the fake-quantized forward that differ from the graph's where both had the same inputs.
    exact_mismatches: outputs that differ between `exact` and the graph, at a batch size that is not the sample's, and
    between the graph at that size and at the sample's. cosine: between the graph's outputs and the float model's, of
    the worst output. error: stage and first line, where a stage failed.
    """

    name: str
    parameters: int = 0
    nodes: int = 0
    float_nodes: int = 0
    compared: int = 0
    differ: int = 0
    outputs: int = 0
    exact: bool = False
    exact_mismatches: int = 0
    cosine: float = 0.0
    seconds: float = 0.0
    """Of quantizing, calibrating and converting."""
    exact_seconds: float = 0.0
    error: str = ""
    message: str = ""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """What quantizing, calibrating, converting and verifying warn of, each once."""


def _differing(a: Any, b: Any) -> tuple[int, int]:
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(f"two structures: {jax.tree.structure(a)} and {jax.tree.structure(b)}")
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    if any(x.shape != y.shape for x, y in pairs):
        raise ValueError(f"two shapes: {[(x.shape, y.shape) for x, y in pairs]}")
    return sum(int(np.sum(x != y)) for x, y in pairs), sum(x.size for x, _ in pairs)


def _cosine(a: Any, b: Any) -> float:
    def one(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
        norms = float(np.linalg.norm(x) * np.linalg.norm(y))
        return float(x @ y) / norms if norms else float(np.array_equal(x, y))

    return min(one(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _part(tree: Any, size: int, n: int) -> Any:
    """The first n examples."""
    return jax.tree.map(lambda x: x[:n] if np.ndim(x) and np.shape(x)[0] == size else x, tree)


def _like(whole: Any, few: Any) -> Any:
    """The first examples along every axis that has them: what compares all texts with all images has two."""
    return whole[tuple(slice(size) for size in np.shape(few))] if np.ndim(few) else whole


def run(
    name: str, build: Callable[[], Public], *, exact: bool = True, codes: bool = True, target: str = "nearest_even"
) -> Row:
    """Everything about one model, in this process.

    exact: whether to compile the exact forward. codes: whether to calibrate on a second batch, and compare all codes.
    """
    row = Row(name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _run(row, build, exact=exact, codes=codes, target=target)
    # qjax's own name the line that called it
    row.warnings = list(dict.fromkeys(str(each.message) for each in said if each.filename == __file__))
    return row


def _run(row: Row, build: Callable[[], Public], *, exact: bool, codes: bool, target: str) -> None:
    stage = "build"
    try:
        public = build()
        model = public.model()
        sample = public.sample
        row.parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        n = examples(sample)
        size = n if public.batch == "fixed" else OTHER_SIZE
        batch = random_batch(sample, size, 1)
        stage = "float"
        wanted = model(*batch)
        begin = time.perf_counter()
        stage = "quantize"
        qmodel = qjax.quantize(model, qjax.Recipe(target=target), sample)
        if codes:
            stage = "calibrate"
            qjax.calibrate(qmodel, [sample, batch])
        qmodel.eval()
        stage = "convert"
        graph = qjax.convert(qmodel, sample, batch=public.batch)
        row.seconds = time.perf_counter() - begin
        row.nodes = len(graph.ir.nodes)
        row.float_nodes = sum(graph.ir.tensors[node.output].dtype.startswith("float") for node in graph.ir.nodes)
        stage = "graph"
        found = graph(*batch)
        few = graph(*_part(batch, size, n))
        same = jax.tree.map(_like, found, few)
        row.cosine = _cosine(found, wanted)
        row.exact_mismatches = _differing(same, few)[0]
        row.outputs = sum(np.size(x) for x in jax.tree.leaves(found))
        if codes:
            stage = "verify"
            report = qjax.verify(graph, qmodel, [batch])
            row.compared, row.differ = report.compared, report.local
        if exact:
            stage = "exact"
            begin = time.perf_counter()
            forward = nnx.jit(qjax.exact(qmodel, sample, batch=public.batch))
            row.exact_mismatches += _differing(forward(qmodel, *batch), found)[0]
            row.exact, row.exact_seconds = True, time.perf_counter() - begin
    except Exception as error:  # the table says which stage of which model fails, and why
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        row.error = f"{stage}: {type(error).__name__}: {lines[0] if lines else ''}"
        row.message = str(error)
