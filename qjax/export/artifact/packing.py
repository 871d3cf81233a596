"""Packs codes of two and four bits, several to a byte.

XLA and the runtimes store narrow codes in int8 or uint8; on disk they take the bits that they need. Element `i` of the
flattened array lies in byte `i // k` at bit `(i % k) * bits`, `k = 8 / bits`: the first element in the lowest bits, in
the layout of int4 in TFLite and ONNX. Negative codes are in two's complement. The unused bits of the last byte are
zero.
"""

import numpy as np
from numpy.typing import NDArray

from qjax.graph.ir import Quantization

PACKED_DTYPES = ("int8", "uint8")


def packed_bits(dtype: str, quantization: Quantization | None) -> int | None:
    """2 or 4 if every code of the range fits that many bits, None if the dtype's width is used.

    Three bits are stored as four. Wider dtypes are never packed, so that reading expands a file at most fourfold.
    """
    if quantization is None or dtype not in PACKED_DTYPES:
        return None
    for bits in (2, 4):
        half = 1 << (bits - 1)
        if -half <= quantization.qmin and quantization.qmax < half:
            return bits
        if quantization.qmin >= 0 and quantization.qmax < 2 * half:
            return bits
    return None


def packed_size(count: int, bits: int) -> int:
    """The bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def pack(codes: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Pack codes of any shape into uint8 of shape (packed_size,). The caller has checked that they fit."""
    per_byte = 8 // bits
    padded = np.zeros(packed_size(codes.size, bits) * per_byte, np.uint8)
    padded[: codes.size] = codes.reshape(-1).astype(np.uint8) & ((1 << bits) - 1)
    packed = np.zeros(padded.size // per_byte, np.uint8)
    for position in range(per_byte):
        packed |= padded[position::per_byte] << (position * bits)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int, *, dtype: str, signed: bool) -> NDArray[np.integer]:
    """The inverse: `count` codes of `dtype`, shape (count,).

    Raises ValueError if the size is not `packed_size(count, bits)` or if an unused bit is set.
    """
    if packed.size != packed_size(count, bits):
        raise ValueError(
            f"expected {packed_size(count, bits)} bytes for {count} codes of {bits} bits, got {packed.size}"
        )
    per_byte = 8 // bits
    spread = np.empty(packed.size * per_byte, np.uint8)
    for position in range(per_byte):
        spread[position::per_byte] = (packed >> (position * bits)) & ((1 << bits) - 1)
    if spread[count:].any():
        raise ValueError("expected zeros in the unused bits of the last byte, got a set bit")
    codes = spread[:count].astype(dtype)
    if signed:
        half = np.asarray(1 << (bits - 1), dtype)
        codes = (codes ^ half) - half
    return codes
