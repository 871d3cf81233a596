"""One operation with everything that decides its output: the same for a runtime and for qjax."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from qjax.export.tflite_schema.layouts import same_padding

OPS = (
    "fully_connected",
    "conv2d",
    "depthwise_conv2d",
    "add",
    "multiply",
    "matmul",
    "rescale",
    "quantize",
    "average_pool",
    "mean",
    "logistic",
    "tanh",
    "softmax",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """A quantized tensor's type: real = (code - zero_point) * scale.

    scale: float32, () or (channels,). dtype: "int8", "uint8" or "int16".
    """

    scale: np.ndarray
    zero_point: int
    dtype: str

    @property
    def qmin(self) -> int:
        """The least code of the dtype."""
        return int(np.iinfo(self.dtype).min)

    @property
    def qmax(self) -> int:
        """The greatest code of the dtype."""
        return int(np.iinfo(self.dtype).max)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One operation.

    op: one of `OPS`; "rescale" goes from codes to codes of another grid, "quantize" from float32 to codes.
    inputs: codes (float32 for "quantize"), (batch, features) or NHWC; of "matmul" (batch, m, k) and (batch, k, n).
    grids: of the inputs; none for "quantize".
    output: the output's grid.
    kernel: codes; fully connected (in, out), conv2d HWIO, depthwise HWIO with I = 1 and O = channels * multiplier.
    kernel_grid: its scale is () or (out,). bias: int32 codes at s_x * s_w, (out,).
    attributes: strides (h, w), padding "VALID" or "SAME", window (h, w), axes of a mean.
    """

    op: str
    inputs: tuple[np.ndarray, ...]
    grids: tuple[Grid, ...]
    output: Grid
    kernel: np.ndarray | None = None
    kernel_grid: Grid | None = None
    bias: np.ndarray | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Runtime(Protocol):
    """A living runtime."""

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        ...

    def version(self) -> str:
        """The package and its version."""
        ...

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        ...


def window(case: Case) -> tuple[int, int]:
    """Height and width of a convolution's kernel or of a pooling window."""
    height, width = case.attributes["window"] if case.kernel is None else case.kernel.shape[:2]
    return int(height), int(width)


def strides(case: Case) -> tuple[int, int]:
    """Its steps along height and width; 1 where the case says nothing."""
    vertical, horizontal = case.attributes.get("strides", (1, 1))
    return int(vertical), int(horizontal)


def padding(case: Case) -> list[list[int]]:
    """Low and high padding of height and width; SAME puts the odd one behind, as TFLite and lax do."""
    if case.attributes.get("padding", "VALID") == "VALID":
        return [[0, 0], [0, 0]]
    sizes = zip(case.inputs[0].shape[1:3], window(case), strides(case), strict=True)
    return [list(same_padding(size, length, stride)) for size, length, stride in sizes]


def output_shape(case: Case) -> tuple[int, ...]:
    """The shape of the output; a mean drops its axes."""
    x = case.inputs[0].shape
    if case.op == "fully_connected":
        assert case.kernel is not None
        return (*x[:-1], case.kernel.shape[-1])
    if case.op in ("conv2d", "depthwise_conv2d", "average_pool"):
        spatial = [
            (size + low + high - length) // stride + 1
            for size, (low, high), length, stride in zip(
                x[1:3], padding(case), window(case), strides(case), strict=True
            )
        ]
        return (x[0], *spatial, x[3] if case.kernel is None else case.kernel.shape[-1])
    if case.op == "matmul":
        return (*x[:2], case.inputs[1].shape[2])
    if case.op == "mean":
        axes = {axis % len(x) for axis in case.attributes["axes"]}
        return tuple(size for axis, size in enumerate(x) if axis not in axes)
    return np.broadcast_shapes(*(np.shape(codes) for codes in case.inputs))


def float_bias(case: Case) -> np.ndarray:
    """The bias in reals, float32: bias * (s_x * s_w) in double, rounded once."""
    assert case.bias is not None
    assert case.kernel_grid is not None
    step = np.float64(case.grids[0].scale) * case.kernel_grid.scale.astype(np.float64)
    return (case.bias.astype(np.float64) * step).astype(np.float32)
