"""The table and the picture of learned bits, and the rows that they come from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from experiments.learned_bits import page, tasks
from experiments.learned_bits.__main__ import main
from experiments.learned_bits.row import Row, keep, read


def circuit(tool: str, seed: int, tables: float, valid: float, test: float, **more: object) -> Row:
    return dataclasses.replace(Row("digits", tool, seed, 0, 1e-6), tables=tables, valid=valid, test=test, **more)


ROWS = [
    circuit("qjax", 0, 4_000, 90, 91, same=True, seconds=10),
    circuit("qjax", 0, 9_000, 96, 95, same=True, seconds=20),
    circuit("qjax", 0, 9_500, 95, 99, same=True, seconds=30),
    circuit("qjax", 1, 4_500, 90, 93, same=True, seconds=10),
    circuit("HGQ2", 0, 6_000, 90, 80, same=False, seconds=5),
    circuit("HGQ2", 0, 0, 99, 99, error="no circuit"),
]


def test_a_circuit_is_chosen_by_the_validation_rows():
    mine = [row for row in ROWS if row.run == ("digits", "qjax", 0)]
    assert page.best(mine, 10_000) is ROWS[1]
    assert page.best(mine, 5_000) is ROWS[0]
    assert page.best(mine, 1_000) is None


def test_a_row_states_means_errors_and_circuits_that_differ():
    lines = page.text(ROWS).splitlines()
    assert "| qjax | 94.0 ± 1.0 | 94.0 ± 1.0 | 94.0 ± 1.0 | 92.0 ± 1.0 | 92.0 ± 1.0 | 4 | 0 | 20 |" in lines
    assert "| HGQ2 | 80.0 | 80.0 | 80.0 | 80.0 |  | 1 | 1 | 5 |" in lines


@pytest.mark.exhaustive
def test_rows_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    keep(tmp_path / "rows.jsonl", ROWS)
    assert read(tmp_path / "rows.jsonl") == ROWS
    (tmp_path / "page.md").write_text(f"before {page.START}\nold\n{page.END} after")
    main(["--known", *(f"--{what}={tmp_path / file}" for what, file in FILES.items())])
    text = (tmp_path / "page.md").read_text()
    assert text.startswith(f"before {page.START}")
    assert text.endswith(f"{page.END} after")
    assert "old" not in text
    assert page.text(ROWS) in text
    assert "qjax" in capsys.readouterr().out
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"


FILES = {"rows": "rows.jsonl", "page": "page.md", "picture": "picture.png"}


def test_prices_grow_evenly_and_inputs_are_means():
    task = tasks.TASKS["digits"]
    assert tasks.price_at(task, 0) == pytest.approx(task.prices[0])
    assert tasks.price_at(task, task.epochs - 1) == pytest.approx(task.prices[1])
    found = tasks.split(task)
    assert found.train[0].shape[1] == 64
    assert len(found.train[0]) + len(found.valid[0]) + len(found.test[0]) == 1797
    assert float(np.max(found.test[0])) <= 1
