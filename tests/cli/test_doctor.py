"""`qjax doctor`: what is here, and what runtimes answer."""

import pytest

from qjax.runtimes import RUNTIMES


def test_what_is_installed(qjax):
    said = qjax("doctor").stdout
    assert "devices: " in said
    assert all(f"  {name} " in said for name in RUNTIMES)


@pytest.mark.exhaustive
def test_runtimes_answer(qjax):
    said = qjax("doctor", "--live").stdout
    assert "tflite-micro        answers: 0 of 32 codes differ" in said or "tflite-micro        not installed" in said
    assert "onnx-reference      answers: 0 of 32 codes differ" in said


def test_a_command_that_is_nearly_right(refused):
    assert refused("inspekt", "x").startswith("No such command 'inspekt'. Did you mean 'inspect'")


def test_a_missing_runtime_has_the_line_that_installs_it(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from qjax.cli import doctor

    missing = {name for name, state, _ in doctor.found() if state == "not installed"}
    assert {"tflite-micro", "litert", "onnxruntime", "executorch", "verilog"} <= missing
    assert all("pip install" in doctor.install(name) for name in missing if name not in ("c", "stablehlo"))
    assert "tflite-micro" in doctor.install("tflite-micro")
