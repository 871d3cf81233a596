"""One of two compared nodes: its rule, constants and quantization parameters."""

import dataclasses
from typing import Any

import numpy as np

from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.numerics.rules import Rule, get_rule, rule_names
from qjax.ops.channels import weight_to_result


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two nodes, with its graph and its name in reports."""

    graph: Graph
    node: Node
    label: str

    @property
    def output(self) -> Tensor:
        """The tensor that the node computes."""
        return self.graph.tensors[self.node.output]

    @property
    def rule(self) -> Rule | None:
        """The rule of requantization at the end of the node, including a formula that is such a rule."""
        name = self.node.attributes.get("rule")
        if name is None:
            name = str(self.node.attributes.get("formula", "")).partition("/")[0]
            if name not in rule_names() and ":" not in name:
                return None
        return get_rule(str(name))

    def constant(self, role: str) -> np.ndarray:
        """A constant of the node, on the host."""
        return np.asarray(self.graph.constant(self.node, role))

    def rule_constants(self) -> dict[str, np.ndarray]:
        """The constants of `rule`, by role."""
        return {} if self.rule is None else {role: self.constant(role) for role in self.rule.fields}

    def grids(self) -> list[Quantization | None]:
        """The quantization of every input, then of the output."""
        return [self.graph.tensors[name].quantization for name in (*self.node.inputs, self.node.output)]

    def ends(self) -> tuple[int, int]:
        """The least and the greatest code that the node can produce."""
        q = self.output.quantization
        assert q is not None
        low, high = q.qmin, q.qmax
        if "clamp_min" in self.node.constants:
            low = max(low, int(self.constant("clamp_min")))
        if "clamp_max" in self.node.constants:
            high = min(high, int(self.constant("clamp_max")))
        return low, high


def scalar_scale(graph: Graph, name: str) -> Any:
    """A tensor's scale; None if it has none, or one per channel."""
    quantization = graph.tensors[name].quantization
    return None if quantization is None or np.size(quantization.scale) != 1 else np.asarray(quantization.scale)


def kernel_scale(graph: Graph, node: Node) -> np.ndarray:
    """The scales of a node's weights as a vector along the channels of its result."""
    kernel = graph.tensors[node.constants["kernel"]]
    assert kernel.quantization is not None
    q = kernel.quantization
    sizes = [size or 1 if axis in q.axes else 1 for axis, size in enumerate(kernel.shape)]
    full = np.asarray(q.scale).reshape(sizes)
    return weight_to_result(full, node.attributes["channels"], node.attributes["rank"])
