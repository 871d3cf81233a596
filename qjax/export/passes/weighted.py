"""What a target says of one product with weights: its kind, its rule's variant, its accumulator."""

import math
from typing import Any, Literal

from qjax import targets
from qjax.export.ir import Node, Tensor
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.rules import Product, get_rule


def arithmetic_of(
    node: Node, kernel: Tensor, x: tuple[int | None, ...], rule: str, target: targets.Target
) -> dict[str, Any]:
    """The attributes "rule" and, unless it is exact, "accumulator"; x: the shape of the activations."""
    found = get_rule(rule)
    attributes: dict[str, Any] = {
        "rule": found.name if found.variant is None else found.variant(_product(node, kernel, x))
    }
    accumulator = _accumulator(node, kernel, target)
    if accumulator != EXACT:
        attributes["accumulator"] = accumulator.to_json()
    return attributes


def scale_in_rank(kernel: Tensor) -> Any:
    """A weight's scale in the weight's rank, size 1 along the axes that it does not run along."""
    assert kernel.quantization is not None
    axes = kernel.quantization.axes
    return kernel.quantization.scale.reshape(
        tuple((size or 1) if axis in axes else 1 for axis, size in enumerate(kernel.shape))
    )


def kind_of(node: Node, kernel: Tensor) -> Literal["dot", "conv", "depthwise"]:
    """Which of a target's choices a product with weights follows."""
    if node.op == "dot":
        return "dot"
    groups, per_group = node.attributes["groups"], kernel.shape[node.attributes["rhs_layout"][1]]
    return "depthwise" if groups > 1 and per_group == 1 else "conv"


def _product(node: Node, kernel: Tensor, x: tuple[int | None, ...]) -> Product:
    shape, attributes = [n or 1 for n in kernel.shape], node.attributes
    size = math.prod(shape)
    if node.op == "dot":
        summed = attributes["rhs_contracting" if attributes["weight"] == 1 else "lhs_contracting"]
        depth = math.prod(shape[axis] for axis in summed)
        return Product(depth, size // depth)
    features, _, *window = (shape[axis] for axis in attributes["rhs_layout"])
    return Product(
        size // features,
        features,
        attributes["groups"],
        tuple(window),
        tuple(attributes["strides"]),
        tuple(attributes["rhs_dilation"]),
        tuple((low, high) for low, high in attributes["padding"]),
        tuple(x[axis] or 1 for axis in attributes["lhs_layout"][2:]),
    )


def _accumulator(node: Node, kernel: Tensor, target: targets.Target) -> Accumulator:
    own = target.depthwise_accumulator
    if own is None or kind_of(node, kernel) != "depthwise":
        return target.accumulator
    single = kernel.shape[node.attributes["rhs_layout"][0]] == node.attributes["groups"]
    return own if single else target.accumulator
