"""Every operator and variant, for codes of each type, a group in one file."""

from typing import Any

from tests.export.read.tflite_models import Models

RELU, RELU_N1_TO_1, RELU6 = 1, 2, 3
SAME, VALID = 0, 1
IMAGE = (1, 6, 5, 4)


def weighted(dtype: str, **chosen: Any) -> bytes:
    """Products with weights."""
    m = Models(dtype, 1, **chosen)
    one: dict[str, Any] = {"strideH": 1, "strideW": 1}
    two: dict[str, Any] = {"strideH": 2, "strideW": 2}
    fc = "FullyConnected"
    m.weighted("fully_connected", "FULLY_CONNECTED", (3, 20), (7, 20), (3, 7), fc, 0)
    m.weighted("fully_connected, one scale", "FULLY_CONNECTED", (3, 20), (7, 20), (3, 7), fc, 0, per_channel=False)
    m.weighted(
        "fully_connected, relu", "FULLY_CONNECTED", (3, 20), (7, 20), (3, 7), fc, 0, fusedActivationFunction=RELU
    )
    m.weighted("fully_connected, no bias", "FULLY_CONNECTED", (1, 20), (7, 20), (1, 7), fc, 0, bias=False)
    m.weighted("fully_connected, flat", "FULLY_CONNECTED", (1, 2, 5, 2), (7, 20), (1, 7), fc, 0)
    m.weighted("fully_connected, rank 3", "FULLY_CONNECTED", (1, 3, 20), (7, 20), (1, 3, 7), fc, 0, keepNumDims=True)
    m.weighted("conv", "CONV_2D", IMAGE, (8, 3, 3, 4), (1, 6, 5, 8), "Conv2D", 0, padding=SAME, **one)
    m.weighted("conv, one scale", "CONV_2D", IMAGE, (8, 3, 3, 4), (1, 6, 5, 8), "Conv2D", 0, False, padding=SAME, **one)
    m.weighted("conv, strided", "CONV_2D", IMAGE, (3, 3, 2, 4), (1, 3, 3, 3), "Conv2D", 0, padding=SAME, **two)
    m.weighted("conv, valid", "CONV_2D", IMAGE, (3, 2, 2, 4), (1, 3, 2, 3), "Conv2D", 0, padding=VALID, **two)
    m.weighted("conv, pointwise", "CONV_2D", IMAGE, (9, 1, 1, 4), (1, 6, 5, 9), "Conv2D", 0, padding=VALID, **one)
    gaps: dict[str, Any] = {"dilationHFactor": 2, "dilationWFactor": 2}
    m.weighted("conv, dilated", "CONV_2D", IMAGE, (3, 3, 3, 4), (1, 6, 5, 3), "Conv2D", 0, padding=SAME, **one, **gaps)
    dw = "DepthwiseConv2D"
    m.weighted(
        "depthwise",
        "DEPTHWISE_CONV_2D",
        IMAGE,
        (1, 3, 3, 4),
        (1, 6, 5, 4),
        dw,
        3,
        padding=SAME,
        depthMultiplier=1,
        **one,
    )
    m.weighted(
        "depthwise, twice", "DEPTHWISE_CONV_2D", IMAGE, (1, 3, 2, 8), (1, 3, 3, 8), dw, 3, padding=SAME,
        depthMultiplier=2, fusedActivationFunction=RELU6, **two,
    )  # fmt: skip
    m.weighted(
        "depthwise of one channel", "DEPTHWISE_CONV_2D", (1, 6, 5, 1), (1, 3, 2, 11), (1, 6, 5, 11), dw, 3,
        padding=SAME, depthMultiplier=11, **one,
    )  # fmt: skip
    if dtype != "uint8":
        m.weighted("conv, grouped", "CONV_2D", IMAGE, (6, 3, 3, 2), (1, 6, 5, 6), "Conv2D", 0, padding=SAME, **one)
    return m.to_bytes()


