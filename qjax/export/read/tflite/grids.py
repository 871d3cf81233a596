"""The scales and zero points of a tensor of the file, checked."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.export.read.errors import SCALES, usable
from qjax.export.read.tflite.errors import FLOATS
from qjax.export.read.tflite.flatbuffer import damaged
from qjax.export.read.tflite.model import FileTensor
from qjax.export.read.tflite.values import CODES
from qjax.graph.ir import INTEGER_DTYPES, Quantization
from qjax.problems import Unsupported


def grid_of(tensor: FileTensor) -> Quantization:
    """The one scale and zero point of a tensor of codes."""
    if tensor.scale.size != 1:
        what = "no scale" if not tensor.scale.size else f"{tensor.scale.size} scales"
        raise Unsupported(f"{tensor.name!r} has {what}", FLOATS)
    low, high = code_range(tensor)
    scale, zero_point = scales(tensor, low, high)
    return Quantization(scale[0], zero_point[0], low, high)


def scales(tensor: FileTensor, low: int, high: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The scales and zero points of a tensor, float32 and int32, one each."""
    scale, zero_point = tensor.scale, tensor.zero_point
    if not usable(scale):
        raise damaged(f"tensor {tensor.name[:60]!r}: {SCALES}, got {scale[:4]}")
    if zero_point.size not in (1, scale.size):
        raise damaged(f"tensor {tensor.name[:60]!r}: {scale.size} scales and {zero_point.size} zero points")
    if ((zero_point < low) | (zero_point > high)).any():
        raise damaged(f"tensor {tensor.name[:60]!r}: a zero point out of [{low}, {high}]")
    return scale, np.broadcast_to(zero_point, scale.shape).astype(np.int32)


def code_range(tensor: FileTensor) -> tuple[int, int]:
    """The codes that a tensor's type can hold."""
    if tensor.dtype == "int4":
        return -8, 7
    if tensor.dtype not in INTEGER_DTYPES:
        raise Unsupported(f"{tensor.name!r} is {kind_of(tensor)}", FLOATS)
    info = np.iinfo(tensor.dtype)
    return int(info.min), int(info.max)


def kind_of(tensor: FileTensor) -> str:
    """What a tensor is, in words."""
    without = "" if tensor.scale.size or tensor.dtype not in CODES else " without a scale"
    return f"{tensor.dtype}{without}"
