"""The study of binary networks, in little."""

import jax
import pytest

from experiments import binary
from experiments.data import digits


@pytest.mark.exhaustive
def test_a_binary_network_is_what_it_trained_as(monkeypatch):
    monkeypatch.setattr(binary, "_firmware", lambda graph: [])
    with jax.numpy_dtype_promotion("standard"):
        row = binary.measured("binary", digits(), epochs=1, width=8)
    assert (row.differ, row.compared) == (0, 5000)
    assert min(row.float_accuracy, row.accuracy) > 0.3
    (line,) = binary.table([row]).splitlines()[2:]
    assert line.startswith("| binary |")
    assert "| 0 of 5,000 |" in line
    assert line.count("not installed") == 3