def transposed(dtype: str, **chosen: Any) -> bytes:
    """TRANSPOSE_CONV."""
    m = Models(dtype, 2, **chosen)
    two: dict[str, Any] = {"strideH": 2, "strideW": 3}
    tc = "TransposeConv"
    m.weighted(
        "transpose_conv", "TRANSPOSE_CONV", (1, 3, 2, 4), (5, 3, 3, 4), (1, 6, 6, 5), tc, 0, padding=SAME,
        first=[1, 6, 6, 5], **two,
    )  # fmt: skip
    m.weighted(
        "transpose_conv, valid", "TRANSPOSE_CONV", (1, 3, 2, 4), (5, 2, 4, 4), (1, 6, 7, 5), tc, 0, padding=VALID,
        bias=False, first=[1, 6, 7, 5], **two,
    )  # fmt: skip
    m.weighted(
        "transpose_conv, narrow", "TRANSPOSE_CONV", (1, 3, 2, 4), (5, 1, 1, 4), (1, 6, 5, 5), tc, 0, padding=SAME,
        first=[1, 6, 5, 5], **two,
    )  # fmt: skip
    return m.to_bytes()


def elementwise(dtype: str, **chosen: Any) -> bytes:
    """Additions, products, averages, pools, changes of the grid, clamps."""
    m = Models(dtype, 3, **chosen)
    pot: dict[str, Any] = {"potScaleInt16": False}
    for name, options in (("ADD", "Add"), ("SUB", "Sub"), ("MUL", "Mul")):
        more = {} if name == "MUL" else pot
        label = name.lower()
        m.simple(label, name, (IMAGE, IMAGE), IMAGE, options, **more)
        m.simple(f"{label}, relu6", name, (IMAGE, IMAGE), IMAGE, options, fusedActivationFunction=RELU6, **more)
        m.simple(f"{label}, channels", name, (IMAGE, (4,)), IMAGE, options, constant=1, **more)
        m.simple(f"{label}, reversed", name, ((1, 1, 1, 4), IMAGE), IMAGE, options, constant=0, **more)
        m.simple(f"{label}, scalar", name, (IMAGE, ()), IMAGE, options, constant=1, **more)
    for label, name in (("average_pool", "AVERAGE_POOL_2D"), ("max_pool", "MAX_POOL_2D")):
        pool: dict[str, Any] = {"filterHeight": 3, "filterWidth": 2, "strideH": 2, "strideW": 1}
        m.simple(label, name, (IMAGE,), (1, 2, 4, 4), "Pool2D", same=True, padding=VALID, **pool)
        m.simple(
            f"{label}, same", name, (IMAGE,), (1, 3, 5, 4), "Pool2D", same=True, padding=SAME,
            fusedActivationFunction=RELU6, **pool,
        )  # fmt: skip
    for keep in (True, False):
        shape = (1, 1, 1, 4) if keep else (1, 4)
        m.simple(f"mean, {keep}", "MEAN", (IMAGE,), shape, "Reducer", [[1, 2]], keepDims=keep)
        m.simple(f"mean, same grid, {keep}", "MEAN", (IMAGE,), shape, "Reducer", [[1, 2]], same=True, keepDims=keep)
        shape = (1, 6, 5, 1) if keep else (1, 6, 5)
        m.simple(f"mean of channels, {keep}", "MEAN", (IMAGE,), shape, "Reducer", [[-1]], keepDims=keep)
        m.simple(f"reduce_max, {keep}", "REDUCE_MAX", (IMAGE,), shape, "Reducer", [[3]], same=True, keepDims=keep)
    m.simple("quantize", "QUANTIZE", (IMAGE,), IMAGE, "Quantize")
    for name in ("RELU", "RELU6", "RELU_N1_TO_1"):
        m.simple(name.lower(), name, (IMAGE,), IMAGE, same=True)
        m.simple(f"{name.lower()}, other grid", name, (IMAGE,), IMAGE)
    m.simple("maximum", "MAXIMUM", (IMAGE, (1,)), IMAGE, "MaximumMinimum", same=True, constant=1)
    m.simple("minimum", "MINIMUM", ((), IMAGE), IMAGE, "MaximumMinimum", same=True, constant=0)
    m.simple("batch_matmul", "BATCH_MATMUL", ((1, 2, 3, 5), (1, 2, 5, 4)), (1, 2, 3, 4), "BatchMatMul")
    m.simple("batch_matmul, adjoint", "BATCH_MATMUL", ((1, 3, 5), (1, 4, 5)), (1, 3, 4), "BatchMatMul", adjY=True)
    return m.to_bytes()


