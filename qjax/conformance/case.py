"""One operation with everything that decides its output: what is fed to a runtime and to qjax alike."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

OPS = (
    "fully_connected",
    "conv2d",
    "depthwise_conv2d",
    "add",
    "multiply",
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
    inputs: codes (float32 for "quantize"), (batch, features) or NHWC. grids: of the inputs; none for "quantize".
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
