"""Runs a graph as one jitted function of integers."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.graph.ir import Array, Graph, Tensor
from qjax.graph.kernels import Constants, alive, forks, prepare, run_node
from qjax.numerics.fence import computed_once
from qjax.numerics.meshes import along_batch, in_automatic
from qjax.run import loop_execution
from qjax.run.find_loops import over_iterations, repeats
from qjax.run.shared_constants import SharedConstants
from qjax.support.batches import WITHOUT_LABELS

# ----------------------------------------------------------------------------------------------------------------------
# Keeps a graph's constants on the devices that compute with them: they are moved once, not with every call.
#
# A conversion in a process with an accelerator still computes on the CPU, so the constants are first made there.


class Near:
    """The constants on each device on which they were needed."""

    def __init__(self, constants: SharedConstants) -> None:
        # Results computed from arrays of one device are committed to it, and jit would then compute there.
        self._first = jax.device_put(jax.tree.map(lambda x: np.asarray(x) if _bound(x) else x, constants))
        self._on: dict[Any, SharedConstants] = {}
        leaves = jax.tree.leaves(self._first)
        self._fixed = any(isinstance(x, Tracer) or not x.is_fully_addressable for x in leaves)

    def to(self, inputs: Sequence[Any]) -> SharedConstants:
        """The constants on the device where `jax.jit` computes with these inputs.

        Inputs on several devices get the constants that were made first, which `jax.jit` then moves itself.
        """
        device = None if self._fixed else device_of(inputs)
        if device is None:
            return self._first
        if device not in self._on:
            self._on[device] = self._move_to(device)
        return self._on[device]

    def _move_to(self, device: Any) -> SharedConstants:
        leaves, structure = jax.tree.flatten(self._first)
        # Evaluate now even inside a trace, because the copies would otherwise be values of that trace only.
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            moved = [x if x.devices() == {device} else jax.device_put(np.asarray(x)) for x in leaves]
        return jax.tree.unflatten(structure, moved)


def device_of(inputs: Sequence[Any]) -> Any:
    """The device on which `jax.jit` computes with these inputs: theirs, or the default one; None for several."""
    for x in jax.tree.leaves(list(inputs)):
        if _bound(x):
            devices = x.devices()
            return next(iter(devices)) if len(devices) == 1 else None
    default: Any = jax.config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default


def _bound(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable and x.committed


def run(graph: Graph, constants: Constants, inputs: Sequence[Array]) -> dict[str, Array]:
    """Run all nodes one after another; returns every tensor by name. Pure JAX: may be traced, jitted, batched."""
    return in_automatic(lambda *args: _run(graph, *args), (constants, list(inputs)), along_batch(inputs))


def _run(graph: Graph, constants: Constants, inputs: Sequence[Array]) -> dict[str, Array]:
    env: dict[str, Array] = dict(zip(graph.inputs, inputs, strict=True))
    env |= graph.data()
    living, forked = alive(constants), forks(graph)
    for node in graph.nodes:
        arguments = [jnp.asarray(env[name]) for name in node.inputs]
        codes = run_node(graph, node, constants[node.name], arguments)
        env[node.output] = codes if living is None or node.output not in forked else computed_once(living, codes)
    return env


class Interpreter:
    """A program as a jitted function from codes to codes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        constants = prepare(graph)
        self.loops = repeats(graph, constants)
        self._near = Near(SharedConstants.of(constants, over_iterations(graph, self.loops)))
        self._jitted = jax.jit(self.outputs)

    @property
    def constants(self) -> SharedConstants:
        """The constants that the functions below take in addition to their inputs, on the default device."""
        return self.constants_near(())

    def constants_near(self, inputs: Sequence[Any]) -> SharedConstants:
        """The same constants on the device where `jax.jit` computes with these inputs."""
        return self._near.to(inputs)

    def outputs(self, constants: SharedConstants, inputs: Sequence[Array]) -> list[Any]:
        """The integer function itself, for use inside another trace."""

        def run(constants: SharedConstants, inputs: Sequence[Array]) -> list[Any]:
            env = self.tensors(constants, inputs, self.graph.outputs)
            return [env[name] for name in self.graph.outputs]

        return in_automatic(run, (constants, inputs), along_batch(inputs))

    def tensors(
        self, constants: SharedConstants, inputs: Sequence[Array], wanted: Collection[str]
    ) -> dict[str, jax.Array]:
        """The wanted tensors by name; loops run as loops."""
        return loop_execution.outputs(self.graph, self.loops, constants, inputs, wanted)

    def __call__(self, *inputs: Any) -> list[jax.Array]:
        """Codes in the order of `graph.inputs`; their dtypes and shapes are checked, never cast."""
        arrays = self.checked(inputs)
        return self._jitted(self.constants_near(arrays), arrays)

    def jaxpr(self, *inputs: Any) -> Any:
        """The jaxpr of the integer function, for inspection."""
        return jax.make_jaxpr(self.outputs)(self.constants, self.checked(inputs))

    def checked(self, inputs: Sequence[Array]) -> list[Any]:
        """The inputs as arrays; raises an error that describes what the graph expects."""
        graph = self.graph
        check_count(graph, inputs)
        arrays = list(inputs)
        for name, array in zip(graph.inputs, arrays, strict=True):
            tensor = graph.tensors[name]
            dtype = str(getattr(array, "dtype", type(array).__name__))
            if dtype != tensor.dtype:
                raise TypeError(
                    f"Input {name!r}: expected codes of dtype {tensor.dtype}, got {dtype}. "
                    "graph.quantize(x) makes codes from floats."
                )
        check_shapes(graph, [tuple(array.shape) for array in arrays])
        for name, array in zip(graph.inputs, arrays, strict=True):
            _check_codes(graph.tensors[name], array)
        return arrays


