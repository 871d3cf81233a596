"""Emitted C as firmware: compiled for a Cortex-M, linked without an operating system, run under QEMU."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

from experiments.firmware import cmsis_nn
from experiments.firmware.boards import Board
from qjax.export.integer_graph import IntegerGraph

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wsign-conversion")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One network on one board.

    differ, codes: of the golden vectors. flash: bytes of the network's code and constants. arena, stack: bytes of RAM;
    the stack is that of the whole program. instructions: of one call.
    """

    board: str
    processor: str
    differ: int
    codes: int
    flash: int
    arena: int
    stack: int
    instructions: int


def run(
    graph: IntegerGraph,
    board: Board,
    folder: Path,
    *,
    vectors: int = 4,
    level: str = "-O2",
    simd: bool | str = False,
    kernels: Path | None = None,
) -> Measured:
    """Write, build and run a graph; `folder` keeps all files.

    simd: of `graph.emit`. kernels: a checkout of CMSIS-NN, which then computes what it has kernels for.

    Raises:
      FileNotFoundError: the compiler or the emulator is not installed.
      RuntimeError: a tool fails, or the firmware does; with what it printed.
    """
    for tool in ("arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(
                f"firmware: expected {tool} on the path. tools/cross.sh installs it on Debian and Ubuntu."
            )
    graph.emit("c", folder, name="net", vectors=vectors, simd=simd)
    options = (*board.options, "-mthumb", level, "-ffunction-sections", "-fdata-sections")
    warnings, libraries = WARNINGS, ()
    if kernels is not None:
        source = folder / "net.c"
        source.write_text(cmsis_nn.rewritten(source.read_text(), graph))
        place = folder.parent / f"cmsis-nn-{board.machine}{level}"
        libraries = (str(cmsis_nn.archive(kernels, place, options, _call)),)
        # tables that nothing reads any more remain in the text
        warnings = (f"-I{(kernels / 'Include').resolve()}",)
    for source in ("net.c", "net_test.c"):
        _call("arm-none-eabi-gcc", *options, "-std=c99", *warnings, "-c", source, "-o", f"{source}.o", folder=folder)
    only = ("-r", "-nostdlib", "-Wl,--gc-sections", "-Wl,-u,net_run", "net.c.o", *libraries)
    _call("arm-none-eabi-gcc", *options, *only, "-o", "network.o", folder=folder)
    (folder / "counted.c").write_text(_counted((folder / "net.h").read_text()))
    _call("arm-none-eabi-gcc", *options, "-c", "counted.c", "-o", "counted.o", folder=folder)
    ticks = f"-DHERTZ={board.hertz}u"
    _call("arm-none-eabi-gcc", *options, ticks, "-c", str(HERE / "startup.c"), "-o", "startup.o", folder=folder)
    memory = {"FLASH": board.flash, "RAM": board.ram}
    places = [
        f"-Wl,--defsym={name}_{what}={value:#x}"
        for name, (origin, length) in memory.items()
        for what, value in (("ORIGIN", origin), ("LENGTH", length))
    ]
    link = ("-nostartfiles", "--specs=rdimon.specs", "-Wl,--gc-sections", "-Wl,--wrap=net_run", *places)
    objects = ("net.c.o", "net_test.c.o", "counted.o", "startup.o", *libraries)
    script = ("-T", str(HERE / "board.ld"))
    _call("arm-none-eabi-gcc", *options, *objects, *link, *script, "-o", "firmware.elf", folder=folder)
    emulator = ("-M", board.machine, "-nographic", "-monitor", "none", "-serial", "none", "-icount", "shift=0")
    semihosting = ("-semihosting-config", "enable=on,target=native")
    printed = _call("qemu-system-arm", *emulator, *semihosting, "-kernel", "firmware.elf", folder=folder)
    codes = re.search(r"net: (\d+) of (\d+) codes differ", printed)
    spent = re.search(r"firmware: \d+ calls, (\d+) instructions, (\d+) bytes of stack", printed)
    if codes is None or spent is None:
        raise RuntimeError(f"firmware: expected the counts of codes and instructions. The board printed:\n{printed}")
    sizes = _call("arm-none-eabi-size", "network.o", folder=folder).splitlines()[1].split()
    arena = re.search(r"#define NET_ARENA_SIZE (\d+)", (folder / "net.h").read_text())
    assert arena is not None
    return Measured(
        board.machine,
        board.processor,
        int(codes[1]),
        int(codes[2]),
        int(sizes[0]) + int(sizes[1]),
        int(arena[1]),
        int(spent[2]),
        int(spent[1]),
    )


def _counted(header: str) -> str:
    """What the linker puts in the place of net_run (--wrap=net_run): it counts the instructions of a call."""
    found = re.search(r"void net_run\((.*)\);", header)
    assert found is not None
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", found[1]))
    return f"""#include "net.h"
void firmware_start(void);
void firmware_stop(void);
void __real_net_run({found[1]});
void __wrap_net_run({found[1]})
{{
    firmware_start();
    __real_net_run({names});
    firmware_stop();
}}
"""


def _call(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    # the self-test ends with 1 where codes differ, and says so
    if done.returncode != 0 and "codes differ" not in done.stdout:
        raise RuntimeError(f"firmware: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
