"""Packed weights in flash: two codes of 4 bits per byte, or four codes of 2 bits.

    a row of 4-bit codes a b c d    ->    the bytes a | c << 4 and b | d << 4 (folded), or a | b << 4 and c | d << 4

The bytes are those of `export.packing`, with neighbours in one byte. A loop reads a code with the helper `int4_at`.
Rows that a loop reads from start to end are folded first: byte k holds the codes k and k + half of the row. The loop
then reads every array in order, which compilers vectorize.
"""

import dataclasses

import numpy as np

from qjax.export.artifact import packing
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.index import Index
from qjax.export.emit.c.text import TYPES

PACKED = (2, 4)
_DTYPES = ("int8", "uint8", "int16", "uint16")


@dataclasses.dataclass(frozen=True)
class Weights:
    """A constant array of codes; bits: of each code in memory. dtype: of the codes, before they were packed."""

    source: Source
    name: str
    bits: int
    dtype: str

    def at(self, place: Index) -> str:
        """The code at an offset, as text of a type that fits all codes of `dtype` that occur."""
        text = f"{self.name}[{place}]"
        if self.bits in PACKED:
            self.source.helpers.add(f"int{self.bits}_at")
            text = f"int{self.bits}_at({self.name}, {place})"
        # C extends signed codes of fewer bits
        return f"({TYPES[self.dtype]}){text}" if self.dtype.startswith("u") and self.bits < 16 else text

    def within(self, byte: str, position: int) -> str:
        """One of the codes of a byte."""
        assert self.bits in PACKED
        self.source.helpers.add(f"int{self.bits}")
        return f"int{self.bits}({byte} >> {position * self.bits})" if position else f"int{self.bits}({byte})"


def fitting(codes: np.ndarray) -> bool:
    """Whether these are codes that may be stored with other bits than their dtype's."""
    return codes.dtype.name in _DTYPES and codes.size > 0


def bits_of(codes: np.ndarray) -> int:
    """2, 4, 8 or 16: the fewest bits of signed numbers that fit every code."""
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    return next((n for n in (*PACKED, 8, 16) if -(2 ** (n - 1)) <= low and high < 2 ** (n - 1)), 32)


def store(source: Source, wanted: str, codes: np.ndarray, *, rows: bool = False) -> Weights:
    """Store the codes as a table. rows: pad every row (the last axis) with zeros to whole bytes and fold it."""
    dtype, bits = codes.dtype.name, bits_of(codes)
    if bits in PACKED:
        if rows:
            flat = codes.reshape(-1, codes.shape[-1])
            many = 8 // bits
            filled = np.pad(flat, ((0, 0), (0, -flat.shape[1] % many)))
            codes = np.moveaxis(filled.reshape(len(flat), many, -1), 1, 2)
        stored = packing.pack(codes, bits)
    else:
        stored = codes if bits >= np.iinfo(codes.dtype).bits else codes.astype(f"int{bits}")
    return Weights(source, source.table(wanted, stored, weights=True), bits, dtype)
