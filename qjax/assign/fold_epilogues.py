"""Folds the steps after an accumulator, and the quantizer at their end, into the accumulator's producer.

Cases, for a producer p and the single-reader chain after it, which ends in `quantize`:
1. p has a constant kernel: affine steps change the kernel's scale, the bias and the multiplier (`fold_weighted`);
   the kernel's codes stay the same, up to their sign.
2. p sums scaled integers (addition, pooling, rescale, products of activations): the steps change the factors and
   the offset (`fold_sum`).
3. clamps become bounds on the output's codes, in both cases.

    a = dot(x, w); c = add(a, b); d = relu(c); y = quantize(d)
    -> y = dot(x, w), constants bias, multiplier, shift, clamp_min

Requires: every accumulator has one reader and its chain ends in `quantize`. Ensures: no accumulator, no float
constant and no `quantize` remains, except for the bounds of clamps on codes (`codes_of_bounds`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.assign.bounds import bound_constants, operand
from qjax.assign.constants import (
    BARE,
    Case,
    Constants,
    affine_steps,
    alive,
    by_channel,
    derive,
    kernel_scale,
    scales_alone,
    step_of,
    uniform,
)
from qjax.assign.formulas import formula_of
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.graph.weighted_product import arithmetic_of, kind_of
from qjax.numerics.together import derived
from qjax.ops import Operand, Role
from qjax.ops.channels import result_to_weight
from qjax.ops.epilogue import scale_codes
from qjax.ops.facts import AverageFacts


def fuse(graph: Graph, target: targets.Target) -> Graph:
    """Fold all chains; see the module's docstring."""
    nodes: list[Node | _Fused] = []
    known: dict[object, _Fused] = {}
    readers: dict[str, list[Node]] = {node.output: [] for node in graph.nodes}
    for node in graph.nodes:
        for name in set(node.inputs) & readers.keys():
            readers[name].append(node)
    for node in graph.nodes:
        if node.output not in readers or graph.tensors[node.output].quantization is not None:
            nodes.append(node)
            continue
        role = ops.get(node.op).role
        if role in (Role.GRID, Role.INTEGER):
            nodes.append(node)  # integers without a scale have nothing to fold
            continue
        if role is not Role.PRODUCER:
            continue  # this step was folded into the producer at the start of its chain
        chain: list[Node] = []
        output = node.output
        while True:
            following = readers.get(output, [])
            if len(following) != 1:
                raise ConversionError(
                    f"the accumulator of {node.name!r} has {len(following)} readers instead of one.",
                    where=node.location,
                )
            if _ends(following[0]):
                break
            chain.append(following[0])
            output = following[0].output
        key = _key(graph, node, chain, following[0])
        if key not in known:
            known[key] = _Fused(node, tuple(chain), following[0], _case(graph, node, chain, following[0], target))
        nodes.append(dataclasses.replace(known[key], node=node, quantize=following[0]))
    fused = list(known.values())
    constants = derived(
        functools.partial(derive, target),
        [one.case for one in fused],
        alive,
        elementwise=functools.partial(by_channel, target),
        uniform=functools.partial(uniform, target),
    )
    tensors = dict(graph.tensors)
    first = [_finish_node(graph, tensors, one, made, target) for one, made in zip(fused, constants, strict=True)]
    done = {id(one.case): node for one, node in zip(fused, first, strict=True)}

    def node_of(one: Node | _Fused) -> Node:
        if isinstance(one, Node):
            return one
        at = one.quantize
        return dataclasses.replace(
            done[id(one.case)], name=at.name, inputs=one.node.inputs, output=at.output, location=one.node.location
        )

    finished = tuple(node_of(one) for one in nodes if isinstance(one, _Fused) or not _ends(one))
    return graph.replace(nodes=finished, tensors=tensors)


def _ends(node: Node) -> bool:
    return ops.get(node.op).role is Role.QUANTIZER


@dataclasses.dataclass(frozen=True, eq=False)
class _Fused:
    """A producer, the chain after it, and the quantizer at its end."""

    node: Node
    chain: tuple[Node, ...]
    quantize: Node
    case: Case


def _key(graph: Graph, node: Node, chain: list[Node], quantize: Node) -> Any:
    """The key of a node's constants. The iterations of a loop have the same key, so they share the constants."""
    tensors = graph.tensors

    def step(node: Node) -> Any:
        constants = ((role, id(graph.constant(node, role))) for role in sorted(node.constants))
        grids = (id(graph.tensors[name].quantization) for name in node.constants.values())
        return node.op, repr(sorted(node.attributes.items())), *constants, *grids

    inputs = ((tensors[name].shape, tensors[name].dtype, id(tensors[name].quantization)) for name in node.inputs)
    output = tensors[quantize.output]
    return (*map(step, (node, *chain)), *inputs, output.shape, output.dtype, id(output.quantization))


