"""Emitted C on other machines: AArch64, 32-bit ARM and big-endian s390x under QEMU; built for Cortex-M.

`tools/cross.sh` installs what these tests call.
"""

import pathlib
import subprocess

import pytest

from qjax.export.emit import c
from tests.export.emit import c_build, nodes
from tests.lower.lowered import residual_network

pytestmark = pytest.mark.oracle

MACHINES = {
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64", False),
    "arm": ("arm-linux-gnueabihf-gcc", "qemu-arm", False),
    "s390x": ("s390x-linux-gnu-gcc", "qemu-s390x", True),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return c_build.Compiled({**nodes.of_operations(), **nodes.of_targets()}, tmp_path_factory.mktemp("cross"))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_operation_rule_and_formula(machine, everything):
    compiler, emulator, big = MACHINES[machine]
    everything.assert_equal(everything.run("-O2", "-static", compiler=compiler, emulator=[emulator], big_endian=big))


@pytest.mark.parametrize(
    ("processor", "simd"),
    [("m0", False), ("m0", "cortex_m"), ("m4", "cortex_m"), ("m33", "cortex_m"), ("m55", "cortex_m")],
)
def test_cortex_m_code_holds_no_float_and_no_writable_data(processor, simd, tmp_path: pathlib.Path):
    graph = nodes.finished(residual_network(), "tflite_micro")
    for file, text in c.to_files(graph, vectors=0, simd=simd).items():
        (tmp_path / file).write_text(text)
    flags = [f"-mcpu=cortex-{processor}", "-mthumb", "-Os", "-ffreestanding", *c_build.WARNINGS]
    flags += ["-mfloat-abi=hard"] if processor == "m55" else []
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
