"""Derives one node's constants under a target, from its scales and from the steps after it.

A `Case` holds everything from which these constants follow, and nothing else. Nodes with equal cases therefore share
them, and many cases of one kind are computed at once inside a trace (`numerics.together`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import ops, targets
from qjax.assign.bounds import operand
from qjax.graph.ir import Graph, Node
from qjax.graph.unsupported import ConversionError
from qjax.graph.weighted_product import scale_in_rank
from qjax.numerics._namespace import wide
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops import Op, Operand, Preparation
from qjax.ops.channels import trailing, weight_to_result
from qjax.ops.epilogue import Affine, fold_sum, fold_weighted, requantization
from qjax.ops.formulas import Setting
from qjax.ops.formulas import get as get_formula


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node without its names."""

    op: str
    attributes: Mapping[str, Any]
    constants: Mapping[str, Any]


BARE = Step("", {}, {})
"""The producer in cases for which nothing about the producer matters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Uniform:
    """The data of a product with one scale per channel, in one form for all kinds and chains.

    g, b: of the `Affine` that the chain amounts to, as bit patterns of vectors over channels.
    """

    g: Any
    b: Any
    weighted: targets.Weighted


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Everything from which the constants of a node follow, except for the target; see `derived`.

    producer: with its float constants, but without its kernel. chain: the affine steps. kernel: its scale as a vector
    along the result's channels, or None. kind, wide: which of the target's settings apply to a product with weights.
    formula: the name of a runtime's own formula, and its setting. bias, count: replace a chain in files: the bias in
    steps of the accumulator (integers) or as float numbers, the number of elements of an average. uniform: replaces the
    chain, the kind and its width.
    """

    producer: Step
    chain: tuple[Step, ...]
    inputs: tuple[Operand, ...]
    output: Operand
    kernel: Any = None
    kind: Literal["dot", "conv", "depthwise"] = "dot"
    wide: bool = False
    formula: tuple[str, Setting] | None = None
    bias: Any = None
    count: Any = None
    uniform: Uniform | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Constants:
    """Constants by role; attributes: added to the node's. factor and scale: of a kernel's codes."""

    constants: Mapping[str, Any]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: Any = None
    scale: Any = None


def step_of(graph: Graph, node: Node, roles: Sequence[str]) -> Step:
    """A node with some of its constants."""
    return Step(node.op, node.attributes, {role: graph.constant(node, role) for role in roles})


def affine_steps(graph: Graph, chain: Sequence[Node]) -> tuple[Step, ...]:
    """The nodes of a chain that add or multiply.

    Clamps are left out, and so are leading axes of size 1, so that layers that differ only in these share a kind.
    """
    found = [(node, ops.get(node.op)) for node in chain]
    chosen = [node for node, op in found if type(op).compose is not Op.compose and not op.clamps]
    for node in chosen:
        _check_finite(graph, node)
    steps = [step_of(graph, node, tuple(node.constants)) for node in chosen]
    return tuple(
        dataclasses.replace(step, constants={role: trailing(value) for role, value in step.constants.items()})
        for step in steps
    )


def _check_finite(graph: Graph, node: Node) -> None:
    for role in node.constants:
        value = graph.constant(node, role)
        if isinstance(value, Tracer) or np.isfinite(np.asarray(value, np.float32)).all():
            continue
        raise ConversionError(
            f"{node.name!r} adds, multiplies or divides by a number that is NaN or infinite, which no code represents",
            "Select with jnp.where: jnp.where(keep, y, 0.0) for what such a number makes 0. Mask scores of a softmax "
            "with a boolean mask.",
            where=node.location,
        )


def kernel_scale(graph: Graph, node: Node) -> Any:
    """The scale of a node's kernel as a vector along the result's channels."""
    kernel = graph.tensors[node.constants["kernel"]]
    return weight_to_result(scale_in_rank(kernel), node.attributes["channels"], node.attributes["rank"])


def scales_alone(graph: Graph, names: Sequence[str]) -> tuple[Operand, ...]:
    """Tensors of which only the scale matters."""
    return tuple(Operand((), "", operand(graph.tensors[name]).scale) for name in names)


def alive(case: Case) -> jax.Array:
    """A boolean that is always true (NaN included), which the compiler cannot prove."""
    return jnp.asarray(case.output.scale).reshape(-1)[0] != np.float32(-1)


