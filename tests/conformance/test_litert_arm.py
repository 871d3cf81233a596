"""The adapter of LiteRT for AArch64: where there is none, and what it answers where there is one."""

import sys

import numpy as np
import pytest

from conformance.case import Case, Grid
from conformance.runtimes import litert_arm
from conformance.runtimes.litert_arm import LiteRTArm

UNIT = Grid(np.asarray(1, np.float32), 0, "int8")


def add(x: np.ndarray, y: np.ndarray) -> Case:
    return Case("add", (x, y), (UNIT, UNIT), UNIT)


@pytest.fixture
def fresh():
    litert_arm._worker.cache_clear()
    yield
    litert_arm._worker.cache_clear()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (None, "QJAX_AARCH64_PYTHON is not set"),
        ("/nowhere/python", "/nowhere/python does not start"),
        ("/bin/false", "/bin/false cannot import it"),
    ],
)
def test_a_missing_python_is_named(monkeypatch, fresh, command, why):
    monkeypatch.setattr(litert_arm.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(litert_arm.PYTHON, raising=False)
    if command:
        monkeypatch.setenv(litert_arm.PYTHON, command)
    with pytest.raises(ModuleNotFoundError, match=f"{why}.*tools/aarch64-litert.sh DIR"):
        LiteRTArm().version()


def test_a_python_of_another_machine_is_refused(monkeypatch, fresh, tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text("import pickle, sys; pickle.dump(('riscv64', 'ai-edge-litert 2.3.0', ''), sys.stdout.buffer)")
    monkeypatch.setenv(litert_arm.PYTHON, f"{sys.executable} {stub}")
    with pytest.raises(ModuleNotFoundError, match="is a Python for riscv64"):
        LiteRTArm().version()


def test_wrong_mode():
    with pytest.raises(ValueError, match=r"mode must be one of reference, optimized, xnnpack\. Got 'fast'"):
        LiteRTArm("fast")  # pyright: ignore[reportArgumentType]


@pytest.mark.oracle
@pytest.mark.parametrize("mode", ["reference", "optimized", "xnnpack"])
def test_answers(mode):
    runtime = LiteRTArm(mode)
    assert runtime.name == f"litert-{mode}-arm"
    assert runtime.version().startswith("ai-edge-litert 2.")
    x = np.arange(-6, 6, dtype=np.int8).reshape(1, 3, 4)
    assert np.array_equal(runtime.run(add(x, x)), 2 * x)


@pytest.mark.oracle
def test_the_worker_outlives_a_model_that_litert_refuses():
    x = np.arange(4, dtype=np.int8).reshape(1, 2, 2, 1)
    kernel = np.ones((1, 1, 1, 1), np.int8)
    # a convolution without a bias
    refused = Case("conv2d", (x,), (UNIT,), UNIT, kernel, UNIT, attributes={"strides": (1, 1), "padding": "VALID"})
    with pytest.raises(RuntimeError, match="failed to prepare"):
        LiteRTArm("reference").run(refused)
    assert np.array_equal(LiteRTArm("reference").run(add(x, x)), 2 * x)
