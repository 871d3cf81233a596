"""The frame of the contrib/lab: what is written, and when the command fails."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import __main__ as command
from experiments.lab import registry
from qjax.contrib.lab.pages import page, shown
from qjax.contrib.lab.running import run
from qjax.contrib.lab.study import (
    Measurement,
    Prediction,
    Settings,
    Study,
    Table,
    binomial_band,
    mean_band,
)

ROOT = Path(__file__).parents[3]
FIRST = Prediction("heads, share", 0.25, 0.75, "a coin")
SECOND = Prediction("edges, count", 0, 0, "never")


def toy(values: Mapping[str, float], predictions: Any = (FIRST, SECOND), data: Any = None) -> Study:
    def measure(settings: Settings) -> Measurement:
        rows: Any = [["heads | tails", np.int64(51_234)]]
        table = Table("Counts", ("side", "count"), rows)
        return Measurement(values, [table], data or {"bars": np.arange(3)}, "It lies flat.")

    def draw(figure: Figure, data: Mapping[str, Any]) -> None:
        figure.subplots().bar(range(3), data["bars"])

    about = "A coin", "How does it fall?", "Throw it."
    return Study("toy", *about, lambda settings: predictions, measure, draw, command="python -m experiments toy")


def main(monkeypatch: pytest.MonkeyPatch, study: Study, *arguments: str) -> int:
    monkeypatch.setattr(registry, "STUDIES", ("toy",))
    monkeypatch.setattr(registry, "get", lambda name: study)
    return command.main(list(arguments))


def test_a_measurement_that_holds_leaves_three_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = toy({"heads, share": 0.512345, "edges, count": 0})
    assert main(monkeypatch, study, "toy", "--seed", "3", "--out", str(tmp_path / "out")) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["toy.json", "toy.md", "toy.png"]
    document = json.loads((tmp_path / "out" / "toy.json").read_text())
    assert document["settings"] == {"seed": 3, "full": False}
    assert [(p["name"], p["measured"], p["holds"]) for p in document["predictions"]] == [
        ("heads, share", 0.512345, True),
        ("edges, count", 0, True),
    ]
    assert document["data"] == {"bars": [0, 1, 2]}
    page = (tmp_path / "out" / "toy.md").read_text()
    assert "| heads, share | 0.25 | 0.75 | 0.5123 | holds | a coin |" in page
    assert "| heads \\| tails | 51,234 |" in page
    assert "python -m experiments toy --seed 3" in page
    assert "It lies flat." in page
    assert (tmp_path / "out" / "toy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_a_measurement_that_leaves_its_band_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = toy({"heads, share": 0.5, "edges, count": 1})
    assert main(monkeypatch, study, "toy", "--out", str(tmp_path)) == 1
    assert "left its band: toy: edges, count" in capsys.readouterr().err
    assert "| edges, count | 0 | 0 | 1 | **outside** | never |" in (tmp_path / "toy.md").read_text()
    assert [p["holds"] for p in json.loads((tmp_path / "toy.json").read_text())["predictions"]] == [True, False]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan")])
def test_what_is_not_a_number_is_left_and_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: float
) -> None:
    study = toy({"heads, share": value, "edges, count": 0}, data={"bars": np.array([1.0, np.nan, 2.0])})
    assert main(monkeypatch, study, "--out", str(tmp_path)) == 1
    first, _ = json.loads((tmp_path / "toy.json").read_text())["predictions"]
    assert first["measured"] == str(float(value))
    assert not first["holds"]
    assert json.loads((tmp_path / "toy.json").read_text())["data"] == {"bars": [1.0, "nan", 2.0]}


@pytest.mark.parametrize(
    ("values", "named"),
    [({"heads, share": 0.5}, "edges, count"), ({"heads, share": 0.5, "edges, count": 0, "tails": 1}, "tails")],
)
def test_measuring_something_else_than_was_predicted_is_an_error(values: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"no others, but {named} is only predicted or only measured"):
        run(toy(values), Settings())


def test_predicting_one_thing_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="predicted twice: heads, share"):
        run(toy({"heads, share": 0.5}, (FIRST, FIRST)), Settings())


def test_predictions_are_made_before_the_measurement() -> None:
    order: list[str] = []

    def predict(settings: Settings) -> Any:
        order.append("predict")
        yield FIRST
        order.append("predicted")

    def measure(settings: Settings) -> Measurement:
        order.append("measure")
        return Measurement({"heads, share": 0.5}, [], {}, "")

    run(Study("toy", "", "", "", predict, measure, lambda figure, data: None), Settings())
    assert order == ["predict", "predicted", "measure"]


def test_an_unknown_name_is_an_error_that_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["ties", "nothing"])
    assert stopped.value.code == 2
    assert "no study is called nothing; there are ties, double_rounding" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"expected a study, one of ties, .*; got 'nothing'"):
        registry.get("nothing")


def test_both_ends_of_a_band_lie_inside() -> None:
    assert FIRST.holds(0.25)
    assert FIRST.holds(0.75)
    assert not FIRST.holds(0.7500001)
    assert not FIRST.holds(float("nan"))


def test_bands_are_five_standard_errors() -> None:
    assert binomial_band(0.5, 10_000) == pytest.approx((0.475, 0.525), abs=1e-12)
    assert mean_band(2.0, 3.0, 900, sigmas=2) == pytest.approx((1.8, 2.2), abs=1e-12)


def test_numbers_are_shown_to_four_digits_whatever_their_type() -> None:
    assert [shown(v) for v in (0.123456, np.float32(0.5), np.float64(1e-7), 12345, np.int64(12345), "x", True)] == [
        "0.1235",
        "0.5",
        "1e-07",
        "12,345",
        "12,345",
        "x",
        "True",
    ]


def test_the_answer_and_the_picture_come_first() -> None:
    study = dataclasses.replace(toy({"heads, share": 0.5, "edges, count": 0}), answer="Throw it twice.")
    text = page(run(study, Settings()))
    places = [text.index(part) for part in ("## What to do\n\nThrow it twice.", "![A coin](toy.png)", "## Method")]
    assert places == sorted(places)


def test_a_long_reason_is_a_note_and_stands_once() -> None:
    long = "a coin has two sides, and nobody has seen this one land on its edge, so far"
    predictions = [dataclasses.replace(p, why=long) for p in (FIRST, SECOND)]
    text = page(run(toy({"heads, share": 0.5, "edges, count": 0}, predictions), Settings()))
    assert text.count(long) == 1
    assert text.count("| note 1 |") == 2
    assert f"| 1 | {long} |" in text


@pytest.mark.parametrize("name", registry.STUDIES)
def test_every_study_says_what_to_do_in_three_sentences(name: str) -> None:
    study = registry.get(name)
    assert len(re.split(r"(?<=[.!?]) (?=[A-Z])", study.answer)) == 3
    assert f"## What to do\n\n{study.answer}" in (ROOT / "docs/experiments" / f"{name}.md").read_text()
