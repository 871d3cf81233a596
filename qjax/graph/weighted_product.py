"""Chooses how a target computes one product with weights: its kind, the variant of its rule, its accumulator."""

from typing import Any, Literal

from qjax import targets
from qjax.graph.ir import Node, Tensor
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.rules import Product, get_rule
from qjax.ops import get
from qjax.ops.facts import ProductFacts


def arithmetic_of(
    node: Node, kernel: Tensor, x: tuple[int | None, ...], rule: str, target: targets.Target
) -> dict[str, Any]:
    """The attribute "rule" and, unless the sum is exact, "accumulator". x: the shape of the activations."""
    found, product = get_rule(rule), facts_of(node).described(node.attributes, kernel.shape, x)
    attributes: dict[str, Any] = {"rule": found.name if found.variant is None else found.variant(product)}
    accumulator = _accumulator(node, kernel, product, target)
    if accumulator != EXACT:
        attributes["accumulator"] = accumulator.to_json()
    return attributes


def scale_in_rank(kernel: Tensor) -> Any:
    """A weight's scale with the weight's rank, and size 1 along the axes that share a scale."""
    assert kernel.quantization is not None
    axes = kernel.quantization.axes
    return kernel.quantization.scale.reshape(
        tuple((size or 1) if axis in axes else 1 for axis, size in enumerate(kernel.shape))
    )


def kind_of(node: Node, kernel: Tensor) -> Literal["dot", "conv", "depthwise"]:
    """Which of a target's settings applies to a product with weights."""
    return facts_of(node).kind(node.attributes, kernel.shape)


def facts_of(node: Node) -> ProductFacts:
    """What the operation of a node with a kernel declares about products."""
    op = get(node.op)
    assert isinstance(op, ProductFacts), node.op
    return op


def _accumulator(node: Node, kernel: Tensor, product: Product, target: targets.Target) -> Accumulator:
    own = target.depthwise_accumulator
    if own is None or kind_of(node, kernel) != "depthwise":
        return target.accumulator
    return own if product.channels == product.groups else target.accumulator
