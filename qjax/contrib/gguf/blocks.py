"""The bytes of llama.cpp's blocks of 32 weights, as `ggml-common.h` lays them out; K formats are in `k_blocks`.

q4_0    scale float16 | 16 bytes: codes 0 to 15 in the low halves, codes 16 to 31 in the high halves
q4_1    scale | minimum | 16 bytes
q5_0    scale | 32 bits: the fifth bit of each code | 16 bytes
q5_1    scale | minimum | 32 bits | 16 bytes
q8_0    scale | 32 bytes: signed codes
"""

from collections.abc import Sequence

import numpy as np

from qjax.contrib.gguf.k_blocks import LAYOUTS, pack_k, scale_range, unpack_k
from qjax.numerics.block_formats import BLOCK, BLOCK_FORMATS

Parts = tuple[np.ndarray, ...]
"""int8 codes (rows, columns); float32 scales (rows, blocks); and minimums of that shape, if the format has them.

K formats have instead of scales d float32 (rows, blocks of 256) and int8 scales (rows, blocks); and so for minimums.
"""


def unpack(data: np.ndarray, format: str) -> Parts:
    """The codes, scales and minimums of rows of blocks. data: uint8 (rows, bytes)."""
    known = BLOCK_FORMATS[format]
    blocks = data.reshape(-1, block_bytes(format))
    if known.has_integer_scales:
        return tuple(part.reshape(len(data), -1) for part in unpack_k(blocks, format, known.lowest))
    floats = 2 if known.has_minimum else 1
    parts = blocks[:, : 2 * floats].copy().view("<f2").astype(np.float32)
    rest = blocks[:, 2 * floats :]
    if known.bits == 8:
        codes = rest.view(np.int8)
    else:
        halves = rest[:, known.bits - 4 and 4 :]
        codes = np.concatenate([halves & 15, halves >> 4], axis=1).astype(np.int16)
        if known.bits == 5:
            codes |= np.unpackbits(rest[:, :4], axis=1, bitorder="little").astype(np.int16) << 4
        codes = (codes + known.lowest).astype(np.int8)
    rows = data.shape[0]
    return codes.reshape(rows, -1), *(parts[:, index].reshape(rows, -1) for index in range(floats))


def pack(parts: Parts, format: str) -> np.ndarray:
    """The inverse of `unpack`: uint8 (rows, bytes).

    Raises:
      ValueError: codes, scales or minimums that the format does not represent.
    """
    known = BLOCK_FORMATS[format]
    codes, *floats = (np.asarray(part) for part in parts)
    if known.has_integer_scales:
        floats, integers = floats[::2], floats[1::2]
        _check_integers(integers, format)
    with np.errstate(over="ignore"):
        halves = [part.astype("<f2") for part in floats]
    for name, half, part in zip(("scales", "minimums"), halves, floats, strict=False):
        if not np.array_equal(half.astype(np.float32), part, equal_nan=True):
            raise ValueError(f"{format}: expected {name} that float16 represents. Use qjax.WeightFormat({format!r}).")
    unsigned = codes.reshape(-1, known.whole).astype(np.int16) - known.lowest
    if unsigned.min(initial=0) < 0 or unsigned.max(initial=0) >= 2**known.bits:
        raise ValueError(f"{format}: expected codes of {known.bits} bits, got {codes.min()} to {codes.max()}.")
    if known.has_integer_scales:
        rows = [part.reshape(len(unsigned), -1) for part in parts]
        return pack_k(rows, format, known.lowest).reshape(codes.shape[0], -1)
    columns: list[np.ndarray] = [half.reshape(-1, 1).view(np.uint8) for half in halves]
    if known.bits == 8:
        columns.append(codes.reshape(-1, BLOCK).astype(np.int8).view(np.uint8))
    else:
        if known.bits == 5:
            columns.append(np.packbits(unsigned.astype(np.uint8) >> 4, axis=1, bitorder="little"))
        low = unsigned.astype(np.uint8) & 15
        columns.append(low[:, : BLOCK // 2] | low[:, BLOCK // 2 :] << 4)
    return np.concatenate(columns, axis=1).reshape(codes.shape[0], -1)


def _check_integers(parts: Sequence[np.ndarray], format: str) -> None:
    least, most = scale_range(format)
    for name, part in zip(("scales", "minimums"), parts, strict=False):
        if part.min(initial=0) < least or part.max(initial=0) > most:
            raise ValueError(f"{format}: expected {name} of {least} to {most}, got {part.min()} to {part.max()}.")


def block_bytes(format: str) -> int:
    """The bytes of one block, or of 256 weights of a K format."""
    known = BLOCK_FORMATS[format]
    if known.has_integer_scales:
        return LAYOUTS[format].itemsize
    return 2 * (1 + known.has_minimum) + BLOCK * known.bits // 8
