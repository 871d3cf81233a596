"""The graph: small, typed and immutable. Passes rewrite it, the interpreter runs it, and the emitters read it.

It has two stages, which share the same types:

1. The *quantized graph* describes the model independently of any target: codes and quantization parameters, and the
   steps after an accumulator as nodes with float numbers, up to an `ops.quantize`. (Files have another form: nodes with
   biases in steps of the accumulator, bounds as codes, and the number of elements of averages.) The lowering and the
   readers make it.
2. The *program* holds only integers, including the constants of one target. `assign.assign` makes it. It keeps the
   quantized graph (`Graph.quantized`), so that another target's program is made from that and not from rounded numbers.

        quantized graph:  accumulator = dot(x, w);  y = quantize(accumulator)
        program:          y = dot(x, w), rule "double_round", multiplier 1340417212, shift 7

In a program every tensor has its dtype, shape, scale, zero point and axis, and every node its full attributes, so that
a consumer can match on one node without looking at its neighbours.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from qjax.graph.structure import Call
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.output_dequantization import OutputDequantization

Array = jax.Array | np.ndarray

INTEGER_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
REAL_DTYPE = "float32"
"""The dtype within and between float parts, which occurs nowhere else in a program."""
REAL_DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The dtypes of the float numbers in a quantized graph: biases, factors, bounds."""

PROFILE = "profile"
"""The metadata key that stores the name of the profile of the device that the graph is for."""
UNCALIBRATED = "uncalibrated"
"""The metadata key that stores the names of quantizers whose calibration data were a single number."""

_STRUCTURE = {"tensors", "nodes", "inputs", "outputs"}


@dataclasses.dataclass(frozen=True, eq=False)
class Quantization:
    """How codes map to real numbers: `real = (code - zero_point) * scale`, codes within [qmin, qmax].

    scale: float32, shape () or that of the tensor's `axes`. zero_point: int32, the same shape or ().
    axes: the axes along which scales differ; () is per tensor.
    """

    scale: Array
    zero_point: Array
    qmin: int
    qmax: int
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the graph.

    shape: None stands for the batch, whose size is free.
    dtype: of the stored codes.
    quantization: None for accumulators, multipliers, shifts and index inputs.
    value: the data of a constant; None for tensors that are computed or fed.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    quantization: Quantization | None = None
    value: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation, from codes to codes.

    inputs: names of its input tensors. constants: role -> name of a constant tensor.
    attributes: JSON values (numbers, strings, lists, None). location: the user's file and line.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    output: str
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    location: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in execution order, and every tensor to which they refer.

    inputs, outputs: names of tensors. target: the name of the runtime for which the constants were made; "" in a
      quantized graph.
    quantization: how float inputs become codes, see `numerics.input_quantization`.
    call: the arguments and results of the model, with the user's own classes; None if the graph came from a file.
    dequantization: how output codes become floats, see `numerics.output_dequantization`.
    metadata: free JSON values for people (producer, versions); never read by a kernel.
    quantized: the quantized graph from which a program was made; None if it is unknown (for graphs that were made or
      changed by hand, and files of other formats). Its own metadata and call are not read.
    """

    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    target: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: InputQuantization = "reciprocal"
    call: Call | None = None
    dequantization: OutputDequantization = "product"
    quantized: "Graph | None" = None

    def producer(self, tensor: str) -> Node | None:
        """The node that computes a tensor, or None for an input or a constant."""
        return next((node for node in self.nodes if node.output == tensor), None)

    def consumers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor."""
        return [node for node in self.nodes if tensor in node.inputs]

    def constants(self) -> Iterator[Tensor]:
        """The tensors that carry data."""
        return (tensor for tensor in self.tensors.values() if tensor.value is not None)

    def data(self) -> dict[str, Array]:
        """The data of the constant tensors, by name."""
        return {name: tensor.value for name, tensor in self.tensors.items() if tensor.value is not None}

    def constant(self, node: Node, role: str) -> Array:
        """The data of one of a node's constants."""
        value = self.tensors[node.constants[role]].value
        assert value is not None
        return value

    def replace(self, **changes: Any) -> "Graph":
        """A copy with the named fields changed.

        A copy with other nodes or tensors no longer matches `quantized`, so it has none unless one is passed.
        """
        if _STRUCTURE & changes.keys():
            changes.setdefault("quantized", None)
        return dataclasses.replace(self, **changes)
