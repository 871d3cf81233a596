"""Emitted C whose loops several threads share: the codes of the interpreter with any number of threads."""

import itertools

import pytest

from qjax.export.emit.c import threads, to_files
from tests.contrib.simd import one_bit_layers, simd_layers
from tests.export.emit import c_build, nodes

RACES = "TSAN_OPTIONS=ignore_noninstrumented_modules=1"
"""The library of OpenMP itself is not compiled for the sanitizer."""
SEVERAL = ["-O1", "-fopenmp", "-DQJAX_THREAD_COUNT=5"]


@pytest.fixture
def every_loop(monkeypatch):
    """Loops are shared that have next to nothing to do."""
    monkeypatch.setattr(threads, "_LEAST", 0)


def assert_equal_often(made: c_build.Compiled, *flags: str) -> None:
    """Threads come in another order every time."""
    for found in itertools.islice(made.calls(*SEVERAL, *flags), 10):
        made.assert_equal(found)


SELDOM = pytest.mark.exhaustive
WHICH = [pytest.param(slice(1, None, 3), id="some"), pytest.param(simd_layers.WHOLE, id="all", marks=SELDOM)]
"""Of the layers and of the products; some of them have windows, groups, channels of their own and dense layers."""


@pytest.fixture(scope="module", params=WHICH)
def graphs(request):
    return {
        "layers": simd_layers.graph("tflite_micro", 4, which=request.param),
        "products": simd_layers.graph("onnxruntime", signed=False, products=True, which=request.param),
    }


@pytest.mark.parametrize(
    ("simd", "batch"),
    [(True, 3), *(pytest.param(*given, marks=SELDOM) for given in ((False, 1), (True, 1), (False, 3)))],
)
def test_layers_of_every_shape(simd, batch, graphs, every_loop, tmp_path):
    given = {name: (graph, simd_layers.codes(graph, batch)) for name, graph in graphs.items()}
    made = c_build.Compiled(given, tmp_path, batch, simd=simd, threads=True)
    # tiles that overlap are computed by one thread
    assert ("share + 1 + (share ==" in made.text) == simd
    assert_equal_often(made, *(["-march=native"] if simd else []))


@SELDOM
def test_one_bit(every_loop, tmp_path):
    graph = one_bit_layers.graph("tflite_micro")
    made = c_build.Compiled({"m": (graph, one_bit_layers.codes(graph, 2))}, tmp_path, 2, simd=True, threads=True)
    assert_equal_often(made)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=SELDOM)])
def test_every_operation(every, every_loop, tmp_path):
    named = nodes.of_operations() if every else nodes.one_of_each(nodes.of_operations())
    made = c_build.Compiled(named, tmp_path, threads=True)
    assert_equal_often(made)


@pytest.mark.exhaustive
def test_a_compiler_without_openmp_ignores_the_marks(graphs, every_loop, tmp_path):
    graph = graphs["products"]
    made = c_build.Compiled({"m": (graph, simd_layers.codes(graph, 1))}, tmp_path, simd=True, threads=True)
    assert "QJAX_THREADS for (" in made.text
    made.assert_equal(made.called("-O2"))


@pytest.mark.oracle
@pytest.mark.parametrize("batch", [1, 3])
def test_no_two_threads_write_the_same(batch, graphs, every_loop, tmp_path):
    """By clang's thread sanitizer; so many threads that neighbouring turns are on different ones."""
    given = {name: (graph, simd_layers.codes(graph, batch)) for name, graph in graphs.items()}
    made = c_build.Compiled(given, tmp_path, batch, simd=True, threads=True)
    flags = ["-O1", "-march=native", "-fopenmp", "-DQJAX_THREAD_COUNT=40", "-fsanitize=thread"]
    made.assert_equal(made.run(*flags, compiler="clang", emulator=["env", RACES]))


@pytest.mark.exhaustive
def test_only_loops_with_much_to_do_are_marked(graphs):
    def marks(batch: int, *, shared: bool = True) -> int:
        text = to_files(graphs["products"], batch=batch, vectors=0, threads=shared)["model.c"]
        return text.count("QJAX_THREADS for (")

    assert 0 < marks(1) < marks(16)
    assert marks(16, shared=False) == 0


@pytest.mark.parametrize("wrong", [{"threads": 2}, {"threads": True, "simd": "cortex_m"}])
def test_other_threads_are_refused(wrong, graphs):
    with pytest.raises(ValueError, match="expected threads=True or False, and False for a Cortex-M"):
        to_files(graphs["layers"], **wrong)
