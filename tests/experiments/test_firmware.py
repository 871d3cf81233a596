"""Networks as firmware under an emulated Cortex-M: what `tools/cross.sh` installs runs them."""

import shutil

import pytest

import qjax
from experiments.firmware import __main__ as command
from experiments.firmware.boards import BOARDS
from experiments.firmware.build import run
from tests.export.emit import nodes
from tests.lower.lowered import residual_network


def network() -> qjax.IntegerGraph:
    return qjax.IntegerGraph(nodes.finished(residual_network(), "tflite_micro"))


@pytest.mark.oracle
@pytest.mark.parametrize("board", BOARDS)
def test_every_code_of_a_residual_network(board, tmp_path):
    found = run(network(), BOARDS[board], tmp_path)
    assert found.differ == 0
    assert found.codes > 0
    assert found.instructions > 0
    assert 0 < found.stack < 0x10000


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
