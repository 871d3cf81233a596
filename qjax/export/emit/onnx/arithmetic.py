"""Integer operations that ONNX has no operator for, each a small function of the domain "qjax".

ONNX shifts only unsigned integers, and cannot count leading zeros.
"""

import numpy as np

from qjax.export.emit.onnx.builder import Builder, Library

_WIDE = {"int8": "int32", "uint8": "uint32", "int16": "int32", "uint16": "uint32"}


def unsigned(dtype: str) -> str:
    """The unsigned type of the same width."""
    return dtype if dtype.startswith("u") else f"u{dtype}"


def shift(builder: Builder, kind: str, dtype: str, x: str, amount: str) -> str:
    """x shifted by an amount in [0, width), both of that dtype; kind: "left", "right_arithmetic", "right_logical"."""
    if dtype in _WIDE:
        # widening keeps the sign, narrowing the low bits
        wide = _WIDE[dtype]
        if kind == "right_logical":
            wide = unsigned(wide)
            x = builder.cast(x, unsigned(dtype))
        return builder.cast(shift(builder, kind, wide, builder.cast(x, wide), builder.cast(amount, wide)), dtype)
    if dtype.startswith("u"):
        return builder.op("BitShift", x, amount, direction="LEFT" if kind == "left" else "RIGHT")
    return builder.call(_shift_function(builder.library, kind, dtype), x, amount)


def _shift_function(library: Library, kind: str, dtype: str) -> str:
    b = Builder(library, ("x", "amount"))
    if kind == "right_arithmetic":
        # x + 2^(width - 1) >= 0 shifts like an unsigned number, and floor((x + h) / d) - h / d = floor(x / d) as d | h
        half = np.asarray(np.iinfo(dtype).min, dtype)
        moved, amount = (
            b.cast(name, unsigned(dtype)) for name in (b.op("BitwiseXor", "x", b.constant(half)), "amount")
        )
        above = b.constant(half.astype(unsigned(dtype)))
        parts = (b.cast(b.op("BitShift", name, amount, direction="RIGHT"), dtype) for name in (moved, above))
        y = b.op("Sub", *parts)
        doc = "x >> amount: the floor of x / 2^amount."
    else:
        direction = "LEFT" if kind == "left" else "RIGHT"
        operands = (b.cast(name, unsigned(dtype)) for name in ("x", "amount"))
        y = b.cast(b.op("BitShift", *operands, direction=direction), dtype)
        doc = "x << amount." if kind == "left" else "x >> amount with zeros from above."
    return library.add(f"shift_{kind}_{dtype}", ("x", "amount"), (y,), b.nodes, doc)


def count_leading_zeros(builder: Builder, dtype: str, x: str) -> str:
    """How many bits lie above the highest set one; for a signed type, 0 for negative numbers."""
    width = np.iinfo(dtype).bits
    if width < 32:
        wide = builder.cast(builder.cast(x, unsigned(dtype)), "int32")
        count = count_leading_zeros(builder, "int32", wide)
        surplus = builder.constant(np.int32(32 - width))
        return builder.cast(builder.op("Sub", count, surplus), dtype)
    return builder.call(_clz_function(builder.library, dtype), x)


def _clz_function(library: Library, dtype: str) -> str:
    """By halving: if the upper half has a bit, the lower one does not matter."""
    b = Builder(library, ("x",))
    kind = unsigned(dtype)
    rest, width = b.cast("x", kind), int(np.iinfo(dtype).bits)
    bits = b.constant(np.asarray(0, kind))
    step = width // 2
    while step:
        # if a bit above the lower half is set, continue with the upper half
        holds = b.op("Greater", rest, b.constant(np.asarray((1 << step) - 1, kind)))
        amount = b.op("Mul", b.cast(holds, kind), b.constant(np.asarray(step, kind)))
        rest = b.op("BitShift", rest, amount, direction="RIGHT")
        bits = b.op("Add", bits, amount)
        step //= 2
    # rest is 1, or 0 for an x of 0
    y = b.cast(b.op("Sub", b.constant(np.asarray(width, kind)), b.op("Add", bits, rest)), dtype)
    return library.add(
        f"count_leading_zeros_{dtype}", ("x",), (y,), b.nodes, "The zero bits above the highest set bit."
    )
