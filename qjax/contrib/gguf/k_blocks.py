"""The bytes of llama.cpp's K formats, 256 weights at a time, as `ggml-common.h` lays them out.

q2_k    16 bytes: scale in the low half, minimum in the high one | 64 bytes: 4 codes each | d | dmin
q3_k    32 bytes: the third bits of 8 codes each | 64 bytes: the others of 4 codes each | 12 bytes: scales | d
q4_k    d | dmin | 12 bytes: scales and minimums | 128 bytes: 2 codes each
q5_k    d | dmin | 12 bytes: scales and minimums | 32 bytes: the fifth bits of 8 codes each | 128 bytes
q6_k    128 bytes: the low halves of 2 codes each | 64 bytes: the other bits of 4 codes each | 16 int8 scales | d
"""

from collections.abc import Sequence

import numpy as np

LAYOUTS = {
    "q2_k": np.dtype([("scales", "u1", 16), ("low", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    "q3_k": np.dtype([("high", "u1", 32), ("low", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    "q4_k": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("low", "u1", 128)]),
    "q5_k": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("low", "u1", 128)]),
    "q6_k": np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
}
"""One element holds 256 weights."""

_FIELDS = {
    "q2_k": (2, 32, 0, 0),
    "q3_k": (2, 32, 1, 32),
    "q4_k": (4, 32, 0, 0),
    "q5_k": (4, 32, 1, 32),
    "q6_k": (4, 64, 2, 32),
}
"""Format -> bits of a code in the field "low", and how many bytes in a row hold consecutive codes; so for "high"."""


def unpack_k(data: np.ndarray, format: str, lowest: int) -> list[np.ndarray]:
    """int8 codes (n, 256), d float32 (n, 1), int8 scales (n, blocks), and, if any, dmin and minimums.

    data: uint8 (n, bytes). lowest: the lowest code.
    """
    fields = np.ascontiguousarray(data).view(LAYOUTS[format])[:, 0]
    bits, run, more, more_run = _FIELDS[format]
    codes = _spread(fields["low"], bits, run).astype(np.int16)
    if more:
        codes |= _spread(fields["high"], more, more_run).astype(np.int16) << bits
    codes = (codes + lowest).astype(np.int8)
    d = fields["d"].astype(np.float32)[:, None]
    scales, *minimums = _unpacked_scales(fields["scales"], format)
    if not minimums:
        return [codes, d, scales.astype(np.int8)]
    return [codes, d, scales.astype(np.int8), fields["dmin"].astype(np.float32)[:, None], minimums[0].astype(np.int8)]


def pack_k(parts: Sequence[np.ndarray], format: str, lowest: int) -> np.ndarray:
    """The inverse of `unpack_k`; the parts must be within the format's ranges."""
    codes, d, scales, *rest = parts
    fields = np.zeros(len(codes), LAYOUTS[format])
    bits, run, more, more_run = _FIELDS[format]
    unsigned = (codes.astype(np.int16) - lowest).astype(np.uint8)
    fields["low"] = _gathered(unsigned & (2**bits - 1), bits, run)
    if more:
        fields["high"] = _gathered(unsigned >> bits, more, more_run)
    fields["d"] = d[:, 0]
    if rest:
        fields["dmin"] = rest[0][:, 0]
    fields["scales"] = _packed_scales(scales, rest[1] if rest else None, format)
    return fields[:, None].view(np.uint8)


def scale_range(format: str) -> tuple[int, int]:
    """The least and the greatest integer scale; minimums begin at 0 and end there, too."""
    return {"q2_k": (0, 15), "q3_k": (-32, 31), "q6_k": (-128, 127)}.get(format, (0, 63))


def _spread(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes (n, 256) from bytes (n, count). The low bits of `run` bytes come first, then the next bits of the same."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    rows = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return rows.reshape(len(data), -1)


def _gathered(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The inverse of `_spread`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    rows = codes.reshape(len(codes), -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(rows, axis=2).reshape(len(codes), -1)


def _unpacked_scales(data: np.ndarray, format: str) -> list[np.ndarray]:
    if format == "q6_k":
        return [data]
    if format == "q2_k":
        return [data & 15, data >> 4]
    if format == "q3_k":
        low = np.concatenate([data[:, :8] & 15, data[:, :8] >> 4], axis=1)
        high = np.concatenate([data[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        return [(low | high << 4).astype(np.int16) - 32]
    a, b, c = data[:, :4], data[:, 4:8], data[:, 8:]
    return [np.concatenate([a & 63, c & 15 | a >> 6 << 4], 1), np.concatenate([b & 63, c >> 4 | b >> 6 << 4], 1)]


def _packed_scales(scales: np.ndarray, minimums: np.ndarray | None, format: str) -> np.ndarray:
    if format == "q6_k":
        return scales
    if format == "q3_k":
        unsigned = (scales.astype(np.int16) + 32).astype(np.uint8)
        high = [unsigned[:, 4 * part : 4 * part + 4] >> 4 << 2 * part for part in range(4)]
        low = unsigned[:, :8] & 15 | (unsigned[:, 8:] & 15) << 4
        return np.concatenate([low, np.bitwise_or.reduce(high)], axis=1)
    assert minimums is not None
    own, low = scales.astype(np.uint8), minimums.astype(np.uint8)
    if format == "q2_k":
        return own | low << 4
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (own, low)]
    return np.concatenate([*first, own[:, 4:] & 15 | (low[:, 4:] & 15) << 4], axis=1)
