"""Sweeps: every combination once, in order; rows outlive a kill; what cannot be kept is refused."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qjax.contrib.lab import Rows, SweepError, sweep
from tests.contrib.lab.swept import area, dies

OVER = {"width": [1, 2], "height": [10, 20, 30]}
ROOT = Path(__file__).parents[3]


def without_seconds(rows: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


WHOLE = [{"width": w, "height": h, "area": w * h} for w in (1, 2) for h in (10, 20, 30)]


def test_every_combination_once_the_first_axis_slowest():
    rows = sweep(area, OVER)
    assert without_seconds(rows) == WHOLE
    assert all(row["seconds"] >= 0 for row in rows)
    assert rows.failed == []


@pytest.mark.exhaustive
def test_several_processes_give_the_same_rows(tmp_path: Path):
    assert without_seconds(sweep(area, OVER, tmp_path / "rows.jsonl", processes=2)) == WHOLE
    with pytest.raises(SweepError, match=r"'.*<lambda>' cannot be imported by other processes. Put it at the top"):
        sweep(lambda width: {"a": width}, {"width": [1]}, processes=2)


def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows.jsonl"
    code = "from tests.contrib.lab import swept; from qjax.contrib.lab import sweep; "
    code += f"sweep(swept.dies, {OVER}, {str(path)!r})"
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == 9
    assert len(path.read_text().splitlines()) == 1 + 3
    before = path.read_text()
    monkeypatch.setenv("QJAX_TEST_LIVES", "1")
    assert without_seconds(sweep(dies, OVER, path)) == WHOLE
    assert path.read_text().startswith(before)
    assert len(path.read_text().splitlines()) == 1 + 6


def test_a_row_that_was_cut_off_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    sweep(area, OVER, path)
    path.write_text(path.read_text()[:-9])
    assert without_seconds(sweep(area, OVER, path)) == WHOLE
    assert "the last row is incomplete and is computed again" in capsys.readouterr().err
    assert [json.loads(line)["area"] for line in path.read_text().splitlines()[1:]] == [10, 20, 30, 20, 40, 60]


def test_more_values_later_make_only_what_is_missing(tmp_path: Path):
    seen: list[int] = []

    def measure(width: int) -> dict[str, int]:
        seen.append(width)
        return {"twice": 2 * width}

    path = tmp_path / "rows.jsonl"
    sweep(measure, {"width": [3, 1]}, path)
    rows = sweep(measure, {"width": [1, 2, 3]}, path)
    assert seen == [3, 1, 2]
    assert [row["twice"] for row in rows] == [2, 4, 6]


def test_a_failure_is_a_row_of_its_own_and_is_tried_again(tmp_path: Path):
    broken = True

    def measure(width: int) -> dict[str, int]:
        if width == 2 and broken:
            raise ValueError("too wide")
        return {"twice": 2 * width}

    path = tmp_path / "rows.jsonl"
    rows = sweep(measure, {"width": [1, 2, 3]}, path)
    assert [row["width"] for row in rows] == [1, 3]
    assert rows.failed == [{"width": 2, "error": "ValueError: too wide"}]
    broken = False
    rows = sweep(measure, {"width": [1, 2, 3]}, path)
    assert [row["twice"] for row in rows] == [2, 4, 6]
    assert rows.failed == []


@pytest.mark.parametrize("over", [{"height": [10], "width": [1]}, {"width": [1]}])
def test_the_file_of_another_sweep_is_refused(tmp_path: Path, over: dict[str, list[int]]):
    path = tmp_path / "rows.jsonl"
    sweep(area, OVER, path)
    before = path.read_bytes()
    with pytest.raises(SweepError, match=r"expected the rows of .* choose another file, or delete this one"):
        sweep(area, over, path)
    with pytest.raises(SweepError, match="expected the rows of"):
        sweep(dies, OVER, path)
    assert path.read_bytes() == before
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SweepError, match="got a file that begins with 'a,b'"):
        sweep(area, OVER, path)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"width": []}, "the axis 'width': expected at least one value, got none"),
        ({"width": [1, 2, 1]}, "the axis 'width' must not have the same value twice"),
        ({"width": [np.float32(1)]}, "axis 'width': expected a number, a text, a boolean or None, got float32"),
        ({"seconds": [1]}, "the axis 'seconds' has the name of a column that the sweep adds"),
    ],
)
def test_axes_that_a_file_cannot_keep(over: dict[str, Any], message: str):
    with pytest.raises(SweepError, match=message):
        sweep(area, over)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"width": 1}, "the result 'width' has the name of an axis or of another column"),
        ({"error": 1}, "the result 'error' has the name of an axis or of another column"),
        ({"a": np.zeros(2)}, "result 'a': expected a number, .* got ndarray. Convert arrays"),
        (3, "expected it to return a mapping of results, got int"),
    ],
)
def test_results_that_a_file_cannot_keep(result: Any, message: str):
    with pytest.raises(SweepError, match=message):
        sweep(lambda width: result, {"width": [1]})


def test_processes_are_at_least_one():
    with pytest.raises(SweepError, match="processes: expected 1 or more, got 0"):
        sweep(area, OVER, processes=0)


def test_means_with_their_standard_errors():
    rows = sweep(area, OVER).mean("area", over="height")
    assert rows[0] == {"width": 1, "area": 20, "standard error": 10 / math.sqrt(3), "count": 3}
    assert rows[1]["area"] == 40
    (alone,) = sweep(area, {"width": [1], "height": [2]}).mean("area", over=["width", "height"])
    assert math.isnan(alone["standard error"])
    with pytest.raises(SweepError, match="expected an axis of the sweep, one of width, height; got 'seed'"):
        sweep(area, OVER).mean("area")
    with pytest.raises(SweepError, match="expected a number in the column 'volume', got None"):
        sweep(area, OVER).mean("volume", over="width")


def test_rows_are_chosen_written_and_shown(tmp_path: Path):
    rows = sweep(area, OVER)
    assert without_seconds(rows.where(width=2)) == WHOLE[3:]
    rows.csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        assert [row["area"] for row in csv.DictReader(file)] == ["10", "20", "30", "20", "40", "60"]
    rows.json(tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == list(rows)
    assert repr(Rows([{"a": 1, "b": 0.123456}], ["a"])) == "| a | b |\n| --- | --- |\n| 1 | 0.1235 |"
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "rows.json"]
