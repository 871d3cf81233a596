"""Makes a program from a quantized graph and a target; every constant of a target is made here, and nowhere else.

`convert`, `retarget`, the readers and loaded files all go through `assign`. It does not change what the quantized graph
states: codes of weights, quantization parameters, the structure. See `ir` for the two stages.

    quantized graph:  a = dot(x, w); c = add(a, b); y = quantize(c)
    program:          y = dot(x, w) with bias, multiplier and shift, under the target's rule
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qjax import targets
from qjax.assign.bounds import codes_of_bounds
from qjax.assign.decompose_ops import compose
from qjax.assign.fold_epilogues import fuse
from qjax.assign.imported_nodes import restate, stated_nodes
from qjax.assign.int16_limits import check_codes
from qjax.assign.overflow import check_accumulators
from qjax.graph import float_parts
from qjax.graph.check import check, check_integer, check_quantized
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph
from qjax.ops.formulas import check_target

__all__ = ["assign"]


def assign(graph: Graph, target: targets.Target, alike: Mapping[str, Sequence[Any]] | None = None) -> Graph:
    """The program of a quantized graph under a target; its constants may be traced.

    Args:
      graph: a quantized graph, see `check.check_quantized`.
      target: the runtime whose rounding the program matches.
      alike: name of a node with stated constants -> a key that is equal for nodes that share what the target adds, such
        as the iterations of a loop. None: nodes that state the same constants share it.

    Raises:
      GraphError: the graph breaks a rule of its stage.
      ValueError: the target names an unknown formula; an output's scale is far too small for its input.
      ConversionError: an accumulator may overflow; the sign of a weight's codes cannot change; the runtime does not
        support such codes.
    """
    check_target(target)
    check_codes(check_quantized(graph), target)
    stated = stated_nodes(graph)
    made = restate(check(fuse(check(compose(graph, target)), target)), stated, target, alike or {})
    made = float_parts.complete(remove_dead(check(codes_of_bounds(made))), target)
    made = made.replace(
        target=target.name, quantization=target.quantize, dequantization=target.dequantize, quantized=graph
    )
    return check_accumulators(check_integer(made))
