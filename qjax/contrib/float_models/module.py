"""The module that a float file becomes: the file's weights as variables, and a call that evaluates its nodes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.contrib.float_models.evaluator import Shapes, device, evaluate
from qjax.contrib.float_models.graph import FREE_BATCH, FloatGraph, Port
from qjax.export.integer_graph import IntegerGraph
from qjax.layers.function import put
from qjax.support.batches import brief
from qjax.support.errors import Unsupported
from qjax.support.names import lengthened
from qjax.tracing import NAMED, SCOPE


@dataclasses.dataclass(eq=False)
class File:
    """The static side of a module, compared by identity.

    parameters: name in the file -> path of the variable. exported: shapes at the file's batch, for shapes of calls.
    """

    graph: FloatGraph
    parameters: Mapping[str, tuple[str, ...]]
    exported: dict[Any, Shapes] = dataclasses.field(default_factory=dict[Any, Shapes])


class FileVariables(nnx.Module):
    """The variables of one part of the file's names, and of the parts below it."""


class FileModule(FileVariables):
    """The module that `from_onnx` and `from_tflite` return.

    Attributes:
      parameter_names: name of a weight in the file -> path of its variable in the module, with dots.
      input_names, output_names: of the model, in the order of the call and of the result.
    """

    def __init__(self, file: File) -> None:
        self.qjax_file = file
        self.deterministic = True

    @property
    def parameter_names(self) -> dict[str, str]:
        """Name of a weight in the file -> path of its variable, with dots."""
        return {name: ".".join(place) for name, place in self.qjax_file.parameters.items()}

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The arguments, as the file describes them."""
        return self.qjax_file.graph.inputs

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """The names of the results in JAX's order of leaves: that of a dict's keys."""
        names = self.output_names
        return tuple(sorted(names)) if len(names) > 1 else names

    def with_file_names(self, graph: IntegerGraph) -> IntegerGraph:
        """A graph of this module under the file's names of inputs and outputs, if no other tensor has them.

        Emitted files then have these names. `qjax.verify` compares the graph under its own names.
        """
        ir = graph.ir
        wanted = dict(zip(ir.inputs, self.input_names, strict=False))
        if ir.call is not None:
            leaves = zip(self.leaf_names, ir.call.leaves, strict=True)
            wanted = {**{ir.outputs[leaf]: name for name, leaf in leaves if isinstance(leaf, int)}, **wanted}
        taken = {*ir.tensors, *(ir.quantized.tensors if ir.quantized is not None else ())}
        names: dict[str, str] = {}
        for old, name in wanted.items():
            if name not in taken:
                names[old] = name
                taken.add(name)
        from qjax.contrib.importers.onnx.hints import Hints, annotated  # loads the package onnx

        return IntegerGraph(annotated(ir, Hints(names=names)))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(port.name for port in self.qjax_file.graph.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(port.name for port in self.qjax_file.graph.outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self.qjax_file.graph
        given = self._arguments(args, kwargs)
        values = {name: self._variable(place)[...] for name, place in self.qjax_file.parameters.items()}
        exported = self._exported(given, values)
        updates: dict[str, Any] | None = None if self.deterministic else {}
        with jax.named_scope(f"{SCOPE}{getattr(self, 'qjax_path', '')}{NAMED}"):
            found = evaluate(graph, {**values, **given}, exported, updates=updates)
        if exported is not None and exported[""] == tuple(np.shape(value) for value in found):
            fixed = next(port.dims[0] for port in graph.inputs if port.dims)
            raise Unsupported(
                f"the file fixes the batch at {fixed}, in a way that does not follow the batch of this call",
                FREE_BATCH,
            )
        for name, value in (updates or {}).items():
            if name in self.qjax_file.parameters:
                self._variable(self.qjax_file.parameters[name])[...] = value
        if len(found) == 1:
            return found[0]
        return dict(zip(self.output_names, found, strict=True))

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        ports, names = self.qjax_file.graph.inputs, self.input_names
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            args, kwargs = (), args[0]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(given) != set(names) or len(args) + len(kwargs) != len(given):
            wanted = ", ".join(map(_port_text, ports)) or "no input"
            got = ", ".join([*(brief(arg) for arg in args), *(f"{name}={brief(v)}" for name, v in kwargs.items())])
            raise TypeError(f"the model takes {wanted}; got {got or 'nothing'}.")
        sizes: dict[str, int] = {}
        return {port.name: _checked(port, given[port.name], sizes) for port in ports}

    def _exported(self, given: Mapping[str, Any], values: Mapping[str, Any]) -> Shapes | None:
        """The shapes of all nodes at the file's batch, if the file fixes one and this call has another."""
        graph = self.qjax_file.graph
        fixed = {port.name: port.dims for port in graph.inputs if port.dims and port.dims[0] is not None}
        if all(np.shape(given[name])[0] == dims[0] for name, dims in fixed.items()):
            return None
        key = tuple(np.shape(value) for value in given.values())
        if key not in self.qjax_file.exported:
            record: Shapes = {}
            small = {
                name: jax.ShapeDtypeStruct((*fixed[name][:1], *np.shape(v)[1:]), v.dtype) if name in fixed else v
                for name, v in given.items()
            }

            def run(small: Any, values: Any) -> Any:
                return evaluate(graph, {**values, **small}, record=record)

            jax.eval_shape(run, small, dict(values))
            self.qjax_file.exported[key] = record
        return self.qjax_file.exported[key]

    def _variable(self, place: tuple[str, ...]) -> Any:
        return functools.reduce(getattr, place, self)


