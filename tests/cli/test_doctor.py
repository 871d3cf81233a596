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
