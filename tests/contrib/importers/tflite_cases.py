"""Every operator and variant, for codes of each type, a group in one file."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

from typing import Any

from tests.contrib.importers.tflite_models import Grid, Models

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
    name, of = "SQUARED_DIFFERENCE", "SquaredDifference"
    m.simple("squared_difference", name, (IMAGE, IMAGE), IMAGE, of, y_grid=Grid(0.9, m.low + 20))
    m.simple("squared_difference, rows", name, (IMAGE, (1, 6, 5, 1)), IMAGE, of, y_grid=Grid(1.7, m.low))
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


def functions(dtype: str, **chosen: Any) -> bytes:
    """Functions of one tensor, code by code, in odd shapes; SOFTMAX on the grid that it has."""
    m = Models(dtype, 5, **chosen)
    shape, half = (1, 7, 5, 3), m.dtype == "int16"
    x = Grid(2.0**-12) if half else Grid(0.043, m.low + 101)
    unit = Grid(2.0**-15) if half else Grid(2.0**-8, m.low)
    signed = Grid(2.0**-15) if half else Grid(2.0**-7, m.low + 128)
    positive = Grid(0.031, m.low)
    m.simple("logistic", "LOGISTIC", (shape,), shape, x_grid=x, y_grid=unit)
    m.simple("tanh", "TANH", (shape,), shape, x_grid=x, y_grid=signed)
    m.simple("hard_swish", "HARD_SWISH", (shape,), shape, "HardSwish", x_grid=x)
    m.simple("leaky_relu", "LEAKY_RELU", (shape,), shape, "LeakyRelu", alpha=0.13, x_grid=x)
    m.simple("elu", "ELU", (shape,), shape, x_grid=x)
    m.simple("gelu", "GELU", (shape,), shape, "Gelu", x_grid=x)
    m.simple("gelu, approximate", "GELU", (shape,), shape, "Gelu", approximate=True, x_grid=x)
    m.simple("exp", "EXP", (shape,), shape, "Exp", x_grid=x)
    m.simple("log", "LOG", (shape,), shape, x_grid=positive)
    m.simple("sqrt", "SQRT", (shape,), shape, x_grid=positive)
    m.simple("rsqrt", "RSQRT", (shape,), shape, x_grid=positive)
    m.simple("abs", "ABS", (shape,), shape, "Abs", x_grid=x)
    m.simple("relu_0_to_1", "RELU_0_TO_1", (shape,), shape, x_grid=x)
    m.simple("softmax", "SOFTMAX", ((1, 7, 11),), (1, 7, 11), "Softmax", beta=1.0, x_grid=x, y_grid=unit)
    return m.to_bytes()


def choices(dtype: str, **chosen: Any) -> bytes:
    """Comparisons, masks, extremes, rows at other places."""
    m = Models(dtype, 6, **chosen)
    file, kept = m.file, {"same": True}
    other = (1, 5, 4)
    m.simple("maximum of two", "MAXIMUM", (IMAGE, IMAGE), IMAGE, "MaximumMinimum", **kept)
    m.simple("minimum of two", "MINIMUM", (IMAGE, other), IMAGE, "MaximumMinimum", **kept)
    m.simple("minimum of a row", "MINIMUM", (IMAGE, (4,)), IMAGE, "MaximumMinimum", constant=1, **kept)
    for keep in (True, False):
        shape = (1, 6, 5, 1) if keep else (1, 6, 5)
        m.simple(f"reduce_min, {keep}", "REDUCE_MIN", (IMAGE,), shape, "Reducer", [[3]], keepDims=keep, **kept)
    m.simple("gather", "GATHER", (IMAGE,), (1, 2, 2, 5, 4), "Gather", [[[3, 0], [5, 3]]], axis=1, **kept)
    nearest: dict[str, Any] = {"options": "ResizeNearestNeighbor", **kept}
    name = "RESIZE_NEAREST_NEIGHBOR"
    m.simple("nearest", name, (IMAGE,), (1, 12, 15, 4), numbers=[[12, 15]], **nearest)
    m.simple("nearest, odd", name, (IMAGE,), (1, 11, 3, 4), numbers=[[11, 3]], halfPixelCenters=True, **nearest)
    m.simple("nearest, corners", name, (IMAGE,), (1, 9, 8, 4), numbers=[[9, 8]], alignCorners=True, **nearest)
    bilinear: dict[str, Any] = {"options": "ResizeBilinear", **kept}
    name = "RESIZE_BILINEAR"
    m.simple("bilinear", name, (IMAGE,), (1, 11, 3, 4), numbers=[[11, 3]], **bilinear)
    m.simple("bilinear, twice", name, (IMAGE,), (1, 12, 10, 4), numbers=[[12, 10]], halfPixelCenters=True, **bilinear)
    m.simple("bilinear, half", name, (IMAGE,), (1, 13, 3, 4), numbers=[[13, 3]], halfPixelCenters=True, **bilinear)
    m.simple("bilinear, corners", name, (IMAGE,), (1, 9, 1, 4), numbers=[[9, 1]], alignCorners=True, **bilinear)
    mirrored = [[0, 0], [2, 1], [0, 3], [0, 0]]
    m.simple("mirror_pad", "MIRROR_PAD", (IMAGE,), (1, 9, 8, 4), "MirrorPad", [mirrored], **kept)
    m.simple("mirror_pad, symmetric", "MIRROR_PAD", (IMAGE,), (1, 9, 8, 4), "MirrorPad", [mirrored], mode=1, **kept)
    m.simple("tile", "TILE", (IMAGE,), (1, 12, 5, 12), "Tile", [[1, 2, 1, 3]], **kept)
    m.simple("space_to_depth", "SPACE_TO_DEPTH", ((1, 6, 4, 3),), (1, 3, 2, 12), "SpaceToDepth", blockSize=2, **kept)
    m.simple("depth_to_space", "DEPTH_TO_SPACE", ((1, 3, 2, 8),), (1, 6, 4, 2), "DepthToSpace", blockSize=2, **kept)
    grid = Grid(0.05, m.grid().zero_point)
    x, y = (file.tensor(m.dtype, IMAGE, grid) for _ in range(2))
    masks = []
    for label, name, options in (
        ("greater", "GREATER", "Greater"),
        ("less_equal", "LESS_EQUAL", "LessEqual"),
        ("equal", "EQUAL", "Equal"),
    ):
        if m.takes(label):
            masks.append(file.tensor("bool", IMAGE, name=label))
            file.operator(name, [x, y], [masks[-1]], options)
    if masks and m.takes("select_v2"):
        both, neither = (file.tensor("bool", IMAGE, name=name) for name in ("either", "neither"))
        file.operator("LOGICAL_OR", [masks[0], masks[-1]], [both], "LogicalOr")
        file.operator("LOGICAL_NOT", [both], [neither], "LogicalNot")
        chosen_codes = file.tensor(m.dtype, IMAGE, grid, name="select_v2")
        file.operator("SELECT_V2", [neither, x, y], [chosen_codes], "SelectV2")
        m.outputs += [both, neither, chosen_codes]
    m.outputs += masks
    for label, name, options in (("arg_max", "ARG_MAX", "ArgMax"), ("arg_min", "ARG_MIN", "ArgMin")):
        if m.takes(label):
            place = file.tensor("int32", (1, 6, 5), name=label)
            file.operator(name, [x, file.numbers(-1)], [place], options, outputType=2)
            m.outputs.append(place)
    if m.takes("top_k"):
        best, places = file.tensor(m.dtype, (1, 6, 5, 2), grid, name="top_k"), file.tensor("int32", (1, 6, 5, 2))
        file.graph.tensors[places].name = "places"
        file.operator("TOPK_V2", [x, file.numbers(2)], [best, places], "TopKV2")
        m.outputs += [best, places]
    used = {tensor for operator in file.graph.operators for tensor in operator.inputs}
    m.inputs += [tensor for tensor in (x, y) if tensor in used]
    return m.to_bytes()
