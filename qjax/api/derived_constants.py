"""The constants that a graph derives from parameters, as a pytree: derived once per update, and passed to every step.

A sampler calls the model for every token, but the parameters change once per update. `exact` derives codes of weights,
biases, multipliers and tables in every call. Here the derived numbers are the leaves of a pytree, and the program,
which does not depend on the parameters, is its static part. So a jitted step takes new constants without a compilation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.assign.overflow import may_wrap
from qjax.graph import state as states
from qjax.graph.ir import Graph, Quantization, Tensor
from qjax.graph.kernels import prepare
from qjax.run import loop_execution
from qjax.run.find_loops import Repeat, over_iterations, repeats
from qjax.run.interpreter import check_shapes
from qjax.run.quantize_io import (
    check_integers,
    dequantize_output,
    inputs_of,
    integers_checked,
    quantize_inputs,
    result_of,
)
from qjax.run.shared_constants import SharedConstants


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """What does not depend on the parameters. Compared by identity, so that a step is compiled once.

    graph: without numbers. maker: the forward that derived it.
    """

    graph: Graph
    loops: Sequence[Repeat]
    maker: object


@jax.tree_util.register_pytree_node_class
class DerivedConstants:
    """The constants that `qjax.exact(...).constants(qmodel)` derives: a pytree for the forward's first argument.

    Attributes:
      fingerprint: uint32 [2], a checksum of the parameters from which they were derived. Store it beside a cache, to
        know later which parameters filled it.
    """

    def __init__(self, program: _Program, numbers: Any, fingerprint: Any) -> None:
        self._program, self._numbers, self.fingerprint = program, numbers, fingerprint

    @classmethod
    def of(cls, graph: Graph, fingerprint: Any, maker: object) -> "DerivedConstants":
        """The constants of a graph, whose numbers may be traced."""
        own = prepare(graph)
        loops = repeats(graph, own)
        shared = SharedConstants.of(own, over_iterations(graph, loops))
        ends = {*graph.inputs, *graph.outputs}
        read = {name for node in graph.nodes for name in node.inputs} | ends
        grids = {n: (q.scale, q.zero_point) for n in sorted(ends) if (q := graph.tensors[n].quantization) is not None}
        values = {n: t.value for n, t in graph.tensors.items() if t.value is not None and n in read}
        wraps = may_wrap(graph)
        tensors = {name: _without_numbers(tensor) for name, tensor in graph.tensors.items()}
        program = _Program(graph.replace(tensors=tensors), tuple(loops), maker)
        return cls(program, (shared, grids, values, wraps), fingerprint)

    def graph(self) -> Graph:
        """The program with the scales and zero points of its ends, and the values that its nodes read."""
        _, grids, values, _ = self._numbers
        tensors = dict(self._program.graph.tensors)
        for name, (scale, zero_point) in grids.items():
            known = tensors[name].quantization
            assert known is not None
            filled = dataclasses.replace(known, scale=scale, zero_point=zero_point)
            tensors[name] = dataclasses.replace(tensors[name], quantization=filled)
        for name, value in values.items():
            tensors[name] = dataclasses.replace(tensors[name], value=value)
        return self._program.graph.replace(tensors=tensors)

    def made_by(self, maker: object) -> bool:
        """Whether that forward derived them."""
        return self._program.maker is maker

    def results(self, arrays: Sequence[Any], keep: frozenset[str] = frozenset()) -> tuple[Any, Any]:
        """The results of the model, and whether they must not be used because an accumulator may have wrapped.

        arrays: the inputs in the order of the graph's. keep: the inputs that are codes of the state; their next values
        stay codes.
        """
        graph, (shared, _, _, wraps) = self.graph(), self._numbers
        # Without the barrier XLA may recompute a constant for every output that reads it.
        shared = jax.lax.optimization_barrier(shared)
        codes = quantize_inputs(graph, arrays, keep)
        env = loop_execution.outputs(graph, self._program.loops, shared, codes, graph.outputs)
        kept = {part.output for part in states.parts(graph) if part.input in keep}
        leaves = [
            env[name] if position in kept else dequantize_output(graph, name, env[name])
            for position, name in enumerate(graph.outputs)
        ]
        return result_of(graph, leaves), wraps

    def call(self, inputs: tuple[Any, ...]) -> Any:
        """The results for a call's arguments, checked as far as they are known."""
        graph = self.graph()
        arrays = integers_checked(graph, inputs_of(graph, inputs))
        check_shapes(graph, [tuple(np.shape(x)) for x in arrays])
        check_integers(graph, arrays)
        keep = frozenset(
            part.input
            for part in states.parts(graph)
            if part.input is not None
            and graph.tensors[part.input].quantization is not None
            and str(arrays[graph.inputs.index(part.input)].dtype) == graph.tensors[part.input].dtype
        )
        results, wraps = self.results(arrays, keep)
        if wraps is None:
            return results
        return jax.tree.map(lambda x: _nan_where(wraps, x), results)

    def state(self, cache: Any) -> Any:
        """The codes of a state of floats, for calls that pass the state as codes from then on."""
        graph = self.graph()
        names = [part.input for part in states.parts(graph)]
        states.check(graph, cache, states.where(graph))
        arrays = states.arrays_of(cache)
        codes: list[Any] = []
        for name, x in zip(names, arrays, strict=True):
            if name is None:
                codes.append(x)
            else:
                codes.append(quantize_inputs(graph.replace(inputs=(name,)), [x])[0])
        return states.tree_of(graph, codes)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Program]:
        return (self._numbers, self.fingerprint), self._program

    @classmethod
    def tree_unflatten(cls, program: _Program, children: tuple[Any, ...]) -> "DerivedConstants":
        return cls(program, *children)


def _nan_where(lost: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(lost, jnp.full_like(x, np.nan), x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _without_numbers(tensor: Tensor) -> Tensor:
    q = tensor.quantization
    bare: Any = None if q is None else Quantization(None, None, q.qmin, q.qmax, q.axes)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(tensor, quantization=bare, value=None)


def fingerprint_of(arrays: Sequence[Any]) -> jax.Array:
    """uint32 [2]: two sums of the arrays' bits, each element times an odd number of its own; in every program the same.

    A change of one element always changes it. Several changes that cancel in both sums are as rare as 2^-64.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, x in enumerate(arrays):
        words = _words(jnp.asarray(x))
        places = jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) + np.uint32(number * 0x85EBCA6B & 0xFFFFFFFF)
        for index, step in enumerate((np.uint32(0x9E3779B1), np.uint32(0xC2B2AE3D))):
            mixed = places * step
            odd = (mixed ^ (mixed >> np.uint32(15))) | np.uint32(1)
            total = total.at[index].add(jnp.sum(words * odd, dtype=jnp.uint32))
    return total


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, with a last axis more for wider types."""
    size = x.dtype.itemsize
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if size >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint16 if size == 2 else jnp.uint8).astype(jnp.uint32)
