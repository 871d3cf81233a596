"""Decides which float islands every machine computes with the same bits.

IEEE 754 defines the results of `add`, `mul`, `div` and a few others exactly. The products of `qjax.Dynamic` consist of
these, and of moves and comparisons. Other steps differ from machine to machine: functions such as exp come from a
library, and sums of floats depend on their order. XLA itself may round a product and a sum once instead of twice, and
divides by a constant by multiplying with its reciprocal; so such steps have no certain bits either.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.graph.float_parts import float_program
from qjax.graph.ir import Graph, Node
from qjax.ops import float_programs, island
from qjax.support.errors import Unsupported
from qjax.tracing import Equation

_MOVES = """broadcast_in_dim reshape squeeze expand_dims transpose rev slice concatenate pad gather copy
copy_p""".split()  # noqa: SIM905
_ROUNDED = """add sub mul div neg abs max min sign floor ceil round eq ne lt le gt ge select_n clamp is_finite
convert_element_type reduce_max reduce_min""".split()  # noqa: SIM905


def check_islands(graph: Graph, format: str) -> None:
    """Raise an error for the first float island whose bits may differ on another machine.

    Raises:
      Unsupported: the message names the node, the step and the cure.
    """
    for node in graph.nodes:
        if node.op != island.NAME:
            continue
        why = next(uncertain(graph, node), None)
        if why is not None:
            raise Unsupported(
                f"a float part with {why}, so {format} files have no certain bits for it",
                "Give qjax.Dynamic to the products alone (its override names their modules), drop qjax.FLOAT or "
                "qjax.WeightFormat, or emit stablehlo.",
                what=f"Node {node.name!r} ({node.op})",
                where=node.location,
            )


def uncertain(graph: Graph, node: Node) -> Iterator[str]:
    """The reasons why the bits of an island's program are not certain."""
    attributes = node.attributes
    batch = 1
    shapes = [tuple(batch if n is None else n for n in graph.tensors[name].shape) for name in node.inputs]
    if attributes["batch"] is not None:
        source, axis, multiple = attributes["batch"]
        batch = max(shapes[source][axis] // multiple, 1)
    constants = {role: np.asarray(graph.constant(node, role)) for role in node.constants}
    given = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in zip(shapes, attributes["dtypes"], strict=True)
    ]

    def program(*values: jax.Array) -> list[jax.Array]:
        return float_programs.run(attributes["program"], attributes["results"], values, constants, batch)

    yield from _of(jax.make_jaxpr(program)(*given).jaxpr, {})


def uncertain_equations(equations: Iterable[Equation]) -> Iterator[tuple[Equation, str]]:
    """The same for equations of a model, in the order of execution."""
    made: dict[object, Any] = {}
    for eqn in equations:
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in eqn.inputs]
        jaxpr = jax.make_jaxpr(eqn.bind)(*shapes).jaxpr
        known: dict[object, Any] = {v: made.get(value) for v, value in zip(jaxpr.invars, eqn.inputs, strict=True)}
        for why in _of(jaxpr, known):
            yield eqn, why
        made |= {v: known.get(a) for v, a in zip(eqn.outputs, jaxpr.outvars, strict=True) if _is_variable(a)}


def _of(jaxpr: Any, made: dict[object, Any]) -> Iterator[str]:
    """The reasons in a jaxpr. made: what computed each value, before moves."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if (inner := float_program(eqn)) is not None:
            known: dict[object, Any] = {
                v: made.get(a) for v, a in zip(inner.jaxpr.invars, eqn.invars, strict=True) if _is_variable(a)
            }
            yield from _of(inner.jaxpr, known)
            made |= {v: known.get(a) for v, a in zip(eqn.outvars, inner.jaxpr.outvars, strict=True) if _is_variable(a)}
            continue
        dtypes = {atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)}
        floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
        source = made.get(eqn.invars[0]) if name in _MOVES and eqn.invars and _is_variable(eqn.invars[0]) else eqn
        made |= dict.fromkeys(eqn.outvars, source)
        if not floats:
            continue
        if floats != {jnp.dtype(jnp.float32)}:
            yield f"numbers of {', '.join(sorted(map(str, floats)))}, whose arithmetic differs by machine"
        elif name in ("reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "reduce_window_sum"):
            yield f"a sum of floats ({name!r}), which depends on its order"
        elif name not in (*_MOVES, *_ROUNDED):
            yield f"the function {name!r}, which each machine rounds in its own way"
        elif name in ("add", "sub") and any(_name(made.get(a)) == "mul" for a in eqn.invars if _is_variable(a)):
            yield "a sum of a product, which some compilers round once"
        elif name == "div" and not _is_guarded(eqn.invars[1], made):
            yield "a division that XLA may replace by a product with the reciprocal"


def _is_guarded(divisor: Any, made: dict[object, Any]) -> bool:
    """Whether the divisor has the form of `numerics.dynamic.divided`, which XLA does not rewrite."""
    return _is_variable(divisor) and _name(made.get(divisor)) == "select_n"


def _name(eqn: Any) -> str:
    return "" if eqn is None else str(eqn.primitive.name)


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
