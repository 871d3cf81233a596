"""The timing of decoding: all sides write the same codes, and its table divides turn by turn."""

import jax
import numpy as np
import pytest

from benchmarks import decoding


def test_the_table_divides_turn_by_turn() -> None:
    rows = [decoding.Row("float32", np.array([0.2, 0.4, 0.1])), decoding.Row("C", np.array([0.1, 0.1, 0.1]))]
    assert decoding.table(rows).splitlines()[2:] == [
        "| float32 | 5 | 1.00 | 1.00 .. 1.00 |",
        "| C | 10 | 2.00 | 1.50 .. 3.00 |",
    ]


@pytest.mark.exhaustive
def test_every_side_writes_the_interpreters_codes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--width", "32", "--layers", "1", "--length", "8", "--turns", "2"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert decoding.main(sizes) == 0
    said = capsys.readouterr().out
    assert "a cache of 9 places, batch 1: 0 codes differ." in said
    assert [name in said for name in ("| float32, XLA |", "| interpreter |", "| ONNX Runtime |", "| C |")] == [True] * 4
