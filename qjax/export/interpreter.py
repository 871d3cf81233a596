"""Runs a graph: one jitted function of integers.

The kernels are those of `qjax.ops`; nothing here knows a formula. What does not depend on the input (a bias with
the zero point folded in) is computed once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.batches import WITHOUT_LABELS
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.shared import SharedConstants
from qjax.numerics.fence import computed_once

Constants = Mapping[str, Mapping[str, Any]]
"""Per node: the arrays of its kernel."""


def prepare(graph: Graph) -> dict[str, dict[str, Any]]:
    """The constants of every node's kernel, ready to run."""
    known: dict[Any, Mapping[str, Any]] = {}
    return {node.name: dict(_prepare(graph, node, known)) for node in graph.nodes}


def _prepare(graph: Graph, node: Node, known: dict[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    facts, constants = attributes(graph, node), constants_of(graph, node)
    # the iterations of a loop share constants: computed once
    key = (node.op, repr(sorted(facts.items())), *((role, id(constants[role])) for role in sorted(constants)))
    if key not in known:
        known[key] = ops.get(node.op).runtime(facts, constants)
    return known[key]


def constants_of(graph: Graph, node: Node) -> dict[str, Any]:
    """A node's constants and the zero points of its tensors, as they are stored."""
    constants: dict[str, Any] = {role: graph.constant(node, role) for role in node.constants}
    for index, name in enumerate(node.inputs):
        quantization = graph.tensors[name].quantization
        if quantization is not None:
            constants[f"zero_point{index}"] = quantization.zero_point
    output = graph.tensors[node.output].quantization
    if output is not None:
        constants["y_zero_point"] = output.zero_point
    return constants


def attributes(graph: Graph, node: Node) -> dict[str, Any]:
    """A node's attributes with the static facts of its tensors."""
    output = graph.tensors[node.output]
    facts: dict[str, Any] = {
        "dtype": output.dtype,
        "input_dtypes": [graph.tensors[name].dtype for name in node.inputs],
    }
    if output.quantization is not None:
        facts |= {"qmin": output.quantization.qmin, "qmax": output.quantization.qmax}
    return {**node.attributes, **facts}


def run_node(graph: Graph, node: Node, constants: Mapping[str, Any], inputs: Sequence[Any]) -> jax.Array:
    """One node on codes."""
    return ops.get(node.op).kernel(attributes(graph, node), constants, inputs)


def run(graph: Graph, constants: Constants, inputs: Sequence[Any]) -> dict[str, Any]:
    """All nodes; returns every tensor by name. Pure JAX: may be traced, jitted, batched."""
    env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for tensor in graph.constants():
        env[tensor.name] = tensor.value
    alive, forks = _alive(constants), _forks(graph)
    for node in graph.nodes:
        arguments = [jnp.asarray(env[name]) for name in node.inputs]
        codes = run_node(graph, node, constants[node.name], arguments)
        env[node.output] = codes if alive is None or node.output not in forks else computed_once(alive, codes)
    return env


def _forks(graph: Graph) -> set[str]:
    """The tensors that several nodes read: there a residual branch starts."""
    readers = Counter(name for node in graph.nodes for name in set(node.inputs))
    return {name for name, count in readers.items() if count > 1}


def _alive(constants: Constants) -> jax.Array | None:
    """True, in a form that the compiler cannot know; None outside of a trace, or where every constant is part of it."""
    for name in constants:
        zero_point = constants[name].get("y_zero_point")
        if isinstance(zero_point, Tracer):
            return jnp.all(jnp.less(zero_point, np.int32(2**30)))
    return None


class Interpreter:
    """A finished graph as a jitted function from codes to codes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # on the device once, not with every call
        self.constants = jax.device_put(SharedConstants.of(prepare(graph)))
        self._jitted = jax.jit(self.outputs)

    def outputs(self, constants: Constants, inputs: list[Any]) -> list[Any]:
        """The integer function itself, for use inside another trace."""
        env = run(self.graph, constants, inputs)
        return [env[name] for name in self.graph.outputs]

    def __call__(self, *inputs: Any) -> list[jax.Array]:
        """Codes in the order of `graph.inputs`; their dtypes and shapes are checked, never cast."""
        return self._jitted(self.constants, self.checked(inputs))

    def jaxpr(self, *inputs: Any) -> Any:
        """The jaxpr of the integer function, for inspection."""
        return jax.make_jaxpr(self.outputs)(self.constants, self.checked(inputs))

    def checked(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs as arrays, or an error that says what the graph expects."""
        graph = self.graph
        check_count(graph, inputs)
        arrays = list(inputs)
        for name, array in zip(graph.inputs, arrays, strict=True):
            tensor = graph.tensors[name]
            dtype = str(getattr(array, "dtype", type(array).__name__))
            if dtype != tensor.dtype:
                raise TypeError(
                    f"Input {name!r}: expected codes of dtype {tensor.dtype}, got {dtype}. "
                    "graph.quantize(x) makes codes from floats."
                )
        check_shapes(graph, [tuple(array.shape) for array in arrays])
        for name, array in zip(graph.inputs, arrays, strict=True):
            _check_codes(graph.tensors[name], array)
        return arrays


def _check_codes(tensor: Tensor, array: Any) -> None:
    """Raise for codes that the input's bits do not have; a traced array cannot be checked."""
    q, limits = tensor.quantization, np.iinfo(tensor.dtype) if tensor.quantization is not None else None
    if q is None or limits is None or isinstance(array, Tracer) or np.size(array) == 0:
        return
    if q.qmin <= limits.min and q.qmax >= limits.max:
        return  # every code of the dtype
    # numpy: within a trace even a constant of jax would be computed later
    values = np.asarray(array)
    low, high = int(values.min()), int(values.max())
    if low < q.qmin or high > q.qmax:
        raise ValueError(
            f"Input {tensor.name!r}: expected codes in [{q.qmin}, {q.qmax}], got codes in [{low}, {high}]. "
            "graph.quantize(x) makes codes from floats."
        )


def check_count(graph: Graph, inputs: Sequence[Any]) -> None:
    """Raise unless there is one value per input of the graph."""
    if len(inputs) != len(graph.inputs):
        raise TypeError(
            f"The graph takes {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), got {len(inputs)}. Give one "
            f"array for each. {WITHOUT_LABELS}"
        )


def check_shapes(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the shapes are those of the graph's inputs, with one size of the batch."""
    sizes: set[int] = set()
    for name, shape in zip(graph.inputs, shapes, strict=True):
        expected = graph.tensors[name].shape
        _check_shape(name, expected, shape)
        sizes |= {size for wanted, size in zip(expected, shape, strict=True) if wanted is None}
    if len(sizes) > 1:
        raise ValueError(f"The inputs disagree about the batch: sizes {sorted(sizes)}.")


def _check_shape(name: str, expected: tuple[int | None, ...], shape: tuple[int, ...]) -> None:
    if len(shape) != len(expected) or any(e is not None and e != s for e, s in zip(expected, shape, strict=True)):
        wanted = "(" + ", ".join("batch" if e is None else str(e) for e in expected) + ")"
        raise ValueError(f"Input {name!r}: expected shape {wanted}, got {shape}.")
