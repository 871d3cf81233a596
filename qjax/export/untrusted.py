"""The checks that a graph from a file must pass before anybody gets it. A digest proves nothing about the content."""

from typing import Any

from qjax.assign.overflow import check_accumulators
from qjax.graph import state
from qjax.graph.check import GraphError
from qjax.graph.ir import Graph
from qjax.graph.recompute import check_computed, same_quantization
from qjax.graph.structure import positions


def check_read(graph: Graph) -> Graph:
    """Verify everything that a file states about a program: its nodes, its tensors, its sums and its metadata.

    Raises:
      GraphError: names what is stated and what was expected.
    """
    check_computed(graph)
    try:
        check_accumulators(graph)
        _check_metadata(graph)
    except GraphError:
        raise
    except Exception as error:
        # As in `check_computed`, an impossible field can fail anywhere.
        raise GraphError(f"The graph's fields contradict each other ({type(error).__name__}: {error}).") from error
    return graph


def _check_metadata(graph: Graph) -> None:
    known = graph.metadata
    for key, names, whole in (("input_structure", graph.inputs, True), ("output_structure", graph.outputs, False)):
        structure = known.get(key)
        if structure is None:
            continue
        where = f"The graph's {key}"
        found = [place for place in positions(structure, where) if place is not None]
        if sorted(found if whole else set(found)) != list(range(len(names))):
            raise GraphError(f"{where}: expected the positions of {len(names)} arrays, got {str(found)[:100]}.")
    given = known.get("input_structure")
    if given is not None and (type(given) is int or given[0] != "tuple"):
        raise GraphError("The graph's input_structure: expected a tuple of the call's arguments.")
    ranges: Any = known.get("integers", [])
    if not _are_ranges(ranges, len(graph.inputs)):
        raise GraphError("The graph's integers: expected the range of each input, or null, in a list.")
    if known.get("batch") not in (None, "fixed") or type(known.get("profile", "")) is not str:
        raise GraphError("The graph's metadata: expected the batch to be 'fixed' or absent, and the profile a name.")
    for part in state.parts(graph):
        before, after = part.tensor(graph), graph.tensors[graph.outputs[part.output]]
        alike = (before.shape, before.dtype) == (after.shape, after.dtype)
        if not alike or not same_quantization(before.quantization, after.quantization):
            raise GraphError(f"The state {before.name!r}: expected its next value to be of the same kind.")


def _are_ranges(value: Any, count: int) -> bool:
    if type(value) is not list or len(value) not in (0, count):
        return False
    pairs = [entry for entry in value if entry is not None]
    return all(type(pair) is list and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)


__all__ = ["check_read"]
