"""The experiment with a small language model: its data, its table, and one run with tiny sizes."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import language, language_cache


def test_texts_are_held_out_and_batches_are_pieces_of_the_others() -> None:
    whole = language.text()
    assert whole.min() >= 0
    assert whole.max() < 256
    data = language.Data(whole[:1000], whole[1000:2000], 16, 4)
    first, again = (next(data.batches(1, 3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (4, 17)
    tests = data.tests(100)
    np.testing.assert_array_equal(np.concatenate([piece.ravel() for piece in tests]), whole[1000 : 1000 + 14 * 4 * 17])


def test_the_table_counts_from_float() -> None:
    rows = [
        language.Row("float", "as trained", 2.0, seconds=1),
        language.Row("W8A8", "PTQ", 2.25, 1000, 0, 3),
        language.Row("W4A8", "PTQ", error="ValueError: no"),
    ]
    lines = language.table(rows).splitlines()[2:]
    assert lines == [
        "| float | as trained | 2.000 | +0.000 |  |  | 1 |",
        "| W8A8 | PTQ | 2.250 | +0.250 | 1,000 | 0 | 3 |",
        "| W4A8 | PTQ | ValueError: no | | | | |",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", [*language.RECIPES, *language_cache.RECIPES])
def test_a_tiny_run(tmp_path: Path, setting: str) -> None:
    sizes = {"width": 32, "layers": 1, "length": 8, "batch": 2, "steps": 20, "tuning": 2, "tests": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    options += ["--folder", str(tmp_path), "--rows", str(tmp_path / "rows"), "--settings", setting]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = language.main(options)
    # Adapters have no rows with a cache.
    assert [row.error for row in rows] == [""] * 5
    assert all(math.isfinite(row.bits) for row in rows)
    # Attention in floats adds in another order for a whole text than for single steps.
    assert setting == "W8A8, float cache" or all(row.differ == 0 for row in rows)
    assert all(row.outputs == 2 * 8 * 256 for row in rows[2:])
    kept = [language.Row(**json.loads(line)) for line in (tmp_path / "rows").read_text().splitlines()]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert language.main(options) == rows == kept
