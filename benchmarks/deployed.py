"""Files of networks of the size that people ship, beside those of other quantizers: `python -m benchmarks deployed`.

One example, one thread. Times are divided by ONNX Runtime's on its float32 model. qjax's files take codes and return
them; they are timed only if their codes are the graph's. The other quantizers' files compute other numbers: each has
its own scales.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime import quantization

import qjax
from benchmarks import litert_peer
from benchmarks.deployed_networks import EXAMPLES, NETWORKS, made
from benchmarks.networks import TARGET
from benchmarks.onnx_styles import float_model, quantized
from benchmarks.report import Grid
from benchmarks.shipping import Way, by_runtime, ways
from benchmarks.timing import Failed, Paired, Result, paired, thread_time
from conformance.cpu import flags
from qjax.runtimes.onnx import session_of

TAKEN = (
    ("onnx, qdq", "ONNX Runtime"),
    ("onnx, qoperator", "ONNX Runtime"),
    ("onnx, integer", "ONNX Runtime"),
    ("tflite", "LiteRT, XNNPACK"),
    ("c", "gcc -O3 -march=native, simd"),
    ("stablehlo", "XLA, all cores"),
)
"""Those of `shipping.ways` that a phone or a server would run."""

NAMES = tuple(NETWORKS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One file; size: its bytes."""

    result: Result
    size: int | None


def _ways() -> list[Way]:
    found = [way for way in ways() if (way.artifact, way.runtime) in TAKEN]
    if {"avx512_vnni", "avx_vnni"} & flags():
        load_it = by_runtime("onnxruntime", style="qdq", codes=True, vnni=True)
        found.insert(1, Way("onnx, qdq, vnni", "ONNX Runtime", "onnxruntime", load_it))
    return found


def deployed(seconds: float, names: Sequence[str]) -> list[Row]:
    """The rows of the networks of those names."""
    return [row for name in names for row in _network(name, seconds)]


def _network(name: str, seconds: float) -> Iterator[Row]:
    model, data = made(name)
    # images lie channels first in the float model
    floats = np.ascontiguousarray(data.transpose(0, 3, 1, 2)) if data.ndim == 4 else data
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        path = Path(folder, "float.onnx")
        onnx.save(float_model(model, floats.shape), path)
        session = session_of(str(path))
        got, wanted = session.run(None, {"x": floats})[0], np.asarray(model(data))
        if not np.allclose(got, wanted, rtol=1e-3, atol=1e-4):
            raise AssertionError(f"{name}: the float32 ONNX model is another network")
        reference = functools.partial(session.run, None, {"x": floats[:1]})

        def row(title: str, call: Callable[[], Any], size: int, clock: Any = thread_time) -> Row:
            return Row(paired(f"{name}: {title}", call, reference, seconds=seconds, least=5, clock=clock), size)

        # beside itself: how much a ratio of equal programs varies
        yield row("float32, ONNX Runtime", reference, path.stat().st_size)
        yield from _own(name, model, data, row)
        yield from _onnxruntime(name, path, floats, row)
        yield from _litert(name, data, row)


def _own(name: str, model: Any, data: np.ndarray, row: Callable[..., Row]) -> Iterator[Row]:
    """qjax's files."""
    qmodel = qjax.quantize(model, qjax.Recipe(target=TARGET), data[:2])
    qjax.calibrate(qmodel, [data], progress=False)
    qmodel.eval()
    graphs: dict[str, qjax.IntegerGraph] = {}
    for way in _ways():
        title = f"qjax {way.artifact}, {way.runtime}"
        if way.needs:
            yield Row(Failed(f"{name}: {title}", f"needs {', '.join(way.needs)}"), None)
            continue
        if way.target not in graphs:
            graphs[way.target] = qjax.convert(qmodel, data[:2], target=way.target)
        graph = graphs[way.target]
        codes = np.asarray(graph.quantize(data))
        batches = [np.ascontiguousarray(codes[i : i + 1]) for i in range(EXAMPLES)]
        with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
            try:
                loaded = way.load(graph, Path(folder), 1)
            except (NotImplementedError, ValueError) as error:  # the table says what cannot be written
                yield Row(Failed(f"{name}: {title}", str(error).splitlines()[0]), None)
                continue
            assert loaded.call is not None
            assert loaded.outputs is not None
            # at this batch, because an optimised runtime may treat the last elements of a tensor otherwise
            wanted = [np.asarray(graph.run(batch)) for batch in batches]
            found = loaded.outputs(batches)
            if [(y.shape, y.dtype) for y in found] != [(x.shape, x.dtype) for x in wanted]:
                raise AssertionError(f"{name}: {title}: its outputs have other shapes or dtypes than the graph's")
            if differ := sum(int(np.sum(y != x)) for y, x in zip(found, wanted, strict=True)):
                yield Row(Failed(f"{name}: {title}", f"{differ:,} codes differ", differ), loaded.size)
                continue
            clock = time.perf_counter if way.artifact == "stablehlo" else thread_time
            yield row(title, functools.partial(loaded.call, batches[0]), loaded.size, clock)


def _onnxruntime(name: str, path: Path, floats: np.ndarray, row: Callable[..., Row]) -> Iterator[Row]:
    """ONNX Runtime's own quantizers."""
    for kind in ("quantize_static, QDQ", "quantize_static, QOperator", "quantize_dynamic"):
        written = path.with_name("peer.onnx")
        title = f"{kind}, ONNX Runtime"
        try:
            if kind == "quantize_dynamic":
                quantization.quantize_dynamic(str(path), str(written), per_channel=True)
            else:
                form = getattr(quantization.QuantFormat, kind.split(", ")[1])
                quantized(path, written, floats, form)
            session = session_of(str(written))
        except Exception as error:  # another project's: the table says what it cannot do
            yield Row(Failed(f"{name}: {title}", f"fails: {type(error).__name__}"), None)
            continue
        yield row(title, functools.partial(session.run, None, {"x": floats[:1]}), written.stat().st_size)


def _litert(name: str, data: np.ndarray, row: Callable[..., Row]) -> Iterator[Row]:
    """A float file in LiteRT, and those of its own quantizer."""
    for kind in litert_peer.KINDS:
        title = f"{'float32' if kind == 'float' else f'ai-edge-quantizer, {kind}'}, LiteRT"
        with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
            path = Path(folder, "model.tflite")
            try:
                litert_peer.write(name, kind, path)
                call = litert_peer.call_of(path, data[:1])
            except (RuntimeError, ValueError) as error:
                yield Row(Failed(f"{name}: {title}", f"fails: {str(error).splitlines()[0]}"), None)
                continue
            yield row(title, call, path.stat().st_size)


def table(rows: Sequence[Row]) -> Grid:
    """One line per file."""

    def line(row: Row) -> list[str]:
        name, *numbers = row.result.row()
        return [name, "-" if row.size is None else f"{row.size / 1024:,.0f}", *numbers]

    columns = ("file, runtime", "KiB", "ms", "float32, ms", "ratio", "quartiles")
    return Grid(columns, [line(row) for row in rows])


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**row.result.document(), "bytes": row.size} for row in rows]


def differ(rows: Sequence[Row]) -> int:
    """Codes that are not the graph's."""
    return sum(row.result.differ for row in rows if isinstance(row.result, Failed))


def drawn(rows: Sequence[Row]) -> list[Paired]:
    """What the picture shows."""
    return [row.result for row in rows if isinstance(row.result, Paired)]
