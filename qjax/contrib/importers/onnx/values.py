"""What the reader knows about one value of an ONNX graph while it walks through the nodes.

    x (Codes) -> DequantizeLinear (Real) -> Conv (Pending) -> Relu (Pending) -> QuantizeLinear (Codes)

ONNX spreads one quantized operation over several nodes. A value between the first and the last is not a tensor of
qjax's graph. Until its quantizer follows, it is an object of one of the classes here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax import ops
from qjax.ops.facts import AverageFacts, ProductFacts


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Numbers that do not depend on any input; name: of the initializer or of the value."""

    value: np.ndarray
    name: str = ""
    stored: str = ""
    """The type in the file if NumPy has no such dtype ("int4"), else ""."""

    @property
    def type(self) -> str:
        """The type of the elements."""
        return self.stored or self.value.dtype.name


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """A tensor of the graph: integers, whose grid may not be known yet."""

    tensor: str


@dataclasses.dataclass(frozen=True, eq=False)
class Real:
    """Dequantized codes; permutation: a transpose that the next operation may absorb into its layout.

    name: of the ONNX value, for the transpose if it must become a node.
    """

    tensor: str
    permutation: tuple[int, ...] | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """Dequantized constant codes: `(codes - zero_point) * scale`.

    codes: in a NumPy dtype that fits them. stored: the type in the file. axis: of the scales, None per tensor.
    """

    name: str
    codes: np.ndarray
    stored: str
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int32]
    axis: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class FloatInput:
    """A float input of the model that no QuantizeLinear has read so far."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """An operation that moves codes, between an accumulator and its quantizer; by: its name in ONNX."""

    op: str
    attributes: dict[str, Any]
    shape: tuple[int, ...]
    name: str
    by: str = ""

    @property
    def filling(self) -> str:
        """Which codes the result contains besides those of the input, see `qjax.ops.facts.Facts.filling`."""
        return ops.get(self.op).filling(self.attributes)


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """An operation on real numbers whose result waits for its quantizer.

    op, attributes: of the future node. inputs: tensors of the graph. shape: of the result, before `moves`. kernel,
    bias: of a product with weights; the bias is float, or int32 on the accumulator's grid, or a Weight of that. steps:
    affine steps after it, ("add" | "mul", float32 that broadcasts). low, high: clamps, as real numbers. moves:
    operations on codes after it. parts: of a concatenation, its operands. table: of a lookup. names: of the values in
    the file that it represented, one after the other. floats: the reasons why the runtime computes it in float, if any.
    integers: whether it is the result of MatMulInteger or ConvInteger. cast: whether that is followed by a Cast to
    floats, and the scale will come later.
    """

    op: str
    name: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernel: Weight | None = None
    bias: "Known | Weight | None" = None
    count: NDArray[np.int32] | None = None
    steps: tuple[tuple[str, NDArray[np.float32]], ...] = ()
    low: float | None = None
    high: float | None = None
    moves: tuple[Move, ...] = ()
    parts: tuple[Any, ...] = ()
    table: str | None = None
    names: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    integers: bool = False
    cast: bool = False
    keepdims: tuple[int, ...] | None = None
    """The axes of size 1 that a mean should keep; a reshape adds them, unless a later one drops them."""
    write: Callable[..., str] | None = None
    """Writes the nodes instead of `finish`: (walk, value, name, grid, clamps by role) -> the tensor."""
    fails: Callable[..., list[str]] | None = None
    """For what the runtime computes by a kernel of its own: (walk, value, grid) -> the reasons why it has no result."""
    grid: Any = None
    """The scale and zero point that the codes have without a quantizer after them; None if there are none."""
    unchanged: bool = False
    """Whether the codes are those of the input, so that only another grid, a clamp or a move needs a node."""

    @property
    def product(self) -> ProductFacts | None:
        """The facts of a matrix product or a convolution; None for other operations."""
        op = self._op
        return op if isinstance(op, ProductFacts) else None

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean over complete axes."""
        op = self._op
        return isinstance(op, AverageFacts) and op.average == "mean"

    @property
    def _op(self) -> ops.Op | None:
        return ops.get(self.op) if self.op in ops.names() else None

    @property
    def channel_axis(self) -> int:
        """The axis of a product's result along which a bias has one number per channel."""
        assert self.product is not None
        return self.product.channel_axis(self.attributes)

    @property
    def last_shape(self) -> tuple[int, ...]:
        """The shape after the moves."""
        if self.moves:
            return self.moves[-1].shape
        return self.shape if self.keepdims is None else self.keepdims

    @property
    def last_name(self) -> str:
        """The name of the value after the moves."""
        return self.moves[-1].name if self.moves else self.name

    def replace(self, **changes: Any) -> "Pending":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapped:
    """Codes after a Cast between int8 and uint8; shifted: whether 128 was added too, which restores their order."""

    tensor: str
    type: str
    shifted: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """The result of an operator that is listed as unsupported."""


Value = Known | Codes | Real | Weight | FloatInput | Pending | Wrapped | Unknown
