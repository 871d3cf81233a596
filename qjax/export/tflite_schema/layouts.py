"""The layout of kernels in a .tflite file.

FULLY_CONNECTED (out, in), CONV_2D (out, height, width, in), DEPTHWISE_CONV_2D (1, height, width, out), all with the
scales of a per-channel kernel along `out`. A vector per channel (bias) has one axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.ops.channels import result_to_weight


def free_axes(rank: int, contracting: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The axes of an operand of a product that are neither summed nor shared with the other operand."""
    return [axis for axis in range(rank) if axis not in contracting and axis not in batch]


def matrix(kernel: np.ndarray, contracting: Sequence[int]) -> np.ndarray:
    """The kernel of a product as (out, in): free axes in their order, summed ones in the given order."""
    free = free_axes(kernel.ndim, contracting, ())
    depth = int(np.prod([kernel.shape[axis] for axis in contracting]))
    return kernel.transpose(*free, *contracting).reshape(-1, depth)


def from_matrix(stored: np.ndarray, shape: Sequence[int], contracting: Sequence[int]) -> np.ndarray:
    """The inverse: a kernel of that shape."""
    free = free_axes(len(shape), contracting, ())
    order = [*free, *contracting]
    back = [order.index(axis) for axis in range(len(shape))]
    return stored.reshape([shape[axis] for axis in order]).transpose(back)


def ohwi(kernel: np.ndarray, layout: Sequence[int]) -> np.ndarray:
    """A kernel of one or two spatial dimensions as (out, height, width, in); layout: its axes (out, in, *spatial)."""
    out, into, *spatial = layout
    stored = kernel.transpose(out, *spatial, into)
    return stored if len(spatial) == 2 else stored[:, None]


def from_ohwi(stored: np.ndarray, layout: Sequence[int]) -> np.ndarray:
    """The inverse."""
    out, into, *spatial = layout
    kernel = stored if len(spatial) == 2 else stored[:, 0]
    order = [out, *spatial, into]
    return kernel.transpose([order.index(axis) for axis in range(len(layout))])


def depthwise(kernel: np.ndarray) -> np.ndarray:
    """(out, height, width, 1) as (1, height, width, out); its own inverse."""
    return kernel.transpose(3, 1, 2, 0)


def channel_vector(vector: Any, attributes: Mapping[str, Any], kernel: np.ndarray) -> np.ndarray:
    """A vector of the result (a bias) in the order of the kernel's channels, one value each.

    Raises:
      ValueError: it varies along other axes than the channels.
    """
    pairs = sorted(attributes["channels"], key=lambda pair: pair[1])
    own = result_to_weight(np.asarray(vector), pairs, attributes["rank"], kernel.ndim)
    shape = [kernel.shape[axis] if axis in [w for _, w in pairs] else 1 for axis in range(kernel.ndim)]
    return np.broadcast_to(own, shape).reshape(-1)


def same_padding(size: int, window: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """TFLite's SAME: the least padding for ceil(size / stride) outputs; if it is odd, the extra element is last."""
    total = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2
