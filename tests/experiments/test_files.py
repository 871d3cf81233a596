"""The table of public files, on files that are made here: a network with a state, one that is read in part, floats."""

from pathlib import Path

import pytest

from experiments.files import __main__ as command
from experiments.files import page
from experiments.files.row import Count, Row, described
from tests.contrib.importers.tflite_models import File, Grid, Models
from tests.ops.test_lstm import model as recurrent


def in_part() -> bytes:
    file, grid = File(), Grid(0.1, 3)
    x, y, z = (file.tensor("int8", (1, 4), grid, name=name) for name in ("x", "logits", "sorted"))
    file.operator("RELU", [x], [y])
    file.operator("CUMSUM", [y, file.numbers(1)], [z], "Cumsum")
    return file.to_bytes([x], [z])


def floats() -> bytes:
    file = File()
    x, y = (file.tensor("float32", (1, 4)) for _ in range(2))
    file.operator("RELU", [x], [y])
    return file.to_bytes([x], [y])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    m = Models("int8", 1)
    m.simple("y", "ADD", ((1, 4), (1, 4)), (1, 4), "Add")
    made = {"lstm": recurrent(0), "part": in_part(), "float": floats(), "add": m.to_bytes(), "again": in_part()}
    for name, data in made.items():
        path = tmp_path / "owner" / "name" / "deep" / f"{name}.tflite"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "owner" / "name" / "no.tflite").write_bytes(b"nothing")
    return tmp_path


def test_files_are_found_once(folder: Path) -> None:
    found, left = command.files_of(folder)
    assert [path.stem for _, _, path in found] == ["add", "again", "lstm"]
    assert {repository for repository, _, _ in found} == {"owner/name"}
    assert left == {"for an Edge TPU": 0, "float models": 1, "duplicates": 1, "that cannot be parsed": 1}
    assert described(folder / "owner/name/deep/add.tflite") == (["ADD"], "int8", True)


@pytest.mark.exhaustive
def test_rows_and_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without processes of their own: JAX runs here already, so nothing may fork
    monkeypatch.setattr("experiments.files.row._apart", lambda work: work())
    rows = command.main([str(folder), "--page", str(folder / "page.md"), "--rows", str(folder / "rows")])
    by_name = {Path(row.path).stem: row for row in rows}
    assert by_name["again"].part == ["logits"]
    assert all(not row.error for row in rows)
    assert by_name["lstm"].nodes > by_name["lstm"].operators == 1
    for row in rows:
        assert row.c.compared
        assert not any(count.differ for count in (*row.counts.values(), row.c, row.onnx))
    assert by_name["lstm"].counts["Micro"].compared == 3 * 18
    text = (folder / "page.md").read_text()
    assert "Of 3 different quantized files, 2 are read whole and 1 in part." in text
    assert "| again | part | `logits` |" in text
    assert "1 float models" in text
    assert command.main([str(folder), "--rows", str(folder / "rows")]) == rows


def test_the_page_shows_what_is_wrong() -> None:
    refused = Row("a/b", "deep/one.tflite", "int8", 3, {"ADD": 3}, error="operator 0 | <SIN>")
    wrong = Row("a/b", "deep/two.tflite", "int8", 1, {"ADD": 1}, 1, counts={}, c=Count(7, 2), onnx=Count(error="none"))
    wrong.counts = {name: Count(1, 0) for name in ("reference", "XNNPACK", "Micro")}
    text = page.page([refused, wrong], {}, "docs/x.md", {"cpu": "a CPU", "jax": "1"})
    assert "Of 10 codes, 2 differ." in text
    assert "| one | not read | operator 0 / (SIN) |" in text
    assert "| 2 of 7 | - |" in text
    assert "| two | ONNX | none |" in text