def moves(dtype: str, **chosen: Any) -> bytes:
    """What only moves codes."""
    m = Models(dtype, 4, **chosen)
    kept: dict[str, Any] = {"same": True}
    m.simple("concatenation", "CONCATENATION", (IMAGE, (1, 6, 5, 2)), (1, 6, 5, 6), "Concatenation", axis=-1, **kept)
    m.simple("reshape", "RESHAPE", (IMAGE,), (1, 30, 4), "Reshape", [[1, -1, 4]], **kept)
    m.simple("reshape, flat", "RESHAPE", (IMAGE,), (1, 120), "Reshape", [[1, 120]], **kept)
    m.simple("reshape, options", "RESHAPE", (IMAGE,), (30, 4), "Reshape", newShape=[-1, 4], **kept)
    m.simple("squeeze", "SQUEEZE", ((1, 1, 1, 4),), (1, 4), "Squeeze", squeezeDims=[1, 2], **kept)
    m.simple("squeeze, all", "SQUEEZE", ((1, 1, 3, 4),), (3, 4), "Squeeze", **kept)
    m.simple("expand_dims", "EXPAND_DIMS", (IMAGE,), (1, 6, 1, 5, 4), "ExpandDims", [2], **kept)
    m.simple("transpose", "TRANSPOSE", (IMAGE,), (1, 4, 6, 5), "Transpose", [[0, 3, 1, 2]], **kept)
    m.simple("pad", "PAD", (IMAGE,), (1, 9, 6, 4), "Pad", [[[0, 0], [1, 2], [0, 1], [0, 0]]], **kept)
    m.simple("slice", "SLICE", (IMAGE,), (1, 3, 4, 4), "Slice", [[0, 2, 1, 0], [1, 3, -1, 4]], **kept)
    m.simple(
        "strided_slice", "STRIDED_SLICE", (IMAGE,), (1, 2, 2, 4), "StridedSlice",
        [[0, 1, -1, 0], [1, 6, 0, 4], [1, 3, -2, 1]], **kept,
    )  # fmt: skip
    m.simple(
        "strided_slice, masks", "STRIDED_SLICE", (IMAGE,), (1, 5, 2), "StridedSlice",
        [[9, -2, 9, 1], [9, 0, 9, 9], [1, 1, -1, 2]], beginMask=5, endMask=5, shrinkAxisMask=2, **kept,
    )  # fmt: skip
    m.simple("split", "SPLIT", (IMAGE,), [(1, 6, 5, 2)] * 2, "Split", [3], before=True, numSplits=2, **kept)
    m.simple(
        "split_v", "SPLIT_V", (IMAGE,), [(1, 1, 5, 4), (1, 2, 5, 4), (1, 3, 5, 4)], "SplitV", [[1, -1, 3], 1],
        numSplits=3, **kept,
    )  # fmt: skip
    m.simple("reverse", "REVERSE_V2", (IMAGE,), IMAGE, "ReverseV2", [[2]], **kept)
    m.simple("broadcast_to", "BROADCAST_TO", ((1, 1, 5, 4),), (1, 6, 5, 4), "BroadcastTo", [[1, 6, 5, 4]], **kept)
    m.simple("pack", "PACK", ((1, 3), (1, 3)), (1, 2, 3), "Pack", valuesCount=2, axis=1, **kept)
    m.simple("unpack", "UNPACK", ((1, 2, 3),), [(1, 3)] * 2, "Unpack", num=2, axis=1, **kept)
    return m.to_bytes()
