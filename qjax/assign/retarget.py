"""The same model under another target: `assign` on the quantized graph that a program was made from."""

from qjax import targets
from qjax.assign import assign
from qjax.assign.from_program import alike, from_program
from qjax.assign.partition import expand
from qjax.graph.ir import Graph


def retarget(graph: Graph, target: str | targets.Target) -> Graph:
    """The program under another target: the same as that of a conversion for that target.

    Args:
      graph: a program. One that does not keep its quantized graph (see `Graph.quantized`) is taken apart by
        `from_program`: its biases are integers already, and what was folded into factors stays there.
      target: the target or its name.

    Raises:
      ValueError: an unknown target; an output whose scale is far too small for its input.
      ConversionError: an accumulator that may overflow under the target; a program whose quantized graph is not known.
    """
    target = targets.get(target)
    if graph.target == target.name:
        return expand(graph)
    if graph.quantized is not None:
        return assign(graph.quantized.replace(metadata=graph.metadata, call=graph.call), target)
    whole = expand(graph)
    return assign(from_program(whole), target, alike(whole))