def _port_text(port: Port) -> str:
    dims = (
        "any shape"
        if port.dims is None
        else "x".join("any" if n is None else str(n) for n in port.dims) or "one number"
    )
    return f"{port.name} ({port.dtype}, {dims})"


def _checked(port: Port, value: Any, sizes: dict[str, int]) -> Any:
    """An argument of the model, checked; floats become arrays of JAX, known integers stay NumPy's."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"input {port.name!r}: expected an array, got {brief(value)}.")
    kinds = {port.dtype, {"int64": "int32", "uint64": "uint32"}.get(port.dtype, port.dtype)}
    if value.dtype.name not in kinds:
        raise TypeError(
            f"input {port.name!r}: expected {port.dtype}, got {value.dtype}: x.astype(np.{port.dtype}) if that is what "
            "you mean."
        )
    if port.dims is not None:
        # The batch, the first axis, may always have another size than in the file.
        fits = len(port.dims) == np.ndim(value) and all(
            i == 0 or n is None or n == m for i, (n, m) in enumerate(zip(port.dims, np.shape(value), strict=True))
        )
        if not fits:
            raise ValueError(f"expected {_port_text(port)}, got an array of shape {list(np.shape(value))}.")
    if isinstance(value, (np.ndarray, np.generic)):
        ready = device(np.asarray(value), f"input {port.name!r}")
        return jnp.asarray(ready) if jnp.issubdtype(ready.dtype, jnp.floating) else np.asarray(value)
    return value


_RESERVED = frozenset(dir(FileModule)) | {"deterministic", "qjax_file", "qjax_path"}
"""Attributes of the module itself, which weights may not overwrite."""


def module_of(graph: FloatGraph, statistics: frozenset[str]) -> FileModule:
    """The module of a graph; statistics: the parameters that are moving statistics of norms."""
    places: dict[str, tuple[str, ...]] = {}
    taken: set[tuple[str, ...]] = set()
    folders: set[tuple[str, ...]] = set()
    for name in graph.parameters:
        place: tuple[str, ...] = ()
        words = path_of(name)
        for depth, word in enumerate(words):
            last = depth == len(words) - 1
            while word in _RESERVED or (*place, word) in taken or (last and (*place, word) in folders):
                word = lengthened(word, {word})
            place = (*place, word)
            if not last:
                folders.add(place)
        taken.add(place)
        places[name] = place
    module = FileModule(File(graph, places))
    for name, place in places.items():
        kind = nnx.BatchStat if name in statistics else nnx.Param
        put(module, place, kind(jnp.asarray(graph.parameters[name])), FileVariables)
    # The variables hold the weights now, so the graph keeps no second copy of them.
    module.qjax_file.graph = dataclasses.replace(graph, parameters={})
    return module


def path_of(name: str) -> tuple[str, ...]:
    """A path for a weight's name: "/" and "." separate its parts, other characters than letters become "_"."""
    import re

    # TFLite joins the names of what its converter fused.
    name = name.split(";")[0]
    words = [re.sub(r"\W+", "_", word).strip("_") for word in re.split(r"[./:]+", name)]
    return tuple(word for word in words if word) or ("weight",)


__all__ = ["FileModule", "Unsupported", "module_of"]