def _case(graph: Graph, node: Node, chain: list[Node], quantize: Node, target: targets.Target) -> Case:
    tensors, output = graph.tensors, graph.tensors[quantize.output]
    kept = ("kernel", *ops.get(node.op).keeps)
    producer = step_of(graph, node, [role for role in node.constants if role not in kept])
    affine = affine_steps(graph, chain)
    if "kernel" not in node.constants and ops.get(node.op).prepares:
        return Case(producer, affine, tuple(operand(tensors[name]) for name in node.inputs), operand(output))
    case = Case(producer, affine, scales_alone(graph, node.inputs), Operand((), "", operand(output).scale))
    if "kernel" in node.constants:
        kernel, wide = tensors[node.constants["kernel"]], tensors[node.inputs[0]].dtype == "int16"
        s_w, kind = kernel_scale(graph, node), kind_of(node, kernel)
        return dataclasses.replace(case, producer=BARE, kernel=s_w, kind=kind, wide=wide)
    found = formula_of(graph, tensors, node, chain, output, target)
    if found is None:
        return case
    return dataclasses.replace(case, producer=BARE, formula=(found[0].name, found[1]))


def _finish_node(
    graph: Graph, tensors: dict[str, Tensor], fused: _Fused, made: Constants, target: targets.Target
) -> Node:
    """The finished node; its constants are added to `tensors`."""
    node, output = fused.node, tensors[fused.quantize.output]
    assert output.quantization is not None
    roles: dict[str, str] = {}

    def constant(role: str, value: Any, quantization: Quantization | None = None) -> None:
        name = f"{output.name}/{role}"
        tensors[name] = Tensor(name, tuple(np.shape(value)), str(value.dtype), quantization, value)
        roles[role] = name

    attributes = dict(node.attributes)
    if "kernel" in node.constants:
        kernel = tensors[node.constants["kernel"]]
        assert kernel.value is not None
        channels, rank = attributes["channels"], attributes["rank"]
        factor = result_to_weight(made.factor, channels, rank, len(kernel.shape))
        axes = tuple(sorted(w for _, w in channels)) if np.size(made.scale) > 1 else ()
        scale = result_to_weight(made.scale, channels, rank, len(kernel.shape))
        # With several channel axes, a batch norm may apply to the last one only.
        axes = tuple(axis for axis in axes if scale.shape[axis] == kernel.shape[axis])
        scale = scale.reshape(tuple(scale.shape[axis] for axis in axes))
        zero_point = np.zeros(scale.shape, np.int32)
        own = _signed_range(node, kernel, fused.chain)
        quantization = dataclasses.replace(own, scale=scale, zero_point=zero_point, axes=axes)
        constant("kernel", scale_codes(kernel.value, factor), quantization)
        rule = target.weighted(fused.case.kind, per_channel=np.size(made.scale) > 1, wide=fused.case.wide).rule
        attributes |= arithmetic_of(node, kernel, tensors[node.inputs[0]].shape, rule, target)
    roles |= {role: node.constants[role] for role in ops.get(node.op).keeps}
    for role, value in made.constants.items():
        constant(role, value)
    attributes |= made.attributes
    formula = fused.case.formula
    if formula is not None and isinstance(ops.get(node.op), AverageFacts):
        constant("count", np.asarray(formula[1].count, np.int32))
    low, high = None, None
    for step in fused.chain:
        constants = {role: graph.constant(step, role) for role in step.constants}
        step_low, step_high = ops.get(step.op).bounds(step.attributes, constants)
        low, high = _merge_clamps(low, step_low, high, step_high)
    for role, value in bound_constants(low, high, output.quantization).items():
        constant(role, value)
    return Node(fused.quantize.name, node.op, node.inputs, output.name, roles, attributes, node.location)


def _merge_clamps(low: Any, step_low: Any, high: Any, step_high: Any) -> tuple[Any, Any]:
    """min(max(min(max(x, a), b), c), d) as one clamp; where the bounds cross, the later one wins."""
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


def _signed_range(node: Node, kernel: Tensor, chain: Sequence[Node]) -> Quantization:
    """The kernel's quantization, with a symmetric range if a folded factor may change the sign of its codes."""
    quantization = kernel.quantization
    assert quantization is not None
    negates = any(ops.get(step.op).may_negate(step.attributes) for step in chain)
    if not negates or quantization.qmin >= -quantization.qmax:
        return quantization
    if -quantization.qmin > np.iinfo(kernel.dtype).max:
        raise ConversionError(
            f"the weight {kernel.name!r} may hold the code {quantization.qmin}, whose sign cannot change within "
            f"{kernel.dtype} when a batch norm with a negative gamma, or another factor, is folded into it",
            "Use narrow_range=True (the default of symmetric specs).",
            where=node.location,
        )
    return dataclasses.replace(quantization, qmax=-quantization.qmin)
