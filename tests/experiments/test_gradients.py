"""The study of integer gradients: its predictions hold on small samples, and rows are kept between runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import gradients
from experiments.gradients import FLOAT, MODELS, WAYS, Row


@pytest.mark.parametrize("bits", [4, 8])
def test_the_variance_of_a_gradient_is_the_predicted_one(bits: int) -> None:
    predicted, measured = gradients.variance(bits, 400)
    # 384 elements, each with a relative deviation of about sqrt(2 / 400), that share their draws in 16 rows
    assert abs(measured / predicted - 1) < 0.06


def test_nearest_stalls_where_stochastic_rounding_goes_on() -> None:
    assert gradients.stalled("nearest", 100) == 0
    assert 0.3 < gradients.stalled("stochastic", 100) < 0.9  # 1 - 0.99^100 = 0.63


def test_known_rows_are_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("MLP", way, seed, 12, 0.9 + seed / 100, 0.1, 1.0) for way in WAYS for seed in range(2)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    found = gradients.main(["--models", "MLP", "--seeds", "2", "--rows", str(path)])
    assert found == rows
    assert gradients.table(found).rows[0] == ["MLP", FLOAT, "0.9050", "0.9000", "0.1000", "2"]
    assert "4 bits, nearest" in capsys.readouterr().out
    assert set(MODELS) == {"MLP", "ResNet", "GRU", "transformer"}


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_the_mean_over_keys_has_the_predicted_error_and_nearest_keeps_its_own() -> None:
    one, mean = gradients.bias(2, "stochastic", 64, bits=4)
    assert 0.5 < mean * np.sqrt(64) / one < 2
    alone, same = gradients.bias(2, "nearest", 64, bits=4)
    assert alone == same > 0
