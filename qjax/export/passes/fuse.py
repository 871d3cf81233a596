"""Folds the steps behind an accumulator, and the quantizer at their end, into its producer.

Cases, for a producer p and the single-reader chain behind it, ending in `quantize`:
1. p has a constant kernel: affine steps change the kernel's scale, the bias and the multiplier (`fold_weighted`);
   the kernel's codes stay, up to their sign.
2. p sums scaled integers (addition, pooling, rescale, products of activations): the steps change the factors and
   the offset (`fold_sum`).
3. clamps become bounds on the output's codes, in both cases.

Requires: every accumulator has one reader and its chain ends in `quantize`. Ensures: no accumulator, no real
constant and no `quantize` is left, except the bounds of clamps on codes (`codes_of_bounds`).
"""

import dataclasses
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.export.lower import QUANTIZE, ConversionError
from qjax.export.passes.bounds import bound_constants, operand
from qjax.export.passes.formulas import formula_of
from qjax.export.passes.weighted import arithmetic_of, kind_of, scale_in_rank
from qjax.numerics.softfloat import Real
from qjax.ops import Preparation, Role
from qjax.ops.channels import result_to_weight, weight_to_result
from qjax.ops.epilogue import Affine, fold_sum, fold_weighted, scale_codes


def fuse(graph: Graph, target: targets.Target) -> Graph:
    """See the module's docstring."""
    nodes: list[Node] = []
    tensors = dict(graph.tensors)
    known: dict[Any, Node] = {}
    readers: dict[str, list[Node]] = {node.output: [] for node in graph.nodes}
    for node in graph.nodes:
        for name in set(node.inputs) & readers.keys():
            readers[name].append(node)
    for node in graph.nodes:
        if node.output not in readers or tensors[node.output].quantization is not None:
            nodes.append(node)
            continue
        role = ops.get(node.op).role
        if role in (Role.GRID, Role.INTEGER):
            nodes.append(node)  # integers that stand for themselves
            continue
        if role is not Role.PRODUCER:
            continue  # a step of a chain: folded where the chain begins
        chain: list[Node] = []
        output = node.output
        while True:
            following = readers.get(output, [])
            if len(following) != 1:
                raise ConversionError(
                    f"{node.location}: the accumulator of {node.name!r} has {len(following)} readers instead of one."
                )
            if following[0].op == QUANTIZE:
                break
            chain.append(following[0])
            output = following[0].output
        key = _key(graph, tensors, node, chain, following[0])
        done = _fused(graph, tensors, node, chain, following[0], target, known.get(key))
        known.setdefault(key, done)
        nodes.append(done)
    return graph.replace(nodes=tuple(n for n in nodes if n.op != QUANTIZE), tensors=tensors)


def _key(graph: Graph, tensors: dict[str, Tensor], node: Node, chain: list[Node], quantize: Node) -> Any:
    """What a node's constants follow from. The iterations of a loop have it in common, and so share the constants."""

    def step(node: Node) -> Any:
        constants = ((role, id(graph.constant(node, role))) for role in sorted(node.constants))
        grids = (id(graph.tensors[name].quantization) for name in node.constants.values())
        return node.op, repr(sorted(node.attributes.items())), *constants, *grids

    inputs = ((tensors[name].shape, tensors[name].dtype, id(tensors[name].quantization)) for name in node.inputs)
    output = tensors[quantize.output]
    return (*map(step, (node, *chain)), *inputs, output.shape, output.dtype, id(output.quantization))


