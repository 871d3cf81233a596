"""Networks as firmware under an emulated Cortex-M: what `tools/cross.sh` installs runs them."""

import shutil

import jax
import pytest
from flax import nnx

import qjax
from experiments.firmware import __main__ as command
from experiments.firmware import cmsis_nn
from experiments.firmware.boards import BOARDS
from experiments.firmware.build import run
from tests.contrib.simd import one_bit_layers, simd_layers
from tests.export.emit import nodes
from tests.lower.lowered import residual_network


def network() -> qjax.IntegerGraph:
    return qjax.IntegerGraph(nodes.finished(residual_network(), "tflite_micro"))


@pytest.mark.oracle
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("simd", [False, "cortex_m"])
def test_every_code_of_a_residual_network(board, simd, tmp_path):
    found = run(network(), BOARDS[board], tmp_path, simd=simd)
    assert found.differ == 0
    assert found.codes > 0
    assert found.instructions > 0
    assert 0 < found.stack < 0x10000


@pytest.fixture(scope="module", params=[("tflite_micro", True), ("onnxruntime", False)], ids=["int8", "uint8"])
def layers(request):
    target, signed = request.param
    return qjax.IntegerGraph(simd_layers.graph(target, signed=signed))


@pytest.mark.oracle
@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("board", BOARDS)
def test_layers_of_every_shape_with_vectors(board, level, layers, tmp_path):
    found = run(layers, BOARDS[board], tmp_path, simd="cortex_m", level=level)
    assert found.differ == 0
    assert found.codes > 60_000


@pytest.mark.oracle
@pytest.mark.parametrize("board", BOARDS)
def test_layers_bit_by_bit(board, tmp_path):
    found = run(qjax.IntegerGraph(one_bit_layers.graph("tflite_micro")), BOARDS[board], tmp_path, simd="cortex_m")
    assert found.differ == 0
    assert found.codes > 10_000


@pytest.mark.oracle
@pytest.mark.parametrize("board", ["mps2-an386", "mps3-an547"])
def test_vectors_take_a_third_of_the_instructions(board, tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        graph = command.converted("DS-CNN", "tflite_micro")
    plain, vectors = (run(graph, BOARDS[board], tmp_path, simd=simd) for simd in (False, "cortex_m"))
    assert (plain.differ, vectors.differ) == (0, 0)
    assert 3 * vectors.instructions < plain.instructions
    assert vectors.flash < 1.1 * plain.flash


class Residual(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(x))
        x = x + self.second(x)
        return self.head(nnx.avg_pool(x, (4, 4)).reshape(len(x), -1))


@pytest.mark.oracle
def test_layers_call_cmsis_nn(tmp_path):
    """The text alone: no test has a checkout of CMSIS-NN."""
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    with jax.numpy_dtype_promotion("standard"):
        qmodel = qjax.quantize(Residual(nnx.Rngs(0)), qjax.Recipe(target="cmsis_nn"), x)
        qmodel.eval()
        graph = qjax.convert(qmodel, x)
    graph.emit("c", tmp_path, name="net")
    text = cmsis_nn.rewritten((tmp_path / "net.c").read_text(), graph)
    for call in (
        "convolve_wrapper",
        "depthwise_conv_wrapper",
        "elementwise_add",
        "avgpool",
        "fully_connected_per_channel",
    ):
        assert text.count(f"expect(arm_{call}_s8(") == 1


@pytest.mark.exhaustive
def test_codes_of_other_types_do_not_call_cmsis_nn(tmp_path):
    network().emit("c", tmp_path, name="net")
    with pytest.raises(ValueError, match="expected a graph with int8 convolutions or dense layers, got none"):
        cmsis_nn.rewritten((tmp_path / "net.c").read_text(), network())


def test_another_folder_than_cmsis_nn_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a checkout of CMSIS-NN in"):
        cmsis_nn.archive(tmp_path, tmp_path, (), lambda *_, **__: "")


@pytest.mark.oracle
def test_a_wrong_constant_is_seen(tmp_path, monkeypatch):
    """Else a comparison that never runs would pass."""
    graph, emit = network(), qjax.IntegerGraph.emit

    def changed(self, *args, **kwargs):
        emit(self, *args, **kwargs)
        source = tmp_path / "net_test.c"
        text = source.read_text()
        head, mark, tail = text.partition("y_0[")
        assert mark
        start = tail.index("{") + 1
        end = tail.index(",", start)
        code = int(tail[start:end])
        source.write_text(f"{head}{mark}{tail[:start]} {-code - 1}{tail[end:]}")

    monkeypatch.setattr(qjax.IntegerGraph, "emit", changed)
    assert run(graph, BOARDS["mps2-an385"], tmp_path).differ == 1


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        FileNotFoundError, match=r"expected arm-none-eabi-gcc on the path\. tools/cross\.sh installs it"
    ):
        run(network(), BOARDS["mps2-an385"], tmp_path)


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="expected the marks"):
        command.onto_page(page, "")
