"""The conversion: trace -> first graph -> passes -> integers only."""

from collections.abc import Sequence
from typing import Any

from qjax import targets
from qjax.export import islands, passes
from qjax.export.batch import free_batch
from qjax.export.check import check, check_integer
from qjax.export.ir import Graph
from qjax.export.lower import ParamsOf, lower
from qjax.ops.formulas import check_target
from qjax.tracing import Annotation, Program


def convert(
    program: Program,
    annotation: Annotation,
    args: Sequence[Any],
    names: Sequence[str],
    params_of: ParamsOf,
    target: targets.Target,
    other: tuple[Program, Annotation, Sequence[Any]] | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> Graph:
    """Convert an annotated program; its constants may be traced.

    Args:
      other: the same model traced with another batch, whose constants are `jax.ShapeDtypeStruct`; without it the
        graph keeps the batch of `program`.
      sizes: the two sizes of the batch.
    """
    check_target(target)
    graph = check(lower(program, annotation, args, names, params_of, target))
    if other is not None:
        second = lower(*other, names, params_of, target)
        graph = check(free_batch(graph, second, *sizes))
    # what no output needs has no quantizer behind it that `fuse` could fold
    graph = check(passes.remove_dead(graph))
    graph = check(passes.fuse(graph, target))
    graph = check(passes.codes_of_bounds(graph))
    graph = check(passes.remove_identities(graph))
    graph = passes.remove_dead(graph)
    return passes.check_accumulators(check_integer(islands.finished(graph)))
