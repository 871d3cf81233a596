"""The conversion's first stage: trace -> quantized graph, which knows no target (see `ir`)."""

from collections.abc import Sequence
from typing import Any

from qjax.export import passes
from qjax.export.batch import free_batch
from qjax.export.check import check
from qjax.export.ir import Graph
from qjax.export.lower import ParamsOf, lower
from qjax.tracing import Annotation, Program


def quantized_graph(
    program: Program,
    annotation: Annotation,
    args: Sequence[Any],
    names: Sequence[str],
    params_of: ParamsOf,
    other: tuple[Program, Annotation, Sequence[Any]] | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> Graph:
    """The quantized graph of an annotated program; its constants may be traced.

    Args:
      other: the same model traced with another batch, whose constants are `jax.ShapeDtypeStruct`; without it the
        graph keeps the batch of `program`.
      sizes: the two sizes of the batch.
    """
    graph = check(lower(program, annotation, args, names, params_of))
    if other is not None:
        graph = check(free_batch(graph, lower(*other, names, params_of), *sizes))
    # What no output needs has no quantizer behind it, with which `assign` could fold it.
    return check(passes.remove_dead(passes.remove_identities(passes.remove_dead(graph))))
