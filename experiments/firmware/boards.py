"""Boards that QEMU emulates: their processor, and where their memories lie."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Board:
    """A machine of `qemu-system-arm`.

    processor: what it is called. options: of the compiler. flash, ram: origin and length in bytes. hertz: of the
    processor's clock, which SysTick counts.
    """

    machine: str
    processor: str
    options: tuple[str, ...]
    flash: tuple[int, int]
    ram: tuple[int, int]
    hertz: int


_MPS2 = {"flash": (0x0, 4 << 20), "ram": (0x20000000, 4 << 20), "hertz": 25_000_000}

BOARDS = {
    board.machine: board
    for board in (
        Board("mps2-an385", "Cortex-M3", ("-mcpu=cortex-m3",), **_MPS2),
        Board("mps2-an386", "Cortex-M4", ("-mcpu=cortex-m4",), **_MPS2),
        Board("mps2-an500", "Cortex-M7", ("-mcpu=cortex-m7",), **_MPS2),
        Board(
            "mps3-an547",
            "Cortex-M55",
            ("-mcpu=cortex-m55", "-mfloat-abi=hard"),
            flash=(0x0, 512 << 10),
            ram=(0x21000000, 2 << 20),
            hertz=32_000_000,
        ),
    )
}
"""machine -> its board. Sources: Arm's application notes AN385, AN386, AN500 and AN547 (memory maps, clocks)."""
