"""Emitted C on other machines: AArch64, 32-bit ARM and big-endian s390x under QEMU; built for Cortex-M.

`tools/cross.sh` installs what these tests call.
"""

import pathlib
import subprocess

import numpy as np
import pytest

from qjax.export.emit import c
from qjax.export.interpreter import Interpreter
from tests.export.emit import c_build, c_nodes
from tests.export.lowered import residual_network

pytestmark = pytest.mark.oracle

MACHINES = {
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64", False),
    "arm": ("arm-linux-gnueabihf-gcc", "qemu-arm", False),
    "s390x": ("s390x-linux-gnu-gcc", "qemu-s390x", True),
}


@pytest.fixture(scope="module")
def everything():
    nodes = {**c_nodes.of_operations(), **c_nodes.of_targets()}
    graphs = {name: graph for name, (graph, _) in nodes.items()}
    inputs = {name: codes for name, (_, codes) in nodes.items()}
    expected = {name: [np.asarray(y) for y in Interpreter(graphs[name])(*inputs[name])] for name in graphs}
    return *c_build.programs(graphs), inputs, expected


@pytest.mark.parametrize("machine", MACHINES)
def test_every_operation_rule_and_formula(machine, everything, tmp_path):
    built, text, inputs, expected = everything
    compiler, emulator, big = MACHINES[machine]
    found = c_build.run_program(
        built,
        text,
        tmp_path,
        inputs,
        ["-O2", "-static"],
        compiler=compiler,
        emulator=[emulator],
        big_endian=big,
    )
    for name, outputs in expected.items():
        for got, want in zip(found[name], outputs, strict=True):
            assert np.array_equal(got, want), (machine, name, np.count_nonzero(got != want))


def test_cortex_m_code_holds_no_float_and_no_writable_data(tmp_path: pathlib.Path):
    graph = c_nodes.finished(residual_network(), "tflite_micro")
    for file, text in c.to_files(graph, vectors=0).items():
        (tmp_path / file).write_text(text)
    flags = ["-mcpu=cortex-m0", "-mthumb", "-Os", "-ffreestanding", *c_build.WARNINGS]
    command = ["arm-none-eabi-gcc", *flags, "-c", "model.c", "-o", "model.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["arm-none-eabi-nm", "model.o"], cwd=tmp_path, capture_output=True, text=True, check=True)
    symbols = [line.split()[-2:] for line in listed.stdout.splitlines()]
    # what is called: 64-bit products and shifts, copies; nothing that adds floats
    called = {name for kind, name in symbols if kind == "U"}
    assert not {name for name in called if name.startswith(("__aeabi_f", "__aeabi_d")) and "idiv" not in name}
    assert "malloc" not in called
    assert not [name for kind, name in symbols if kind in "bBdD"]
