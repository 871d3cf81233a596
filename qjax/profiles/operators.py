"""What a file for a device holds: operators under the names of its format, and the tensors that they read and write."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray

PARAMETERS = "parameters"
"""The key of an operator's options with its constant numbers (axes, shapes, strides) by the position of the input."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file.

    Attributes:
      name: in the file.
      shape: None is a free size.
      dtype: in numpy's words.
      scale, zero_point: None for what has no quantization parameters (floats, indices).
      axis: that the scales run along; None: one scale.
      blocks: whether there are scales for parts of an axis.
      data: returns the codes of a constant; None for what is computed or fed.

    Examples:
      >>> from qjax.profiles import Tensor
      >>> tensor = Tensor("x", (None, 8), "int8")  # any batch
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    scale: Array | None = None
    zero_point: Array | None = None
    axis: int | None = None
    blocks: bool = False
    data: Callable[[], Array] | None = None

    @property
    def constant(self) -> bool:
        """Whether the file holds its values."""
        return self.data is not None

    @property
    def grid(self) -> str:
        """Scale and zero point, in words."""
        if self.scale is None or self.zero_point is None:
            return "no scale"
        if self.scale.size > 1:
            return f"{self.scale.size} scales"
        return f"scale {float(self.scale.reshape(-1)[0]):.6g}, zero point {int(self.zero_point.reshape(-1)[0])}"

    def same_grid(self, other: "Tensor") -> bool:
        """Whether both have the same scale and zero point."""
        if self.scale is None or other.scale is None or self.zero_point is None or other.zero_point is None:
            return False
        return np.array_equal(self.scale, other.scale) and np.array_equal(self.zero_point, other.zero_point)


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One operator of a file.

    Attributes:
      name: in the words of its format: CONV_2D, Conv.
      node: of the graph that it computes, or its own name.
      location: the user's "file:line".
      inputs: None where an optional one is left out.
      outputs: the tensors that it computes.
      options: its attributes.
      weight, bias: which of the inputs they are.
      on_codes: it is one of ONNX's operators, and its inputs are codes rather than the floats behind
        DequantizeLinear.

    Examples:
      >>> from qjax.profiles import Operator, Tensor
      >>> x, y = Tensor("x", (1, 8), "int8"), Tensor("y", (1, 8), "int8")
      >>> operator = Operator("TANH", "tanh", (x,), (y,))
    """

    name: str
    node: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    location: str | None = None
    weight: int | None = None
    bias: int | None = None
    on_codes: bool = False

    def _input(self, index: int | None) -> Tensor | None:
        return None if index is None or index >= len(self.inputs) else self.inputs[index]

    @property
    def weights(self) -> Tensor | None:
        """The tensor of the weights."""
        return self._input(self.weight)

    @property
    def biases(self) -> Tensor | None:
        """The tensor of the bias."""
        return self._input(self.bias)

    @property
    def read(self) -> tuple[Tensor, ...]:
        """The activations that it reads: what is computed, and constants with a scale."""
        own = {self.weight, self.bias}
        return tuple(
            tensor
            for index, tensor in enumerate(self.inputs)
            if tensor is not None and index not in own and (not tensor.constant or tensor.scale is not None)
        )

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """The activations that it reads and writes."""
        return (*self.read, *self.outputs)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All but constants without a scale (axes, shapes)."""
        yield from self.activations
        if self.weights is not None:
            yield self.weights
