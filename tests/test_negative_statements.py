"""What the pages say that qjax cannot do, refuses or never does: every such sentence is classified, and still true.

`negative_statements.txt` lists them by page, each below a line that says what shows it:

- `[case NAME]`: the case NAME of this file.
- `[FOLDER/FILE::TEST]`: a test that exists elsewhere, without its `test_`.
- `[no behaviour]`: nothing to show. The sentence is about another tool, about a measurement or about the reader.

A new negative sentence fails until somebody lists it. When a case fails because something works by now, correct the
page and take the row away.
"""

import ast
import dataclasses
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import qjax
from qjax import targets
from qjax.contrib.importers import tflite as reader
from qjax.export.emit.c import to_files
from tests.contrib.importers.tflite_models import File, Grid

ROOT = pathlib.Path(__file__).parent.parent
TABLE = pathlib.Path(__file__).with_suffix("").with_name("negative_statements.txt")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASUREMENTS = re.compile(
    r"docs/(experiments/.*|tutorials/.*|accuracy-.*|public-.*|artifacts|benchmarks|rounding-cost|language-quality"
    r"|architectures|keras-models|compare-example|figures|firmware|forum|scale|primitives)\.md"
)
"""Pages of results and of runs, whose commands print them; `primitives` is what the registries say."""
TABLES_OF_DATA = {"docs/profiles.md", "docs/target-rules.md"}
"""Their tables are written from the data of qjax, and compared with it elsewhere."""
NEGATIVE = re.compile(
    r"\b(not|no|never|cannot|refus\w+|raises?|only|without|nor|neither|none|nothing|fails?|\w+n't|unable|impossible"
    r"|unsupported|errors? (?:if|when|where|with|that)|an error)\b",
    flags=re.I,
)
QUOTED = re.compile(r"\*\*Said[\s\S]*?(?=\n\n)|: ConversionError: .*|^Versions: .*|^- keras .*", flags=re.M)


