"""The benchmark's program: parts, names, pages, and that what it compares is the same."""

import json
import os
import re
import threading
from concurrent.futures.process import BrokenProcessPool

import jax
import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import accelerator, deployed, deployed_networks, kernels, onnx_styles, page, speed
from benchmarks.report import ratios
from benchmarks.timing import Failed, Paired, apart
from qjax.runtimes.onnx import session_of

RESULTS = [
    Paired("a / b", np.array([2.0, 2.0]), np.array([1.0, 1.0])),
    Failed("c / d", "3 codes differ", 3),
]


@pytest.fixture(autouse=True)
def plain_numpy_rules():
    """What flax and optax do in a training step."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def measured(monkeypatch):
    """A run of one part that takes no time; what it was asked for."""
    asked = []

    def measure(seconds, names):
        asked.append((seconds, list(names)))
        return RESULTS

    monkeypatch.setitem(program.PARTS, "speed", program._timed("speed", measure, program.NAMES["speed"]))
    return asked


@pytest.mark.exhaustive
def test_results_go_to_a_file_and_codes_that_differ_fail_the_run(measured, tmp_path, capsys):
    assert program.main(["speed", "--only", "LSTM", "--seconds", "0.5", "--out", str(tmp_path)]) == 1
    assert measured == [(0.5, ["LSTM"])]
    first, second = json.loads((tmp_path / "results.json").read_text())["speed"]
    assert first["ratio"] == 2.0
    assert second == {"name": "c / d", "failed": "3 codes differ"}
    assert (tmp_path / "speed.png").stat().st_size > 1000
    assert "3 codes differ where they must not." in capsys.readouterr().out


def test_a_part_is_written_onto_its_page(measured, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "benchmarks.md").write_text("before\n<!-- speed -->\nold\n<!-- end speed -->\nafter\n")
    assert program.main(["speed", "--out", str(tmp_path), "--docs", str(docs)]) == 1
    text = (docs / "benchmarks.md").read_text()
    assert text.startswith("before\n<!-- speed -->\n| comparison | ms |")
    assert "| a / b | 2000.000 | 1000.000 | 2.00 | 2.00 .. 2.00 |\n| c / d | - | - | - | 3 codes differ |\n" in text
    assert text.endswith("![speed](figures/speed.png)\n<!-- end speed -->\nafter\n")
    assert "old" not in text
    assert page.picture_of(docs, "speed").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["artefacts"], "expected parts out of primitive, steps, speed, kernels, native, styles, artifacts"),
        (["speed", "--only", "VGG"], "--only: expected names out of BERT-small; DS-CNN; .* Got VGG"),
        (["speed", "--only", "LSTM", "--docs", "docs"], "--docs wants whole tables"),
        (["speed", "artifacts", "--docs", "{tmp}"], "no such file"),
        (["speed", "--docs", "{tmp}/empty"], "expected one block <!-- speed --> ... <!-- end speed -->, found 0"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_measured(measured, arguments, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "benchmarks.md").write_text("")
    with pytest.raises(SystemExit):
        program.main([argument.format(tmp=tmp_path) for argument in arguments])
    # argparse breaks lines where it likes
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not measured


def test_the_pages_have_a_place_for_every_part(request):
    page.check(request.config.rootpath / "docs", list(program.PARTS))


def test_a_failure_takes_the_place_of_a_ratio():
    assert ratios(RESULTS).markdown().splitlines()[-3] == "| c / d | - | - | - | 3 codes differ |"


@pytest.mark.exhaustive
def test_forms_of_small_cases_compute_the_same():
    """Else `kernels` raises; here two of its cases."""
    found = kernels.kernels(0.0, ["3x3, 8x32x32x4 -> 32", "sums of rows, 1024x1024"])
    assert [result.name.split(": ")[-1] for result in found] == [
        "qjax / float32",
        "XLA's own / float32",
        "patches / float32",
        "packed by 2 / float32",
        "packed by 4 / float32",
        "qjax / XLA's own",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["GRU keyword spotter", "encoder, 6 layers of 384"])
def test_the_float_models_of_deployed_networks_are_the_networks(name, tmp_path):
    model, data = deployed_networks.made(name)
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_styles.float_model(model, data.shape).SerializeToString())
    (found,) = session_of(str(path)).run(None, {"x": data})
    # floats: two orders of summation
    assert np.abs(found - np.asarray(model(data))).max() < 1e-4


def test_rows_of_deployed_files_have_their_size():
    rows = [deployed.Row(RESULTS[0], 2048), deployed.Row(RESULTS[1], None)]
    lines = deployed.table(rows).markdown().splitlines()
    assert lines[2] == "| a / b | 2 | 2000.000 | 1000.000 | 2.00 | 2.00 .. 2.00 |"
    assert lines[3] == "| c / d | - | - | - | - | 3 codes differ |"
    assert deployed.differ(rows) == 3
    assert [row["bytes"] for row in deployed.document(rows)] == [2048, None]


@pytest.mark.exhaustive
def test_a_process_that_crashes_is_an_error():
    """And not one that is waited for."""
    with pytest.raises(BrokenProcessPool):
        apart(_crashing, 0.0, ["x"])


def _crashing(seconds, names):
    os._exit(3)


@pytest.mark.exhaustive
def test_onnx_runtime_computes_what_the_interpreter_does():
    """Else the comparison is a failure, and not a ratio."""
    found = speed.speed(0.0, ["DS-CNN"], batches=(2,))
    assert [type(result) for result in found] == [Paired, Paired]


@pytest.mark.exhaustive
def test_an_accelerators_bits_are_compared_with_the_cpus() -> None:
    """Here both are the CPU, and no precision reaches an integer product."""
    (found,) = accelerator.bits("DS-CNN", ("BF16_BF16_F32",))
    assert found.outputs == 10
    assert (found.exact, found.graph) == (0, 0)
    with pytest.raises(RuntimeError, match="expected a GPU or TPU among JAX's devices"):
        accelerator.accelerator(0.1, ["ResNet-50, 4 blocks"])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.exhaustive
def test_the_times_of_a_network(half: bool) -> None:
    case = (lambda rngs: accelerator.Decoder(1000, 16, 1, 2, 32, rngs=rngs), (2, 8))
    found = accelerator.times("decoder", half, 0.05, threading.Barrier(1), threading.Lock(), case=case)
    names = ["qjax / float", "qjax, dynamic / float", "integer graph / float forward"]
    title = "decoder, bfloat16" if half else "decoder, float32"
    ours = [result for result in found if "qwix" not in result.name]
    assert [result.name for result in ours] == [f"{title}: {name}" for name in names]
    assert [result for result in ours if isinstance(result, Failed)] == []
