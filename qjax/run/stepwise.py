"""Runs a graph node by node: each node is jitted by itself, and tensors are dropped after their last reader."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.graph.ir import Array, Graph, Node
from qjax.graph.kernels import attributes
from qjax.numerics.meshes import along_batch, in_automatic
from qjax.run.accumulators import accumulators


@functools.lru_cache(maxsize=1024)
def _jit_kernel(what: Literal["output", "accumulators"], op: str, attributes_json: str) -> Callable[..., Any]:
    """A node's kernel, or its values before rounding; compiled once for all nodes that differ only in constants."""
    facts = json.loads(attributes_json)
    function = ops.get(op).kernel if what == "output" else functools.partial(accumulators, op)

    def apply(constants: Any, inputs: Any) -> Any:
        return in_automatic(functools.partial(function, facts), (constants, inputs), along_batch(inputs))

    return jax.jit(apply)


class Runner:
    """A graph, its name in reports, and its nodes as jitted functions.

    constants: of the nodes' kernels, see `kernels.prepare`.
    """

    def __init__(self, ir: Graph, label: str, constants: Mapping[str, Mapping[str, Any]]) -> None:
        self.ir, self.label, self.constants = ir, label, constants
        self.nodes = {node.name: node for node in ir.nodes}
        self.data = ir.data()

    def output(self, node: Node, inputs: Sequence[Array]) -> jax.Array:
        """Run the node on codes."""
        return self._run("output", node, inputs)

    def accumulators(self, node: Node, inputs: Sequence[Array]) -> list[np.ndarray]:
        """The node's values before rounding."""
        return [np.asarray(array) for array in self._run("accumulators", node, inputs)]

    def _run(self, what: Literal["output", "accumulators"], node: Node, inputs: Sequence[Array]) -> Any:
        facts = json.dumps(attributes(self.ir, node), sort_keys=True)
        return _jit_kernel(what, node.op, facts)(self.constants[node.name], list(inputs))

    def readers(self) -> Counter[str]:
        """How often a run reads each tensor: once per node and input, plus once for an output of the graph."""
        return Counter([name for node in self.ir.nodes for name in node.inputs] + [*self.ir.outputs])


class Env:
    """The tensors of one run of one graph; each is dropped after its last reader."""

    def __init__(self, graph: Runner, inputs: Sequence[Array]) -> None:
        self.graph = graph
        self.values: dict[str, Any] = dict(zip(graph.ir.inputs, inputs, strict=True))
        self.left = graph.readers()
        self.done: set[str] = set()

    def value(self, name: str) -> Any:
        """A tensor's codes, computed together with everything that they depend on."""
        if name in self.graph.data:
            return jnp.asarray(self.graph.data[name])
        if name not in self.values:
            node = self.graph.ir.producer(name)
            assert node is not None
            self.compute(node)
        return self.values[name]

    def compute(self, node: Node) -> Any:
        """The codes of a node's output."""
        if node.name not in self.done:
            self.values[node.output] = self.graph.output(node, [self.value(name) for name in node.inputs])
            self.done.add(node.name)
        return self.values[node.output]

    def release(self, node: Node) -> None:
        """Mark the node's inputs as read."""
        for name in node.inputs:
            self.left[name] -= 1
            if self.left[name] == 0:
                self.values.pop(name, None)
