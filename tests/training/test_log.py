"""What a training run logs: numbers, scales and oscillations of the model, and a writer that gets the same."""

import jax.numpy as jnp
import numpy as np
import pytest

import qjax
from qjax.reporting import curves
from tests.analysis.models import Small, coarse, data


class Writer:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def write_scalars(self, step, scalars):
        self.seen.append((step, dict(scalars)))


def test_the_log_holds_what_was_written_and_passes_it_on():
    qmodel = qjax.quantize(Small(), coarse(3), data(8, 4))
    tracker = qjax.training.Oscillations.of({"w": np.array([0, 0, 0, 0])}, momentum=0.5)
    for codes in ([1, 1, 0, 0], [0, 1, 0, 0]):  # the first of four turns back
        tracker = tracker.advance({"w": np.array(codes)})
    writer = Writer()
    log = qjax.training.TrainingLog(writer)
    log.write(5, qmodel, tracker, loss=jnp.float32(2.5))
    log.write(7, loss=1)
    assert log.curves["loss"] == [(5, 2.5), (7, 1.0)]
    assert log.curves["oscillating/w"] == [(5, 0.25)]
    for name, qparams in qmodel.qparams().items():
        (step, value) = log.curves[f"scale/{name}"][0]
        scales = np.asarray(qparams.scale, np.float64).ravel()
        assert step == 5
        assert scales.min() <= value * (1 + 1e-12)
        assert value <= scales.max() * (1 + 1e-12)
    assert writer.seen[0][1]["loss"] == 2.5
    assert writer.seen[1] == (7, {"loss": 1.0})


def test_what_is_no_writer():
    with pytest.raises(TypeError, match=r"expected a writer with the method write_scalars\(step, scalars\), got str"):
        qjax.training.TrainingLog("runs")  # pyright: ignore[reportArgumentType]


def test_charts_group_scales_and_leave_out_what_is_not_finite():
    log = qjax.training.TrainingLog()
    for step, loss in ((0, 4.0), (1, float("nan")), (2, 1.0)):
        log.write_scalars(step, {"loss": loss, "scale/a": 2.0**step, "scale/<b>": 0.5, "bad": float("inf")})
    loss, scale = curves.charts_of(log)
    assert loss.lines == [("loss", [(0, 4.0), (2, 1.0)])]
    assert scale.lines == [("a", [(0, 1.0), (1, 2.0), (2, 4.0)]), ("<b>", [(0, 1.0), (1, 1.0), (2, 1.0)])]
    drawn = curves.section([loss, scale])
    assert drawn.count("<polyline") == 3
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
    # a logarithmic axis: 1, 2 and 4 have equal distances
    line = next(part for part in curves.svg(scale).split("<polyline")[1:] if "<title>a:" in part)
    heights = [float(point.split(",")[1]) for point in line.split('"')[1].split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)  # written with one decimal
    rows = curves.table_of(log).rows
    assert ("scale/a", "1", "4", "4", "1", "4") in rows
