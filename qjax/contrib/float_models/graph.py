"""The common form of a float file: nodes in order, constants and parameters by name, and the table of operators.

An operator is a function of one `Call` and its inputs, in `jax.numpy`. `operator` registers it with what the evaluator
has to know: which inputs decide shapes, and how it treats images whose channels the evaluator keeps last.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.support.errors import Unsupported

Layout = Literal["each", "last", "axes"] | None
"""How an operator treats an image that is kept with its channels last.

"each": it is elementwise, and its operands are aligned. "last": it works on images and always gets the channels last.
"axes": it maps its axes by `Call.axis` and `Call.per_axis`. None: it gets the order of the file.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operator of a file. op: a key of `OPERATORS`. inputs: names of values, "" for one that is absent.

    version: of the operator set. wants: how many outputs are read.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    version: int = 0

    @property
    def title(self) -> str:
        """The node in messages."""
        return f"{self.op} {self.name!r}"


@dataclasses.dataclass(frozen=True, eq=False)
class Port:
    """An input or an output: its name, dtype and sizes (None where the file leaves one open); dims None: unknown."""

    name: str
    dtype: str
    dims: tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class FloatGraph:
    """A float file as checked data. constants: arrays that training does not change. parameters: those that it does."""

    format: str
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray]
    parameters: Mapping[str, np.ndarray]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """A registered operator.

    function: (call, *inputs) -> an array or a tuple of arrays. static: the inputs that must be known when the model is
    traced, because they decide shapes; -1 stands for all. layout: see `Layout`. weights: the inputs that are parameters
    even if they hold one number. in_numpy: whether the function also takes NumPy arrays and `call.xp`. on_last: for an
    operator without a layout, (call, image, *inputs) -> the result, or None where the file's order is needed.
    """

    function: Callable[..., Any]
    static: tuple[int, ...] = ()
    layout: Layout = None
    weights: tuple[int, ...] = ()
    in_numpy: bool = False
    on_last: Callable[..., Any] | None = None


FREE_BATCH = "Export the model with a free batch: torch.onnx.export(..., dynamic_shapes=({0: Dim.DYNAMIC},))"
"""The cure for a file whose batch is a number."""

MAX_ELEMENTS = 2**28
"""The most elements of an array whose shape numbers of the file decide."""

OPERATORS: dict[str, Operator] = {}
"""Name -> operator: those of ONNX as ONNX spells them ("Conv"), those of TFLite in capitals ("CONV_2D")."""


def operator(*names: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under these names; facts: fields of `Operator`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in OPERATORS, name
            OPERATORS[name] = Operator(function, **facts)
        return function

    return register


@dataclasses.dataclass(eq=False)
class Call:
    """What an operator's function knows besides its inputs.

    xp: numpy where every input is known, else jax.numpy. last: whether the first input keeps its channels last; the
    function may set it to False if its output does not. exported: the shapes of the inputs at the batch size that the
    file fixes, () where it fixes none, or where that is this call's. training: whether norms take the statistics of the
    batch. updates: the new numbers of parameters, by name, which a norm adds in training.
    """

    node: Node
    xp: Any = jnp
    last: bool = False
    exported: tuple[tuple[int, ...], ...] = ()
    training: bool = False
    updates: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def version(self) -> int:
        """The version of the operator set."""
        return self.node.version

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute of the node."""
        value = self.node.attributes.get(key)
        return default if value is None else value

    def wants(self, index: int) -> bool:
        """Whether the model names this output."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def refuse(self, why: str, cure: str = "") -> Unsupported:
        """An error about this node, to be raised."""
        return Unsupported(why, cure, what=self.node.title)

    def sized(self, shape: Sequence[int]) -> list[int]:
        """A shape that numbers of the file decide, unless it is larger than any model's."""
        if math.prod(shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
            raise self.refuse(f"an array of shape {list(shape)}", "The file is damaged: export it again")
        return list(shape)

    def axis(self, axis: int, rank: int) -> int:
        """An axis of the file as an axis of the array at hand."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} of an array with {rank} axes", "The file is damaged: export it again")
        axis %= rank
        return (axis if axis == 0 else rank - 1 if axis == 1 else axis - 1) if self.last else axis

    def axis_of_file(self, axis: int, rank: int) -> int:
        """The inverse of `axis`."""
        return (axis if axis == 0 else 1 if axis == rank - 1 else axis + 1) if self.last else axis

    def axes(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """The same for several axes."""
        return tuple(self.axis(int(axis), rank) for axis in axes)

    def per_axis(self, values: Sequence[Any]) -> list[Any]:
        """Values for every axis, in the order of the array at hand."""
        return [values[0], *values[2:], values[1]] if self.last else list(values)

    def ranked(self, *arrays: Any) -> list[Any]:
        """The arrays with leading axes of size 1, so that all have the same rank; numbers stay numbers."""
        rank = max(np.ndim(array) for array in arrays)
        return [
            self.xp.reshape(array, (1,) * (rank - np.ndim(array)) + tuple(np.shape(array)))
            if 0 < np.ndim(array) < rank
            else array
            for array in arrays
        ]

    def like(self, values: Any, array: Any) -> Any:
        """Numbers in the dtype of an array."""
        return self.xp.asarray(values, array.dtype)


def to_last(array: Any, xp: Any = jnp) -> Any:
    """Move the channels from axis 1 to the last one."""
    rank = array.ndim
    if array.shape[1] == 1 or math.prod(array.shape[2:]) == 1:
        return xp.reshape(array, (array.shape[0], *array.shape[2:], array.shape[1]))
    return xp.transpose(array, (0, *range(2, rank), 1))


def to_first(array: Any, xp: Any = jnp) -> Any:
    """Move the channels from the last axis to axis 1."""
    rank = array.ndim
    if array.shape[-1] == 1 or math.prod(array.shape[1:-1]) == 1:
        return xp.reshape(array, (array.shape[0], array.shape[-1], *array.shape[1:-1]))
    return xp.transpose(array, (0, rank - 1, *range(1, rank - 1)))


@dataclasses.dataclass(frozen=True, eq=False)
class Last:
    """An image whose channels, axis 1 in the file, are the last axis of `array`.

    parts: sizes of the axes into which the file has split axis 1, () if it is whole. Shuffling channels splits them,
    swaps the parts and joins them again, for which the channels need not move to the front.
    """

    array: Any
    parts: tuple[int, ...] = ()


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a value in the order of the file."""
    if isinstance(value, Last):
        first, *spatial, channels = value.array.shape
        return (first, *(value.parts or (channels,)), *spatial)
    return tuple(np.shape(value))


def in_file_order(value: Any) -> Any:
    """A value with its axes as the file orders them."""
    if not isinstance(value, Last):
        return value
    y = to_first(value.array)
    return jnp.reshape(y, shape_of(value)) if value.parts else y


def clean_scope(name: str) -> str:
    """A node's name as a path: PyTorch repeats the name of a container in those of its children."""
    parts = [part for part in name.split("/") if part]
    kept = [part for part, after in zip(parts, [*parts[1:], ""], strict=False) if not after.startswith(f"{part}.")]
    words = [re.sub(r"[^A-Za-z0-9_]+", "_", word) for part in kept for word in part.split(".")]
    return "/".join(word for word in words if word.strip("_")) or "node"


def is_known(value: Any) -> bool:
    """Whether a value is a NumPy array, which no input of the model changes."""
    return isinstance(value, (np.ndarray, np.generic))


def is_traced(value: Any) -> bool:
    """Whether a value has no numbers yet."""
    return isinstance(value, Tracer)
