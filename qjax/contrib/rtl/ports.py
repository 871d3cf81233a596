"""The tensors that enter and leave a circuit, and the integers that each may have."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.graph.batch_shapes import shapes_at
from qjax.graph.ir import Graph, Node
from qjax.graph.kernels import attributes
from qjax.support.errors import Unsupported


@dataclasses.dataclass(frozen=True)
class Port:
    """One tensor of a bus. shape: of one example, with an axis of 1 for the batch. low, high: of its integers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int

    @property
    def signed(self) -> bool:
        """Whether there are negative numbers."""
        return self.low < 0

    @property
    def bits(self) -> int:
        """The bits of one number, in two's complement if it is signed."""
        return max(self.high.bit_length(), (-self.low - 1).bit_length() if self.signed else 0) + self.signed


def port_of(graph: Graph, name: str, constants: Mapping[str, Mapping[str, Any]]) -> Port:
    """The port of an input or output. constants: those of all kernels.

    Codes lie on their grid. Indices into a table are 0 to its last entry. Anything else has all values of its dtype.

    Raises:
      Unsupported: it is float.
    """
    tensor = graph.tensors[name]
    if np.dtype(tensor.dtype).kind not in "iu":
        raise Unsupported(
            f"it has the dtype {tensor.dtype}, but a circuit only has integers",
            "Drop its qjax.FLOAT",
            what=f"RTL: {name!r}",
        )
    if tensor.quantization is not None:
        low, high = int(tensor.quantization.qmin), int(tensor.quantization.qmax)
    else:
        info = np.iinfo(tensor.dtype)
        low, high = int(info.min), int(info.max)
        readers = [node for node in graph.nodes if name in node.inputs]
        if name in graph.inputs and name not in graph.outputs and readers:
            last = _last_index(graph, name, readers, constants)
            low, high = (low, high) if last is None else (0, last)
    return Port(name, _shape(graph, name), tensor.dtype, low, high)


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return shapes_at(graph, 1)[name]


def _last_index(
    graph: Graph, name: str, readers: Sequence[Node], constants: Mapping[str, Mapping[str, Any]]
) -> int | None:
    """The last index that an input can select; None if the input is used for anything else."""
    if not all(ops.get(node.op).chooses for node in readers):
        return None

    def is_there(index: int) -> bool:
        for node in readers:
            given = [
                jnp.full(_shape(graph, source), index if source == name else 0, graph.tensors[source].dtype)
                for source in node.inputs
            ]
            count = ops.get(node.op).misplaced(attributes(graph, node), constants[node.name], given)
            if count is None or int(count):
                return False
        return True

    if not is_there(0):
        return None
    low, high = 0, int(np.iinfo(graph.tensors[name].dtype).max)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_there(middle) else (low, middle - 1)
    return low