def _check_codes(tensor: Tensor, array: Any) -> None:
    """Raise for codes outside the range of the input's bits; a traced array cannot be checked."""
    q, limits = tensor.quantization, np.iinfo(tensor.dtype) if tensor.quantization is not None else None
    if q is None or limits is None or isinstance(array, Tracer) or np.size(array) == 0:
        return
    if q.qmin <= limits.min and q.qmax >= limits.max:
        return  # every value of the dtype is a code
    # Use numpy, because within a trace JAX would delay even the computation with a constant.
    values = np.asarray(array)
    low, high = int(values.min()), int(values.max())
    if low < q.qmin or high > q.qmax:
        raise ValueError(
            f"Input {tensor.name!r}: expected codes in [{q.qmin}, {q.qmax}], got codes in [{low}, {high}]. "
            "graph.quantize(x) makes codes from floats."
        )


def each(codes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of a call that passes them one by one, or in one tuple, as `IntegerGraph.quantize` returns them."""
    return codes[0] if len(codes) == 1 and isinstance(codes[0], tuple) else codes


def check_count(graph: Graph, inputs: Sequence[Array]) -> None:
    """Raise unless there is one value per input of the graph."""
    if len(inputs) != len(graph.inputs):
        raise TypeError(
            f"The graph takes {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), got {len(inputs)}. Pass one "
            f"array for each. {WITHOUT_LABELS}"
        )


def check_shapes(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the shapes are those of the graph's inputs, with one batch size."""
    sizes: set[int] = set()
    for name, shape in zip(graph.inputs, shapes, strict=True):
        expected = graph.tensors[name].shape
        check_shape(name, expected, shape)
        sizes |= {size for wanted, size in zip(expected, shape, strict=True) if wanted is None}
    if len(sizes) > 1:
        raise ValueError(f"The inputs: expected one batch size, got the sizes {sorted(sizes)}.")


def check_shape(name: str, expected: tuple[int | None, ...], shape: tuple[int, ...]) -> None:
    """Raise unless the shape is that of an input; None is the batch."""
    if len(shape) != len(expected) or any(e is not None and e != s for e, s in zip(expected, shape, strict=True)):
        wanted = "(" + ", ".join("batch" if e is None else str(e) for e in expected) + ")"
        raise ValueError(f"Input {name!r}: expected shape {wanted}, got {shape}.")
