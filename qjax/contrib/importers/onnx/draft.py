"""The graph under construction: tensors whose grids become known when the walk reaches their quantizers."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.onnx.tensors import MAX_DIMENSION, code_range
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.numerics.affine import QParams, QSpec, quantize
from qjax.support.errors import Unsupported
from qjax.support.names import Names


class Grid:
    """A scale and a zero point, shared by the tensors between which codes only move; unknown at first."""

    def __init__(self, dtype: str, scale: np.float32 | None = None, zero_point: int = 0) -> None:
        self.dtype = dtype
        self.scale = scale
        self.zero_point = zero_point
        self._quantization: Quantization | None = None

    @property
    def quantization(self) -> Quantization:
        """The grid as the graph states it, one object per grid; one that nothing defined maps codes to themselves."""
        if self._quantization is None:
            scale = np.float32(1) if self.scale is None else self.scale
            low, high = code_range(self.dtype)
            self._quantization = Quantization(np.asarray(scale), np.asarray(self.zero_point, np.int32), low, high)
        return self._quantization

    def same(self, other: "Grid") -> bool:
        """Whether codes mean the same numbers on both."""
        return self is other or (self.key == other.key and self.scale is not None)

    @property
    def key(self) -> tuple[str, Any, int]:
        """Equal for grids that are equal."""
        return self.dtype, self.scale, self.zero_point

    def code(self, bound: float) -> int:
        """The code of a real number, as computed by QuantizeLinear."""
        return int(self.codes(np.float32(bound)))

    def codes(self, numbers: Any) -> NDArray[np.int32]:
        """The codes of an array of real numbers."""
        assert self.scale is not None
        bits = 16 if self.dtype.endswith("16") else 8
        spec = QSpec(bits, signed=self.dtype.startswith("int"), symmetric=False, narrow_range=False)
        params = QParams(np.asarray(self.scale), np.int32(self.zero_point), spec)
        found = quantize(np.asarray(numbers, np.float32), params, quantization="division")
        return np.asarray(found, np.int32)


@dataclasses.dataclass(eq=False)
class _Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Grid | None
    value: np.ndarray | None = None
    quantization: Quantization | None = None


class Draft:
    """Tensors and nodes, in order."""

    def __init__(self, reserved: set[str]) -> None:
        self.tensors: dict[str, _Entry] = {}
        self._names = Names(reserved, beside=self.tensors)
        self.nodes: list[Node] = []
        self.inputs: list[str] = []

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.tensors[name].shape

    def grid(self, name: str) -> Grid:
        """The grid of a tensor of codes."""
        grid = self.tensors[name].grid
        if grid is None:
            raise Unsupported("reads indices where codes are expected")
        return grid

    def fresh(self, name: str) -> str:
        """A unique name for a tensor that has no name in the file."""
        return self._names.free(name)

    def tensor(self, name: str, shape: tuple[int, ...], grid: Grid | None, dtype: str | None = None) -> str:
        """A tensor that is computed or is an input."""
        if any(not 0 <= size <= MAX_DIMENSION for size in shape):
            raise ReadError(f"{name!r}: expected sizes from 0 to {MAX_DIMENSION}, got {list(shape)}.")
        if name in self.tensors:
            raise ReadError(f"two tensors are called {name!r}.")
        self.tensors[name] = _Entry(name, tuple(shape), dtype or (grid.dtype if grid is not None else "int32"), grid)
        return name

    def constant(
        self, name: str, value: np.ndarray, quantization: Quantization | None = None, grid: Grid | None = None
    ) -> str:
        """A tensor with data; the same data under the same name is one tensor."""
        held = self.tensors.get(name)
        if held is not None and held.value is not None and _equal(held, value, quantization, grid):
            return name
        if held is not None:
            name = self.fresh(name)
        value = np.asarray(value)
        self.tensors[name] = _Entry(name, value.shape, value.dtype.name, grid, value, quantization)
        return name

    def node(
        self,
        op: str,
        inputs: tuple[str, ...],
        output: str,
        attributes: dict[str, Any],
        constants: dict[str, str] | None = None,
    ) -> str:
        """A node; it has its output's name."""
        self.nodes.append(Node(output, op, inputs, output, constants or {}, attributes))
        return output

    def graph(self, outputs: tuple[str, ...], metadata: dict[str, Any]) -> Graph:
        """The graph, without the constants of a target."""
        tensors: dict[str, Tensor] = {}
        for entry in self.tensors.values():
            quantization = entry.quantization
            if quantization is None and entry.grid is not None:
                quantization = entry.grid.quantization
            tensors[entry.name] = Tensor(entry.name, entry.shape, entry.dtype, quantization, entry.value)
        return Graph(tensors, tuple(self.nodes), tuple(self.inputs), outputs, "", metadata)


def _equal(held: _Entry, value: Any, quantization: Quantization | None, grid: Grid | None) -> bool:
    if held.value is None or held.dtype != np.asarray(value).dtype.name or not np.array_equal(held.value, value):
        return False
    if (held.grid is None) != (grid is None) or (held.quantization is None) != (quantization is None):
        return False
    if grid is not None and held.grid is not None and not held.grid.same(grid):
        return False
    a, b = held.quantization, quantization
    return (
        a is None
        or b is None
        or (
            a.axes == b.axes
            and (a.qmin, a.qmax) == (b.qmin, b.qmax)
            and np.array_equal(a.scale, b.scale)
            and np.array_equal(a.zero_point, b.zero_point)
        )
    )
