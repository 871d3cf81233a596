"""Refuses inputs for which a graph has no code: NaN and infinity, and indices out of range.

Inside a trace nothing can be refused, so NaN becomes the zero point, infinities saturate, and indices are clipped.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph.ir import Array, Graph
from qjax.graph.kernels import Constants, attributes

_CURE = "They have no code, and runtimes disagree about what they become: clean the data first."
_INDICES = (
    "JAX gives NaN there, for which there is no code, and the graph would clip them. Correct the indices, use the mode "
    "'clip' in the model, or compute with codes: graph.dequantize(graph.run(graph.quantize(x)))."
)


def input_faults(graph: Graph, inputs: Sequence[Array]) -> dict[str, jax.Array]:
    """Per quantized float input: int32 [number of NaN, number of infinities]. May be traced."""
    found: dict[str, jax.Array] = {}
    for name, x in zip(graph.inputs, inputs, strict=True):
        x = jnp.asarray(x)
        if graph.tensors[name].quantization is not None and jnp.issubdtype(x.dtype, jnp.floating):
            counts = [jnp.sum(test(x), dtype=jnp.int32) for test in (jnp.isnan, jnp.isinf)]
            found[name] = jnp.stack(counts)
    return found


def chosen_by(graph: Graph) -> list[str]:
    """The tensors that `index_faults` examines."""
    return [name for node in graph.nodes if ops.get(node.op).chooses for name in node.inputs]


def index_faults(graph: Graph, constants: Constants, env: Mapping[str, Array]) -> dict[str, jax.Array]:
    """Per node that selects by indices: int32, how many indices are out of range. env: see `chosen_by`."""
    found: dict[str, jax.Array] = {}
    for node in graph.nodes:
        if not ops.get(node.op).chooses:
            continue
        arguments = [jnp.asarray(env[name]) for name in node.inputs]
        count = ops.get(node.op).misplaced(attributes(graph, node), constants[node.name], arguments)
        if count is not None:
            found[node.name] = count
    return found


def code_faults(graph: Graph, inputs: Sequence[Array], kept: Collection[str]) -> dict[str, jax.Array]:
    """Per input that consists of codes (`kept`): int32, how many of them are outside the range of its bits."""
    found: dict[str, jax.Array] = {}
    for name, x in zip(graph.inputs, inputs, strict=True):
        q = graph.tensors[name].quantization
        if name in kept and q is not None and (q.qmin, q.qmax) != (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max):
            found[name] = jnp.sum((x < q.qmin) | (x > q.qmax), dtype=jnp.int32)
    return found


def refuse(
    graph: Graph, inputs: Mapping[str, Any], indices: Mapping[str, Any], codes: Mapping[str, Any] | None = None
) -> None:
    """Raise a ValueError for anything that the functions above counted; tracers are not checked."""
    for name, counts in inputs.items():
        if not isinstance(counts, Tracer) and np.any(nan_inf := np.asarray(counts)):
            raise ValueError(
                f"Input {name!r}: expected finite numbers, got {nan_inf[0]} NaN and {nan_inf[1]} infinite. {_CURE}"
            )
    for name, count in (codes or {}).items():
        if not isinstance(count, Tracer) and int(count):
            q = graph.tensors[name].quantization
            assert q is not None
            raise ValueError(
                f"The state's part {name!r}: expected codes in [{q.qmin}, {q.qmax}], got {int(count)} others. "
                "graph.state(values) makes codes from floats."
            )
    for name, count in indices.items():
        if not isinstance(count, Tracer) and int(count):
            location = next(node.location for node in graph.nodes if node.name == name)
            place = f" ({location})" if location else ""
            raise ValueError(f"Node {name!r}{place}: {int(count)} indices are out of range. {_INDICES}")
