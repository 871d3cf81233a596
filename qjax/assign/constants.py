"""One node's constants under a target: from its scales, and from the steps behind it.

A case holds everything that these constants follow from, and nothing else. So nodes of equal cases share them, and many
cases of one kind are computed at once inside a trace (`numerics.together`).
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
"""In place of a producer of which nothing is needed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Uniform:
    """What the constants of a product with one scale a channel follow from, in one form for all kinds and chains.

    g, b: of the `Affine` that the chain is, the bit patterns of vectors over channels.
    """

    g: Any
    b: Any
    weighted: targets.Weighted


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Everything that the constants of a node follow from, except the target; nothing else, see `derived`.

    producer: with its real constants, its kernel left out. chain: the affine steps. kernel: its scale as a vector of
    the result, else None. kind, wide: what a target asks of a product with weights. formula: the name of a runtime's
    own, and what it may know. bias, count: in place of a chain, where a file has them: the bias in steps of the
    accumulator (integers) or as real numbers, the number of elements of an average. uniform: in place of the chain, the
    kind and its width.
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
    """By role; attributes: those that join the node's. factor and scale: of a kernel's codes."""

    constants: Mapping[str, Any]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: Any = None
    scale: Any = None


def step_of(graph: Graph, node: Node, roles: Sequence[str]) -> Step:
    """A node with some of its constants."""
    return Step(node.op, node.attributes, {role: graph.constant(node, role) for role in roles})


def affine_steps(graph: Graph, chain: Sequence[Node]) -> tuple[Step, ...]:
    """Those nodes of a chain that add or multiply.

    Clamps are left out, and so are leading axes of size 1: layers that differ in these alone are of one kind.
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
            f"{node.name!r} adds, multiplies or divides by a number that is NaN or infinite, which no code stands for",
            "Choose with jnp.where: jnp.where(keep, y, 0.0) for what such a number makes 0. Hide scores from a softmax "
            "with a boolean mask.",
            where=node.location,
        )


def kernel_scale(graph: Graph, node: Node) -> Any:
    """The scale of a node's kernel as a vector of the result."""
    kernel = graph.tensors[node.constants["kernel"]]
    return weight_to_result(scale_in_rank(kernel), node.attributes["channels"], node.attributes["rank"])


def scales_alone(graph: Graph, names: Sequence[str]) -> tuple[Operand, ...]:
    """Tensors of which only the scale is needed."""
    return tuple(Operand((), "", operand(graph.tensors[name]).scale) for name in names)


def alive(case: Case) -> jax.Array:
    """A boolean that is always true (NaN included), which the compiler cannot prove."""
    return jnp.asarray(case.output.scale).reshape(-1)[0] != np.float32(-1)


def by_channel(target: targets.Target, case: Case) -> bool:
    """Whether the constants of a case are vectors over channels, each element by itself."""
    if case.kernel is None or np.ndim(case.kernel) != 1:
        return False
    numbers = [x for step in case.chain for x in step.constants.values()]
    if any(np.size(x) > 1 and not isinstance(x, Tracer) for x in numbers):
        return False  # A known vector is not an operand, see `derived`.
    rule = get_rule(target.weighted(case.kind, per_channel=True, wide=case.wide).rule)
    return np.size(case.kernel) > 1 and rule.of_scales is None


def uniform(target: targets.Target, case: Case) -> Case:
    """The first part of `derive` for a case that is `by_channel`, inside a trace."""
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
    """The constants of a case, but for the kernel's codes and the bounds on the output's."""
    if case.bias is not None:
        return _counted(target, case)
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
        # A count is an integer below 2^31. Its float32 is the divisor that the model holds.
        affine = Affine(affine.g / Real.of(np.asarray(case.count, np.float32)), affine.b)
    accumulators = op.scales(producer.attributes, [Real.of(s) for s in scales])
    return Constants(fold_sum(accumulators, s_y, affine), {"rounding": target.rounding.value})


def weighted_of(target: targets.Target, case: Case) -> targets.Weighted:
    """What the target says of a product whose kernel's scales stay as they are."""
    if case.output.dtype == "int32":
        # The output is the accumulator itself: nothing is rounded.
        return targets.Weighted("nearest_even")
    return target.weighted(case.kind, per_channel=np.size(case.kernel) > 1, wide=case.wide)


def _counted(target: targets.Target, case: Case) -> Constants:
    """Those of a product whose bias is given by itself; the kernel's codes and scales stay as they are."""
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
