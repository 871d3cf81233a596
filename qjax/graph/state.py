"""The state of a graph: an argument of the call whose next value is a part of the result, such as a cache.

Both have the same scales and zero points, so the codes that one call returns are those that the next call reads. The
graph's metadata record where the state is; `IntegerGraph.step` and the emitter of C read it from there.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from qjax.graph.ir import REAL_DTYPE, Graph, Node, Tensor
from qjax.graph.structure import flatten_arguments, is_leaf, plain, positions
from qjax.graph.unsupported import ConversionError
from qjax.ops.quantize import Quantize
from qjax.ops.rescale import Rescale
from qjax.support.names import Names

STATE = "state"
"""The key of a graph's metadata: [position of the argument, key of the result]."""

Asked: TypeAlias = str | int | tuple[str | int, str | int | None]
"""The argument's name or position; or both the argument and the key of the result that is its next value.

With the argument alone, its next value is the result's part with the same name, or the only part that looks like it.
"""


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a call has its state. argument: its position. result: a key of the result; None for the whole result."""

    argument: int
    result: int | str | None

    def part(self, result: Any) -> Any:
        """The state within a result."""
        return result if self.result is None else result[self.result]

    def split(self, result: Any) -> tuple[Any, Any]:
        """Split a result into everything else and the state; of a pair, everything else is the other element."""
        state = self.part(result)
        if self.result is None:
            return None, state
        if isinstance(result, Mapping):
            named = cast("Mapping[Any, Any]", result)
            return {key: value for key, value in named.items() if key != self.result}, state
        left = [value for key, value in enumerate(result) if key != self.result]
        return left[0] if len(left) == 1 else tuple(left), state


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of the state. input: its name among the graph's inputs, or None if the graph does not read it.

    output: the position of its next value among the graph's outputs.
    """

    input: str | None
    output: int

    def tensor(self, graph: Graph) -> Tensor:
        """The tensor with the array's shape, dtype and quantization."""
        return graph.tensors[graph.outputs[self.output] if self.input is None else self.input]


def locate(asked: Asked, names: Sequence[str], args: Sequence[Any], result: Any) -> Where:
    """Find the state that `convert` was asked for.

    Args:
      names: of the arguments, as far as they are known. args: those of the call.
      result: what it returns, with a shape and a dtype for every array.

    Raises:
      ValueError: there is no such argument; it contains a Python value; no part, or several, can be its next value.
    """
    wanted, key = asked if isinstance(asked, tuple) else (asked, ...)
    known = [*names[: len(args)], *(str(i) for i in range(len(names), len(args)))]
    if isinstance(wanted, str) and wanted in known:
        wanted = known.index(wanted)
    if not isinstance(cast("Any", wanted), int) or not 0 <= cast("int", wanted) < len(args):
        raise ValueError(
            f"convert: state: expected an argument of the call ({', '.join(known)}, or a position), got {wanted!r}."
        )
    position = cast("int", wanted)
    name, leaves = known[position], jax.tree.leaves(args[position])
    if not leaves or not all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves):
        kinds = ", ".join(sorted({type(x).__name__ for x in leaves})) or "nothing"
        raise ValueError(
            f"convert: state: expected arrays only in the argument {name!r}, got {kinds}. Pass an empty state as "
            "arrays of zeros."
        )
    found = [
        part for part, value in _parts(result) if (key is ... or part == key) and _looks_alike(value, args[position])
    ]
    found = [name] if name in found else found
    if len(found) != 1:
        listed = f"the parts {', '.join(map(repr, found))} of the result have" if found else "no part of the result has"
        raise ValueError(
            f"convert: state: {listed} the structure, shapes and dtypes of the argument {name!r}. The next state must "
            "look like the state. Say which part it is: state=(argument, key of the result)."
        )
    return Where(position, found[0])


def _parts(result: Any) -> Iterator[tuple[int | str | None, Any]]:
    if isinstance(result, Mapping):
        yield from ((key, part) for key, part in cast("Mapping[Any, Any]", result).items() if isinstance(key, str))
    elif isinstance(result, (tuple, list)):
        yield from enumerate(cast("Sequence[Any]", result))
    yield None, result


def _looks_alike(part: Any, state: Any) -> bool:
    if jax.tree.structure(part) != jax.tree.structure(state):
        return False
    pairs = zip(jax.tree.leaves(part), jax.tree.leaves(state), strict=True)
    return all(tuple(a.shape) == tuple(np.shape(b)) and _kind(a.dtype) == _kind(b.dtype) for a, b in pairs)


def _kind(dtype: DTypeLike) -> str:
    return "float" if jax.dtypes.issubdtype(dtype, np.floating) else np.dtype(dtype).kind


