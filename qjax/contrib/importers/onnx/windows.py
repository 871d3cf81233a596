"""Windows of convolutions and pools: padding, strides, dilations, and the resulting sizes."""

import dataclasses
from collections.abc import Sequence

from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported


@dataclasses.dataclass(frozen=True)
class Window:
    """Per spatial axis: shape, strides, dilations, [low, high] padding, and the sizes of the result."""

    shape: list[int]
    strides: list[int]
    dilations: list[int]
    padding: list[list[int]]
    sizes: list[int]


def window_of(node: OnnxNode, sizes: Sequence[int], shape: Sequence[int] | None = None) -> Window:
    """The window of a node over axes of the given sizes; shape: of a kernel, which the attribute must equal."""
    count = len(sizes)
    window = node.ints("kernel_shape") or list(shape or ())
    strides = node.ints("strides") or [1] * count
    dilations = node.ints("dilations") or [1] * count
    pads = node.ints("pads") or [0] * (2 * count)
    lengths = (len(window), len(strides), len(dilations), len(pads))
    limit = 2**31
    if lengths != (count, count, count, 2 * count) or (shape is not None and window != list(shape)):
        raise ReadError(f"{node.title}: its window does not fit {count} axes.")
    if any(not 1 <= n < limit for n in (*window, *strides, *dilations)) or any(not 0 <= n < limit for n in pads):
        raise ReadError(f"{node.title}: expected sizes, strides and dilations from 1, and pads from 0.")
    padding = [[pads[i], pads[i + count]] for i in range(count)]
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    auto = node.get("auto_pad", "NOTSET", str)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        padding = []
        for size, stride, span in zip(sizes, strides, spans, strict=True):
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            less, more = total // 2, total - total // 2
            padding.append([less, more] if auto == "SAME_UPPER" else [more, less])
    elif auto == "VALID":
        padding = [[0, 0]] * count
    elif auto != "NOTSET":
        raise ReadError(f"{node.title}: unknown auto_pad {auto!r}.")
    results: list[int] = []
    for size, stride, span, (low, high) in zip(sizes, strides, spans, padding, strict=True):
        room = size + low + high - span
        if node.get("ceil_mode", 0) and room % stride:
            raise Unsupported("with ceil_mode its last window reaches beyond the padding")
        if room < 0:
            raise ReadError(f"{node.title}: its window is larger than its padded input.")
        results.append(room // stride + 1)
    return Window(window, strides, dilations, [list(pair) for pair in padding], results)