def _fused(
    graph: Graph,
    tensors: dict[str, Tensor],
    node: Node,
    chain: list[Node],
    quantize: Node,
    target: targets.Target,
    known: Node | None,
) -> Node:
    output = tensors[quantize.output]
    assert output.quantization is not None
    if known is not None:
        return dataclasses.replace(
            known, name=quantize.name, inputs=node.inputs, output=output.name, location=node.location
        )
    affine, low, high = Affine.identity(), None, None
    for step in chain:
        op = ops.get(step.op)
        constants = {role: graph.constant(step, role) for role in step.constants}
        affine = op.compose(step.attributes, constants, affine)
        step_low, step_high = op.bounds(step.attributes, constants)
        low, high = _tighter(low, step_low, high, step_high)
    roles: dict[str, str] = {}

    def constant(role: str, value: Any, quantization: Quantization | None = None) -> None:
        name = f"{output.name}/{role}"
        tensors[name] = Tensor(name, tuple(np.shape(value)), str(value.dtype), quantization, value)
        roles[role] = name

    attributes = dict(node.attributes)
    scales = [_scale(tensors[name]) for name in node.inputs if tensors[name].quantization is not None]
    s_y = output.quantization.scale
    if "kernel" in node.constants:
        kernel = tensors[node.constants["kernel"]]
        assert kernel.quantization is not None
        assert kernel.value is not None
        channels, rank = attributes["channels"], attributes["rank"]
        s_w = weight_to_result(scale_in_rank(kernel), channels, rank)
        kind, wide = kind_of(node, kernel), tensors[node.inputs[0]].dtype == "int16"

        def weighted(per_channel: bool) -> targets.Weighted:
            return target.weighted(kind, per_channel=per_channel, wide=wide)

        folded = fold_weighted(scales[0], s_w, s_y, affine, weighted)
        factor = result_to_weight(folded.factor, channels, rank, len(kernel.shape))
        axes = tuple(sorted(w for _, w in channels)) if np.size(folded.weight_scale) > 1 else ()
        scale = result_to_weight(folded.weight_scale, channels, rank, len(kernel.shape))
        # of several channel axes, a batch norm may run over the last alone
        axes = tuple(axis for axis in axes if scale.shape[axis] == kernel.shape[axis])
        scale = scale.reshape(tuple(scale.shape[axis] for axis in axes))
        zero_point = np.zeros(scale.shape, np.int32)
        own = _signed_range(node, kernel, chain)
        quantization = dataclasses.replace(own, scale=scale, zero_point=zero_point, axes=axes)
        constant("kernel", scale_codes(kernel.value, factor), quantization)
        constant("bias", folded.bias)
        for role, value in folded.requantize.items():
            constant(role, value)
        rule = weighted(np.size(folded.weight_scale) > 1).rule
        attributes |= arithmetic_of(node, kernel, tensors[node.inputs[0]].shape, rule, target)
    elif ops.get(node.op).prepares:
        own = ops.get(node.op).prepare(_preparation(graph, tensors, node, affine, output, target))
        for role, value in own.constants.items():
            constant(role, value)
        attributes |= own.attributes
    elif (found := formula_of(graph, tensors, node, chain, output, target)) is not None:
        formula, setting = found
        for role, value in formula.prepare(setting).items():
            constant(role, value)
        if setting.op in ("mean", "average_pool"):
            constant("count", np.asarray(setting.count, np.int32))
        attributes["formula"] = formula.name
    else:
        accumulators = ops.get(node.op).scales(attributes, [Real.of(s) for s in scales])
        for role, value in fold_sum(accumulators, s_y, affine).items():
            constant(role, value)
        attributes["rounding"] = target.rounding.value
    for role, value in bound_constants(low, high, output.quantization).items():
        constant(role, value)
    return Node(quantize.name, node.op, node.inputs, output.name, roles, attributes, node.location)


def _preparation(
    graph: Graph, tensors: dict[str, Tensor], node: Node, affine: Affine, output: Tensor, target: targets.Target
) -> Preparation:
    constants = {role: graph.constant(node, role) for role in node.constants}
    inputs = tuple(operand(tensors[name]) for name in node.inputs)
    return Preparation(node.attributes, constants, inputs, operand(output), affine, target)


def _tighter(low: Any, step_low: Any, high: Any, step_high: Any) -> tuple[Any, Any]:
    """min(max(min(max(x, a), b), c), d) as one clamp: the later bound wins where they cross."""
    xp = np if not any(hasattr(v, "aval") for v in (low, step_low, high, step_high)) else None
    if xp is None:
        import jax.numpy as xp
    if step_low is not None:
        low = step_low if low is None else xp.maximum(low, step_low)
        high = None if high is None else xp.maximum(high, step_low)
    if step_high is not None:
        high = step_high if high is None else xp.minimum(high, step_high)
        low = None if low is None else xp.minimum(low, step_high)
    return low, high


def _scale(tensor: Tensor) -> Any:
    assert tensor.quantization is not None
    return tensor.quantization.scale


def _signed_range(node: Node, kernel: Tensor, chain: list[Node]) -> Quantization:
    """The kernel's quantization, its range made symmetric where a folded factor may change the sign of codes."""
    quantization = kernel.quantization
    assert quantization is not None
    scales = any(step.op == "batch_norm" or step.attributes.get("step") in ("mul", "div", "neg") for step in chain)
    if not scales or quantization.qmin >= -quantization.qmax:
        return quantization
    if -quantization.qmin > np.iinfo(kernel.dtype).max:
        raise ConversionError(
            f"{node.location}: the weight {kernel.name!r} may hold the code {quantization.qmin}, whose sign cannot "
            f"change within {kernel.dtype} when a batch norm with a negative gamma, or another factor, is folded into "
            "it. Use narrow_range=True (the default of symmetric specs)."
        )
    return dataclasses.replace(quantization, qmax=-quantization.qmin)
