"""Training on several processes and devices: the bits of one, also after a kill, and on another mesh."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import distributed

STEPS = 6


def launch(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "experiments.distributed", "--out", str(out)]
    command += ["--steps", str(STEPS), "--every", "2", *options]
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def parameters(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "parameters.safetensors")


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert len(a) == 9
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    assert launch(out, "--processes", "1", "--devices", "2").returncode == 0
    return out


@pytest.mark.exhaustive
def test_two_processes_killed_and_resumed_train_what_one_trains(one_process: Path, tmp_path: Path) -> None:
    two = ("--processes", "2", "--devices", "1")
    killed = launch(tmp_path, *two, "--kill-at", "5")
    assert killed.returncode != 0
    assert not (tmp_path / "parameters.safetensors").exists()
    resumed = launch(tmp_path, *two)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed behind step" in resumed.stdout
    # sums of two have one order, so not even the gradients differ
    assert_equal(parameters(one_process), parameters(tmp_path))


@pytest.mark.exhaustive
def test_a_checkpoint_comes_back_on_another_mesh_as_it_was(one_process: Path) -> None:
    before = parameters(one_process)
    again = launch(one_process, "--processes", "1", "--devices", "4", "--model-parallel", "2")
    assert again.returncode == 0, again.stderr
    assert f"resumed behind step {STEPS} on 4 devices" in again.stdout
    assert_equal(before, parameters(one_process))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "0"], "at least 1, got 0"),
        (["--processes", "3", "--devices", "1"], "3 devices, 1 to a model"),
        (["--processes", "2", "--devices", "2", "--model-parallel", "3"], "4 devices, 3 to a model"),
    ],
)
def test_what_cannot_be_is_said_at_once(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        distributed.main(options)
    assert message in capsys.readouterr().err


def test_every_epoch_sees_every_example_once() -> None:
    examples = 10 * distributed.BATCH
    rows = np.concatenate([distributed.batch_rows(0, step, examples) for step in range(10)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(examples))
    assert not np.array_equal(rows[:64], distributed.batch_rows(0, 10, examples))
    np.testing.assert_array_equal(distributed.batch_rows(3, 7, examples), distributed.batch_rows(3, 7, examples))
