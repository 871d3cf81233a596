"""What rounding costs: groups of targets, where they part, the page, and rows that a later run takes."""

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.cost import __main__ as command
from experiments.cost import groups, page
from experiments.cost.cases import CASES, Case
from experiments.cost.groups import Row, rows
from experiments.models import MLP

TARGETS = ("tflite_micro", "cmsis_nn", "nearest_even", "fpga")


def case(*_: object, model: nnx.Module | None = None) -> Case:
    """A perceptron of 64-32-10 with random weights, or another model of 64 features."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (256, 64)))
    qmodel = qjax.quantize(model or MLP((32,), rngs=nnx.Rngs(0)), qjax.Recipe(), x[:8])
    qjax.calibrate(qmodel, [x], progress=False)
    qmodel.eval()
    test = [(x[:128],), (x[128:],)]
    return Case(qmodel, (x[:8],), test, lambda found: found[0].argmax(-1), lambda found: float(found[0].mean()))


@pytest.mark.exhaustive
def test_targets_that_answer_alike_are_one_row_and_the_others_say_where_they_part():
    even, double, refused = rows("net", "W8A8", case(), TARGETS)
    assert even.targets == ["nearest_even"]
    assert (even.codes, even.compared, even.changed, even.decisions) == (0, 2560, 0, 256)
    assert double.targets == ["tflite_micro", "cmsis_nn"]
    assert 0 < double.codes < 200
    assert double.nodes >= 1
    assert (double.op, double.cause) == ("dot", "double_rounding")
    assert 0 < double.share < 0.05
    assert refused.targets == ["fpga"]
    assert "powers of two" in refused.refused


@pytest.mark.exhaustive
def test_a_later_run_takes_the_rows_and_the_page_has_them(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, ("mtcnn-rnet", "W8A8"), case)
    kept, shown = tmp_path / "rows.jsonl", tmp_path / "page.md"
    given = ["--networks", "mtcnn-rnet", "--settings", "W8A8", "--targets", *TARGETS, "--rows", str(kept)]
    found = command.main(given)
    assert command.main([*given, "--known", "--page", str(shown)]) == found
    text = shown.read_text()
    assert "| `tflite_micro`, `cmsis_nn` |" in text
    assert "## mtcnn-rnet, W8A8" in text


def test_a_refusal_names_no_target_and_no_file_of_this_machine():
    error = ValueError("the tensor 'a' of add 'a' (/home/me/model.py:46): expected 8 bits for the target 'tvm'. Or so.")
    assert groups._reason(error) == "the tensor 'a' of add 'a': expected 8 bits for the target"


def test_saturating_targets_are_no_part_of_the_summary():
    even = Row("net", "W8A8", ["nearest_even"], 0, 100, 0, 10, 90.0)
    micro = Row("net", "W8A8", ["tflite_micro"], 5, 100, 1, 10, 80.0, "dot_1", "dot", "rounding", 0.01, 1)
    pairs = Row("net", "W8A8", ["onnxruntime_avx2"], 50, 100, 5, 10, 50.0, "dot_1", "dot", "saturation", 0.5, 1)
    text = page.text([even, micro, pairs])
    assert "| net | 10.00 / 80.00 to 90.00 |" in text
    assert "| W8A8 | 1 | 10.0 % | -10.00 points |" in text
    assert "| `onnxruntime_avx2` | 1 | 50.00 % | net, W8A8 | 50.0 % | -40.00 to -40.00 |" in text


def test_every_network_names_its_decisions():
    found = np.asarray([[0.1, 0.9], [0.8, 0.2]])
    from experiments.cost import cases

    assert list(cases.DECISIONS["mtcnn-onet"]((np.zeros((2, 4)), found))) == [1, 0]
    assert list(cases.DECISIONS["silero-vad"]((found[:, :1],))) == [0, 1]
    assert list(cases.DECISIONS["minilm"]((np.asarray([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]),))) == [1, 0, 1]
    with pytest.raises(ValueError, match="unpack"):
        cases.DECISIONS["mtcnn-onet"]((np.zeros((2, 4)),))


@pytest.mark.exhaustive
def test_a_target_that_needs_several_nodes_for_one_is_counted_without_a_place():
    model = nnx.Sequential(nnx.Linear(64, 16, rngs=nnx.Rngs(0)), nnx.LayerNorm(16, rngs=nnx.Rngs(0)))
    found = rows("net", "W8A8", case(model=model), ("tflite_xnnpack", "double_round"))
    composed = next(row for row in found if "tflite_xnnpack" in row.targets)
    assert composed.refused == ""
    assert composed.compared == 256 * 16
    assert (composed.first, composed.nodes) == ("", 0)