def sentences(text: str, tables: bool = True) -> Iterator[tuple[str, str]]:
    """Each sentence and each row of a page; a row, and the first sentence of an item, with the heading above it."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    text = QUOTED.sub("", re.sub(r"^(:::|    options:).*$", "", text, flags=re.M))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(?=\|)|(?<=\|)$", "\n\n", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*]|\d+\.)\s", "\n\n- ", text, flags=re.M)
    text = re.sub(r"^(#.*)$", r"\n\n\1\n\n", text, flags=re.M)
    heading = ""
    for part in (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        elif part.startswith("|"):
            if tables and not set(part) <= set("|-: "):
                yield heading, part
        else:
            first, *rest = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"0-9\[])", part.removeprefix("- "))
            if first:
                yield heading if part.startswith("- ") else "", first
            yield from (("", sentence) for sentence in rest)


def is_negative(heading: str, sentence: str) -> bool:
    """The items below "What it refuses" need no such word themselves."""
    return bool(NEGATIVE.search(sentence) or re.match(r"What (\w+ )?(does not|is not|cannot|refuses)\b", heading))


def read_table() -> dict[str, dict[str, tuple[str, ...]]]:
    """page -> sentence -> what shows it."""
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    page, shown = "", ()
    for line in TABLE.read_text().splitlines():
        if line.startswith("# "):
            page = line[2:]
            assert page not in table, f"{page} stands twice"
            table[page] = {}
        elif match := re.fullmatch(r"\[((?:no behaviour|case \w+|[\w/]+::\w+|, )+)\]", line):
            shown = tuple(match[1].split(", "))
        elif line:
            assert line not in table[page], f"{page}: listed twice: {line}"
            table[page][line] = shown
    return table


LISTED = read_table()
CASES: dict[str, Callable[..., None]] = {}


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_negative_sentence_is_listed(page: pathlib.Path) -> None:
    name = str(page.relative_to(ROOT))
    listed = LISTED.get(name, {})
    if MEASUREMENTS.fullmatch(name):
        assert not listed, f"{name} is a page of results: take it out of {TABLE.name}"
        return
    found = list(sentences(page.read_text(), tables=name not in TABLES_OF_DATA))
    new = [sentence for heading, sentence in found if is_negative(heading, sentence) and sentence not in listed]
    assert not new, f"{name}: expected each in {TABLE.name}, with the case or test that shows it. Missing: {new}"
    gone = [sentence for sentence in listed if sentence not in {sentence for _, sentence in found}]
    assert not gone, f"{name} does not have these sentences any more, so take them out of {TABLE.name}: {gone}"


def test_what_shows_a_sentence_exists() -> None:
    shown = {name for page in LISTED.values() for names in page.values() for name in names} - {"no behaviour"}
    names = {name.removeprefix("case ") for name in shown if name.startswith("case ")}
    assert names == set(CASES), "each case has a sentence, and each sentence its case"
    assert set(LISTED) <= {str(page.relative_to(ROOT)) for page in PAGES}
    lost: list[str] = []
    for file, _, test in (name.partition("::") for name in sorted(shown) if "::" in name):
        folder, _, stem = file.rpartition("/")
        path = ROOT / "tests" / folder / f"test_{stem}.py"
        if not path.exists() or not re.search(rf"^def test_{test}\(", path.read_text(), flags=re.M):
            lost.append(f"{file}::{test}")
    assert lost == []


def test_the_search_for_sentences_finds_them() -> None:
    page = "# A\n\nIt runs. It does not\nstop [here](b.md). Fine.\n\n## What it refuses\n\nText.\n\n- one. More.\n"
    page += "- two\n\n| x | y |\n|---|---|\n| a | b |\n\n## Other\n\n| a | b |\n| c | never |\n\n```\nno code\n```\n"
    found = [sentence for heading, sentence in sentences(page) if is_negative(heading, sentence)]
    assert found == ["It does not stop here.", "one.", "two", "| x | y |", "| a | b |", "| c | never |"]


# ---------------------------------------------------------------------------- what the cases share

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
ROWS = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
POSITIONS = np.arange(4, dtype=np.int32)[:, None]
FLOAT = {".*": qjax.FLOAT}
MICRO, LITERT = {"target": "tflite_micro"}, {"target": "tflite_xnnpack"}
OPENVINO = {"target": "openvino_cpu", "activations": qjax.QSpec(bits=8, signed=False, symmetric=False)}
FPGA = {"target": "fpga", "method": "tqt", "weight_method": "tqt", "activations": qjax.QSpec(bits=8)}


def quantized(function: Callable[..., Any], *args: Any, **recipe: Any) -> Any:
    return qjax.quantize(qjax.from_function(function, W), qjax.Recipe(**recipe), args or (X,))


def graph(function: Callable[..., Any], *args: Any, batch: Any = None, **recipe: Any) -> Any:
    options = {} if batch is None else {"batch": batch}
    return qjax.convert(quantized(function, *args, **recipe), args or (X,), **options)


def converted(model: nnx.Module, x: Any, **recipe: Any) -> Any:
    qmodel = qjax.quantize(model, qjax.Recipe(**recipe), x)
    qmodel.eval()
    return qjax.convert(qmodel, x)


def refused(message: str) -> Any:
    return pytest.raises((ValueError, TypeError), match=message)


def dense(w: Any, x: Any) -> Any:
    return x @ w


def exponentials(w: Any, x: Any) -> Any:
    return jnp.exp(x @ w)


def normalized(w: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def attention(w: Any, x: Any) -> Any:
    h = x @ w
    return jax.nn.softmax(h @ h.mT * 0.5) @ h


def order(w: Any, x: Any) -> Any:
    h = x @ w
    return lax.sort((h, -h), num_keys=2)[1]


def scattered(places: int) -> Callable[..., Any]:
    """A sum for each example, at as many places as the data choose."""

    def function(w: Any, x: Any, i: Any) -> Any:
        rows = jnp.tile(x @ w, (1, places // 4))
        return jax.vmap(lambda row, i: jax.ops.segment_sum(row, i, 3))(rows, i)

    return function


class Norm(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(self.layer(x))


# ---------------------------------------------------------------------------- operations


@case
def loops_and_orders() -> None:
    with refused("'while' .* has no integer form"):
        graph(lambda w, x: lax.while_loop(lambda y: jnp.any(y > 0), lambda y: y - 1, x @ w))
    with refused("'sort' .* has no integer form"):
        graph(order)


@case
def several_keys_sort_in_float() -> None:
    found = graph(order, overrides=FLOAT)
    assert [node.op for node in found.ir.nodes] == ["island"]
    more = np.random.default_rng(2).normal(size=(7, 8)).astype(np.float32)
    np.testing.assert_array_equal(found(more), order(W, more))


@case
def at_most_32_places() -> None:
    with refused("'scatter-add' .* has no integer form"):
        graph(scattered(36), X, np.zeros((4, 36), np.int32))
    model = qjax.from_function(scattered(32), W)
    assert qjax.explain(model, (X, np.zeros((4, 32), np.int32))).convertible


@case
def a_sine_in_a_scan_has_no_table() -> None:
    def angles(p: Any) -> Any:
        return p[..., None].astype(jnp.float32) * jnp.array([1.0, 0.1, 0.01, 0.001])

    def inside(w: Any, x: Any, p: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            return c + jnp.sin(angles(p) + 0 * i)[:, 0] * (x @ w), c

        return lax.scan(step, x @ w, jnp.arange(3.0))[0]

    assert not quantized(inside, X, POSITIONS).plan.integers


@case
def a_cache_is_not_written_beyond_its_end() -> None:
    cache = np.random.default_rng(3).normal(size=(4, 3, 4)).astype(np.float32)

    def write(w: Any, x: Any, cache: Any, i: Any) -> Any:
        return jax.vmap(lambda cache, row, i: cache.at[i].set(row))(cache, x @ w, i)

    found = graph(write, X, cache, np.zeros(4, np.int32))
    codes = found.quantize(X, cache, np.full(4, 9, np.int32))
    np.testing.assert_array_equal(found.run(*codes), codes[1])


@case
def a_text_longer_than_the_cache() -> None:
    with refused("update shape must be smaller than operand shape"):
        quantized(lambda w, x, cache: lax.dynamic_update_slice(cache, x @ w, (0, 0, 0)), ROWS, np.zeros((2, 3, 4)))


@case
def a_cache_through_a_scan_has_no_factors() -> None:
    def layers(w: Any, x: Any, cache: Any) -> Any:
        def layer(x: Any, layer: Any) -> Any:
            w, cache = layer
            cache = cache + x @ w
            return x + cache @ w.T, cache

        return lax.scan(layer, x, (w, cache))

    sample = X, np.random.default_rng(3).normal(size=(4, 4, 4)).astype(np.float32)
    qmodel = qjax.quantize(qjax.from_function(layers, np.stack([0.1 * W] * 4)), qjax.Recipe(), sample)
    with refused("got none. .*'scan' reads or makes it"):
        qjax.training.equalize(qmodel, [sample] * 2, state=1)


@case
def activations_have_one_scale() -> None:
    with refused("expected per-tensor activations"):
        qjax.Recipe(activations=qjax.QSpec(bits=8, axis=-1))


@case
def bits_are_2_to_16() -> None:
    for bits in (1, 17):
        with refused(r"bits must lie in 2..16"):
            qjax.QSpec(bits=bits)


# ---------------------------------------------------------------------------- models and training


@case
def quantize_leaves_the_model_alone() -> None:
    model = Norm()
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    qjax.calibrate(qjax.quantize(model, qjax.Recipe(), X), [X])
    after = jax.tree.leaves(nnx.state(model))
    assert type(model) is Norm
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@case
def quantize_copies_no_array() -> None:
    model = Norm()
    qmodel = qjax.quantize(model, qjax.Recipe(), X)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, qmodel.model)), strict=True):
        assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


@case
def sensitivity_and_statistics_change_nothing() -> None:
    qmodel = quantized(dense)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(qmodel))]
    qjax.sensitivity(qmodel, [X])
    qjax.statistics(qmodel, [X])
    after = jax.tree.leaves(nnx.state(qmodel))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@case
def these_methods_learn_nothing() -> None:
    def learned(**recipe: Any) -> list[Any]:
        return jax.tree.leaves(nnx.state(quantized(dense, **recipe).quantizers, nnx.Param))

    for weight_method, bits in (("static", 8), ("dynamic", 8), ("absmean", 2)):
        weights = qjax.QSpec(bits=bits)
        assert learned(method="static", weight_method=weight_method, weights=weights) == []
    assert learned(method="lsq", weight_method="static") != []


@case
def scales_at_run_time_need_no_calibration() -> None:
    qmodel = quantized(dense, overrides={".*": qjax.Dynamic(per="row")})
    assert jax.tree.leaves(nnx.state(qmodel.quantizers)) == []


@case
def calibration_compiles_nothing_new() -> None:
    compiled: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    batches = [jnp.asarray(X), jnp.asarray(X)]
    qmodel = qjax.quantize(Norm(), qjax.Recipe(), batches[0])
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        qjax.calibrate(qmodel, batches)
        same_shape = len(compiled)
        qjax.calibrate(qmodel, [batches[0][:2]])
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert same_shape == 0
    assert compiled, "another shape compiles, so the listener hears it"


@case
def no_float8_activations() -> None:
    with refused("expected a QSpec"):
        qjax.Recipe(activations=qjax.WeightFormat("fp8_e4m3"))  # pyright: ignore[reportArgumentType]


@case
def sums_over_the_batch_by_hand_do_not_train() -> None:
    def centred(w: Any, state: Any, x: Any, train: bool) -> Any:
        h = x @ w
        return (h - h.mean(0), h.mean(0)) if train else (h - state, state)

    modes: dict[str, Any] = {"training": {"train": True}, "evaluation": {"train": False}}
    qmodel = qjax.quantize(qjax.from_function(centred, W, state=jnp.zeros(4), **modes), qjax.Recipe(), X)
    qmodel.train()
    with refused("was not there when the model was quantized"):
        qmodel(X)


@case
def batch_norms_over_other_axes_do_not_train() -> None:
    def over_channels_and_places() -> tuple[nnx.Module, Any]:
        norm = linen.BatchNorm(axis=(1, 2))  # pyright: ignore[reportArgumentType]
        variables = norm.init(jax.random.key(0), ROWS, use_running_average=True)
        modes: dict[str, Any] = {"training": {"use_running_average": False}}
        return qjax.from_linen(norm, variables, **modes, evaluation={"use_running_average": True}), ROWS

    for model, x in ((nnx.BatchNorm(8, axis_name="devices", rngs=nnx.Rngs(0)), X), over_channels_and_places()):
        qmodel = qjax.quantize(model, qjax.Recipe(), x)
        qmodel.train()
        with refused("was not there when the model was quantized"):
            jax.vmap(lambda x, qmodel=qmodel: nnx.clone(qmodel)(x), axis_name="devices")(x[None])
        qmodel.eval()
        assert qjax.convert(qmodel, x).ir.nodes


# ---------------------------------------------------------------------------- targets and files


@case
def floats_only_in_stablehlo(tmp_path: pathlib.Path) -> None:
    nf4 = {".*": qjax.WeightFormat("nf4")}
    for kind, options in (("c", {}), ("onnx", {}), ("tflite", MICRO)):
        for function, overrides in ((exponentials, FLOAT), (dense, nf4)):
            with refused("float"):
                graph(function, overrides=overrides, **options).emit(kind, tmp_path / "file")
    for function, overrides in ((exponentials, FLOAT), (dense, nf4)):
        graph(function, overrides=overrides).emit("stablehlo", tmp_path / "file")


@case
def c_has_intrinsics_only_with_simd() -> None:
    ir = graph(dense).ir
    intrinsic = re.compile(r"_mm\d*_|immintrin|arm_neon|vdotq_")
    assert intrinsic.search(to_files(ir)["model.c"]) is None
    assert intrinsic.search(to_files(ir, simd=True)["model.c"]) is not None


@case
def c_needs_no_library_no_allocation_no_float() -> None:
    text = to_files(graph(lambda w, x: jax.nn.softmax(x @ w)).ir)["model.c"]
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert set(re.findall(r"#include (\S+)", code)) <= {'"model.h"', "<stdint.h>"}
    assert re.search(r"\b(malloc|calloc|free|float|double)\b", code) is None
    assert not re.findall(r"^static (?!const|inline|void)\w+ \w+(?:\[\d+\])?(?: =|;)", code, re.MULTILINE)


@case
def no_litert_converter(tmp_path: pathlib.Path) -> None:
    with refused("expected one of the formats"):
        graph(dense).emit("litert_converter", tmp_path / "file")


@case
def tflite_has_no_functions_of_floats(tmp_path: pathlib.Path) -> None:
    with refused("have no form in a .tflite file"):
        graph(exponentials, overrides=FLOAT, **LITERT).emit("tflite", tmp_path / "file")


@case
def micro_has_no_norms_no_masks_and_no_scaled_scores(tmp_path: pathlib.Path) -> None:
    def masked(w: Any, x: Any, mask: Any) -> Any:
        return jax.nn.softmax(jnp.where(mask, x @ w, -1e9))

    mask = np.ones((4, 4), bool)
    for function, args in ((normalized, (X,)), (masked, (X, mask)), (attention, (ROWS,))):
        with refused("have no form in a .tflite file"):
            graph(function, *args, **MICRO).emit("tflite", tmp_path / "file")


@case
def micro_has_no_int16_tables(tmp_path: pathlib.Path) -> None:
    with refused("TFLite Micro looks up no tables of int16"):
        graph(lambda w, x: jax.nn.gelu(x @ w), activations=qjax.QSpec(bits=16), **MICRO).emit("tflite", tmp_path / "f")


@case
def tflite_softmax_is_of_int8_over_the_last_axis(tmp_path: pathlib.Path) -> None:
    def where(w: Any, x: Any, mask: Any) -> Any:
        return jax.nn.softmax(x @ w, where=mask)

    for found in (
        graph(where, X, np.ones((4, 4), bool), **LITERT),
        graph(lambda w, x: jax.nn.softmax(x, axis=1), ROWS, **LITERT),
        graph(lambda w, x: jax.nn.softmax(x), activations=qjax.QSpec(bits=16), **LITERT),
    ):
        with refused("TFLite has SOFTMAX of int8 codes over the last axis"):
            found.emit("tflite", tmp_path / "file")


@case
def tflite_accumulators_have_32_bits(tmp_path: pathlib.Path) -> None:
    narrow = qjax.numerics.Accumulator(bits=14, overflow="saturate")
    with refused("its accumulator is not the exact one of 32 bits"):
        target = dataclasses.replace(targets.get("tflite_micro"), accumulator=narrow)
        graph(dense, target=target).emit("tflite", tmp_path / "file")


@case
def tflite_averages_keep_their_grid(tmp_path: pathlib.Path) -> None:
    images = np.random.default_rng(0).normal(size=(2, 6, 6, 4)).astype(np.float32)
    with refused("a sum over windows that is no average of them, or that another step follows"):
        graph(lambda w, x: 3.0 * nnx.avg_pool(x, (2, 2), (2, 2)), images, **LITERT).emit("tflite", tmp_path / "file")


@case
def openvino_refuses_these(tmp_path: pathlib.Path) -> None:
    for function in (lambda w, x: jax.nn.softmax(x), normalized):
        with refused("'openvino' has no exact form"):
            graph(function, **OPENVINO).emit("onnx", tmp_path / "file")
    with refused("sums over the batch"):
        graph(lambda w, x: (x @ w).sum(0), **OPENVINO)
    with refused("expected activations of at most 8 bits"):
        quantized(dense, target="openvino_cpu", activations=qjax.QSpec(bits=16))


@case
def openvino_files_are_not_read(tmp_path: pathlib.Path) -> None:
    graph(dense, **OPENVINO).emit("onnx", tmp_path / "model.onnx")
    with refused("operators cannot be read"):
        qjax.read(tmp_path / "model.onnx")


@case
def qonnx_refuses_these(tmp_path: pathlib.Path) -> None:
    for function in (lambda w, x: jax.nn.softmax(x @ w), normalized, lambda w, x: (x @ w)[:, :3].mean(1)):
        with refused("style 'qonnx'"):
            graph(function, **FPGA).emit("onnx", tmp_path / "file", style="qonnx")


@case
def scales_of_fpgas_are_powers_of_two() -> None:
    with refused("every scale must be a power of two, but the method 'lsq'"):
        quantized(dense, target="fpga")
    with pytest.warns(UserWarning, match="powers of two[\\s\\S]*without batch norm"):
        qjax.quantize(Norm(), qjax.Recipe(**FPGA), X)


@case
def reading_needs_no_schema_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph(dense, **MICRO).emit("tflite", tmp_path / "model.tflite")
    for package in ("flatbuffers", "tensorflow"):
        monkeypatch.setitem(sys.modules, package, None)
    assert qjax.read(tmp_path / "model.tflite", metadata=False).ir.nodes
    with pytest.raises(ModuleNotFoundError, match="flatbuffers"):
        qjax.read(tmp_path / "model.tflite")


@case
def files_hold_no_code() -> None:
    """No reader has a way to run what a file holds."""
    for path in sorted((ROOT / "qjax/export").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path
            if isinstance(node, ast.Import):
                assert {"pickle", "marshal"}.isdisjoint(alias.name for alias in node.names), path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "marshal"), path


@case
def reading_refuses_these() -> None:
    def attempt(name: str, shapes: Any, result: Any, options: str = "", *, numbers: Any = (), **fields: Any) -> None:
        file, dtype, grid = File(), fields.pop("dtype", "int8"), fields.pop("grid", Grid(0.1))
        inputs = [file.tensor(dtype, shape, grid) for shape in shapes]
        output = file.tensor(dtype, result, grid)
        file.operator(name, [*inputs, *map(file.numbers, numbers)], [output], options, **fields)
        reader.read(file.to_bytes(inputs, [output]))

    with refused("it gathers different rows for every example"):
        attempt("GATHER", [(2, 3, 4)], (2, 1, 4), "Gather", numbers=[np.zeros((2, 1))], axis=1, batchDims=1)
    for mask in ("ellipsisMask", "newAxisMask"):
        with refused("operator 0 STRIDED_SLICE"):
            slices = [(0, 0), (2, 3), (1, 1)]
            attempt("STRIDED_SLICE", [(2, 3)], (2, 3), "StridedSlice", numbers=slices, **{mask: 1})
    for name in ("UNIDIRECTIONAL_SEQUENCE_RNN", "BIDIRECTIONAL_SEQUENCE_LSTM", "LSTM"):
        with refused(f"operator 0 {name}"):
            attempt(name, [(1, 2, 4)], (1, 2, 4))
    with refused("zero point"):
        attempt("RELU", [(1, 4)], (1, 4), dtype="int16", grid=Grid(0.1, 3))
    with refused("pot_scale_int16"):
        attempt("ADD", [(1, 4), (1, 4)], (1, 4), "Add", dtype="int16", grid=Grid(2.0**-7), potScaleInt16=True)


@case
def large_files_are_not_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.tflite").write_bytes(bytes(100))
    with refused("100"):
        qjax.read(tmp_path / "model.tflite", max_bytes=99)


@case
def no_file_has_matmul_nbits() -> None:
    for path in sorted((ROOT / "qjax/export/emit").rglob("*.py")):
        assert "MatMulNBits" not in path.read_text(), path


@case
def native_code_is_not_jax() -> None:
    found = graph(dense)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(found.native(4).run)(found.quantize(X))


@case
def functions_between_products_of_floats(tmp_path: pathlib.Path) -> None:
    rows = qjax.Dynamic(per="row", activations=qjax.QSpec(bits=8, symmetric=False))
    graph(dense, overrides={".*": rows}, **LITERT).emit("tflite", tmp_path / "file")
    with pytest.warns(UserWarning, match="StableHLO"):
        found = graph(lambda w, x: jax.nn.gelu(x @ w), overrides={".*": rows}, **LITERT)
    with refused("have no form in a .tflite file"):
        found.emit("tflite", tmp_path / "file")


@case
def circuits_have_no_rows_and_no_clock(tmp_path: pathlib.Path) -> None:
    for function in (lambda w, x: jax.nn.softmax(x @ w), normalized):
        with refused("RTL: node"):
            graph(function, **FPGA).emit("rtl", tmp_path)
    found = graph(lambda w, x: (x @ w)[:, :1], **FPGA)
    for options in ({}, {"stages": 1}):
        found.emit("rtl", tmp_path, name="net", **options)
        assert ("clk" in (tmp_path / "src/net_wrapper.v").read_text()) == bool(options)


@case
def reports_without_lines(tmp_path: pathlib.Path) -> None:
    found = graph(dense)
    for source, there in ((True, True), (False, False)):
        qjax.report(found, path=tmp_path / "report.html", source=source)
        assert ("return x @ w" in (tmp_path / "report.html").read_text()) == there


# ---------------------------------------------------------------------------- the test of every case above

COMPILED = {"calibration_compiles_nothing_new"}


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.compiled] if name in COMPILED else []) for name in CASES]
)
def test_what_a_page_denies_is_so(name: str, request: pytest.FixtureRequest) -> None:
    function = CASES[name]
    fixtures = [request.getfixturevalue(fixture) for fixture in inspect.signature(function).parameters]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a reader of the pages has them
        function(*fixtures)