def by_channel(target: targets.Target, case: Case) -> bool:
    """Whether the constants of a case are vectors over channels, computed element by element."""
    if case.kernel is None or np.ndim(case.kernel) != 1:
        return False
    numbers = [x for step in case.chain for x in step.constants.values()]
    if any(np.size(x) > 1 and not isinstance(x, Tracer) for x in numbers):
        return False  # a known vector is not an operand, see `derived`
    rule = get_rule(target.weighted(case.kind, per_channel=True, wide=case.wide).rule)
    return np.size(case.kernel) > 1 and rule.of_scales is None


def uniform(target: targets.Target, case: Case) -> Case:
    """Do the first part of `derive` inside a trace, for a case that is `by_channel`."""
    affine, shape = _affine(case), np.shape(case.kernel)
    with wide(jnp):
        g, b = (jnp.broadcast_to(number.pattern(), shape) for number in (affine.g, affine.b))
    found = Uniform(g, b, target.weighted(case.kind, per_channel=True, wide=case.wide))
    return dataclasses.replace(case, chain=(), kind="dot", wide=False, uniform=found)


def _affine(case: Case) -> Affine:
    if case.uniform is not None:
        return Affine(Real.of_pattern(case.uniform.g), Real.of_pattern(case.uniform.b))
    affine = Affine.identity()
    for step in case.chain:
        affine = ops.get(step.op).compose(step.attributes, step.constants, affine)
    return affine


def derive(target: targets.Target, case: Case) -> Constants:
    """The constants of a case, except for the kernel's codes and the bounds on the output's codes."""
    if case.bias is not None:
        return _derive_with_bias(target, case)
    affine = _affine(case)
    producer, s_y = case.producer, case.output.scale
    scales = [x.scale for x in case.inputs if x.scale is not None]
    if case.kernel is not None:

        def weighted(per_channel: bool) -> targets.Weighted:
            if case.uniform is not None:
                return case.uniform.weighted
            return target.weighted(case.kind, per_channel=per_channel, wide=case.wide)

        folded = fold_weighted(scales[0], case.kernel, s_y, affine, weighted)
        return Constants({"bias": folded.bias, **folded.requantize}, {}, folded.factor, folded.weight_scale)
    if case.formula is not None:
        name, setting = case.formula
        known: dict[str, Any] = {"formula": name}
        if setting.factor != 1:
            known["factor"] = setting.factor
        return Constants(get_formula(name).prepare(setting), known)
    op = ops.get(producer.op)
    if op.prepares:
        given = Preparation(producer.attributes, producer.constants, case.inputs, case.output, affine, target)
        own = op.prepare(given)
        return Constants(own.constants, own.attributes)
    if case.count is not None:
        # A count is an integer below 2^31, and the model divides by its float32.
        affine = Affine(affine.g / Real.of(np.asarray(case.count, np.float32)), affine.b)
    accumulators = op.scales(producer.attributes, [Real.of(s) for s in scales])
    return Constants(fold_sum(accumulators, s_y, affine), {"rounding": target.rounding.value})


def weighted_of(target: targets.Target, case: Case) -> targets.Weighted:
    """The target's setting for a product whose kernel keeps its scales."""
    if case.output.dtype == "int32":
        # The output is the accumulator itself, so nothing is rounded.
        return targets.Weighted("nearest_even")
    return target.weighted(case.kind, per_channel=np.size(case.kernel) > 1, wide=case.wide)


def _derive_with_bias(target: targets.Target, case: Case) -> Constants:
    """The constants of a product whose bias is given directly; the kernel keeps its codes and scales."""
    s_x, s_w, s_y = case.inputs[0].scale, case.kernel, case.output.scale
    per_channel = np.size(s_w) > 1
    step, held = Real.of(s_x) * Real.of(s_w), np.asarray(case.bias)
    counts = held.dtype.kind == "i"
    real = Real.of(held) * step if counts else Real.of(held)
    bias, constants = requantization(
        s_x, s_w, s_y, real, held if counts else (real / step).to_int32(), weighted_of(target, case), per_channel
    )
    shape = tuple(np.shape(s_w))
    constants = {
        role: np.broadcast_to(value, np.broadcast_shapes(shape, np.shape(value))) for role, value in constants.items()
    }
    return Constants({"bias": bias, **constants})
