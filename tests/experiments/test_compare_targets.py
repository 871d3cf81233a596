"""The comparison of targets in little: it runs, and its table agrees with its reports."""

import jax
import pytest

from experiments import compare_targets


@pytest.fixture(autouse=True)
def optax_promotion():
    """optax mixes dtypes; the library's own strictness is tested elsewhere."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.exhaustive
def test_three_targets(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["tflite_micro", "tflite_xnnpack", "nearest_even"]
    reports = compare_targets.main(["--epochs", "1", "--images", "40", "--targets", *names])
    printed = capsys.readouterr().out
    assert set(reports) == {(names[0], names[1]), (names[0], names[2]), (names[1], names[2])}
    for report in reports.values():
        assert report.examples == 40
        assert sum(cause.count for node in report.nodes for cause in node.causes) == sum(
            node.own.count for node in report.nodes
        )
    assert str(reports["tflite_micro", "tflite_xnnpack"]) in printed