def share_quantizers(graph: Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> Graph:
    """Put every part of the next state of a quantized graph on the grid of the state.

    Args:
      inputs: names of the state's arrays. leaves: their next values: a position among the graph's outputs, or an array
        that depends on no input.

    Raises:
      ConversionError: a next value has no codes, or codes of another kind.
    """
    tensors, nodes, outputs = dict(graph.tensors), list(graph.nodes), list(graph.outputs)
    names = Names(between="#", beside=tensors)
    for name, leaf in zip(inputs, leaves, strict=True):
        if not isinstance(leaf, int):
            raise _state_error(
                name, "is a constant", "Return a value that the call computes, or leave it out of the state."
            )
        before, after = tensors.get(name), tensors[outputs[leaf]]
        if before is None or (before.quantization is after.quantization and before.dtype == after.dtype):
            continue  # a state that is not read has the quantizer of the value that is written to it
        if before.quantization is None or after.quantization is None:
            kinds = [
                "floats" if t.dtype == REAL_DTYPE else "codes" if t.quantization else t.dtype for t in (before, after)
            ]
            raise _state_error(name, f"is {kinds[1]}, and the state {kinds[0]}", "Quantize both, or make both FLOAT.")
        label, sums = names.free(f"{name}/next"), names.free(f"{name}/next/accumulator")
        tensors[sums] = Tensor(sums, after.shape, "int32")
        tensors[label] = Tensor(label, after.shape, before.dtype, before.quantization)
        maker = graph.producer(after.name)
        line = None if maker is None else maker.location
        nodes.append(Node(sums, Rescale.name, (after.name,), sums, {}, {}, line))
        nodes.append(Node(label, Quantize.name, (sums,), label, {}, {}, line))
        outputs[leaf] = label
    return graph.replace(tensors=tensors, nodes=tuple(nodes), outputs=tuple(outputs))


def _state_error(name: str, what: str, cure: str) -> ConversionError:
    return ConversionError(f"The next value of the state {name!r} {what}", cure)


# ---------------------------------------------------------------------------- of a finished graph


def where(graph: Graph) -> Where:
    """Find the state of a finished graph. Raises a ValueError for a graph without one."""
    known = graph.metadata.get(STATE)
    if known is None:
        raise ValueError(
            "The graph has no state. Name the argument that holds it: qjax.convert(qmodel, sample, state=...)."
        )
    return Where(int(known[0]), known[1])


def parts(graph: Graph) -> list[Part]:
    """The arrays of the state, in the order of `arrays_of`; empty for a graph without a state."""
    if graph.metadata.get(STATE) is None:
        return []
    place = where(graph)
    before = positions(_at(graph.metadata["input_structure"], place.argument), "The state")
    after = positions(_at(graph.metadata["output_structure"], place.result), "The next state")
    pairs = zip(before, after, strict=True)
    return [Part(None if a is None else graph.inputs[a], cast("int", b)) for a, b in pairs]


def _at(structure: Any, key: int | str | None) -> Any:
    """A part of a structure as JSON, see `structure.py`."""
    if key is None:
        return structure
    kind, items = structure
    return dict(items)[key] if kind == "dict" else items[key]


def check(graph: Graph, state: Any, place: Where) -> None:
    """Raise a TypeError if a state has another structure than the one with which the model was converted."""
    structure = ["tuple", [_at(graph.metadata["input_structure"], place.argument)]]
    if graph.call is not None and jax.tree.structure(state) == graph.call.arguments[place.argument]:
        state = plain(state)
    flatten_arguments(structure, (state,), 0)


def arrays_of(tree: Any) -> list[Any]:
    """The leaves of a state in the order of `parts`: dicts in their own order of keys, not in JAX's."""
    found = plain(tree)
    if is_leaf(found):
        return [found]
    values = cast("Any", found).values() if isinstance(found, dict) else found
    return [leaf for value in values for leaf in arrays_of(value)]


def tree_of(graph: Graph, arrays: Sequence[Any]) -> Any:
    """A state as the model takes it, from its arrays in the order of `parts`."""
    place = where(graph)
    if graph.call is None:
        given = iter(arrays)
        return _fill_structure(_at(graph.metadata["input_structure"], place.argument), lambda: next(given))
    tree = graph.call.arguments[place.argument]
    order = arrays_of(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return jax.tree.unflatten(tree, [arrays[order.index(index)] for index in range(tree.num_leaves)])


def _fill_structure(structure: Any, leaf: Callable[[], Any]) -> Any:
    if structure is None or isinstance(structure, int):
        return leaf()
    kind, items = structure
    if kind == "dict":
        return {key: _fill_structure(value, leaf) for key, value in items}
    values = [_fill_structure(value, leaf) for value in items]
    return tuple(values) if kind == "tuple" else values
