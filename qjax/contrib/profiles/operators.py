"""The content of a file for a device: operators under the names of its format, and the tensors that they use."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray

PARAMETERS = "parameters"
"""The key of an operator's options for its constant numbers (axes, shapes, strides), by position of the input."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file.

    Attributes:
      name: its name in the file.
      shape: None is a free size.
      dtype: numpy's name of it.
      scale, zero_point: None if it has no quantization parameters (floats, indices).
      axis: the axis along which scales differ; None: one scale.
      blocks: whether there are scales for parts of an axis.
      data: returns the codes of a constant; None for tensors that are computed or fed.

    Examples:
      >>> from qjax import profiles
      >>> tensor = profiles.Tensor("x", (None, 8), "int8")  # any batch
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
        """Whether the file contains its values."""
        return self.data is not None

    @property
    def grid(self) -> str:
        """Scale and zero point in words."""
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
      name: in the format's spelling: CONV_2D, Conv.
      node: the node of the graph that it computes, or its own name.
      location: the user's "file:line".
      inputs: None for optional ones that are left out.
      outputs: the tensors that it computes.
      options: its attributes.
      weight, bias: the positions of these inputs.
      on_codes: whether it is one of ONNX's operators whose inputs are codes instead of the floats after
        DequantizeLinear.

    Examples:
      >>> from qjax import profiles
      >>> x, y = profiles.Tensor("x", (1, 8), "int8"), profiles.Tensor("y", (1, 8), "int8")
      >>> operator = profiles.Operator("TANH", "tanh", (x,), (y,))
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
        """The activations that it reads: computed tensors, and constants with a scale."""
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
        """All tensors except constants without a scale (axes, shapes)."""
        yield from self.activations
        if self.weights is not None:
            yield self.weights
