"""Backends: devices of vendors, with the subgraphs that they compute themselves, and a target for everything else.

    chip = qjax.export.Backend("chip", target, [(pattern, kernel), ...])
    graph = qjax.convert(qmodel, sample, target=chip)

A backend can be used wherever a target can: in a recipe, in `convert`, in `exact`; once registered, so can its name.
The kernel is a pure JAX function of codes. `convert`, `verify`, `exact` and the emitters all run this function, so
their results hold for the device.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import ops, targets
from qjax.assign.partition import expand, fuse_match, host
from qjax.graph.check import check_integer
from qjax.graph.ir import Array, Graph, Node
from qjax.graph.kernels import attributes, prepare
from qjax.graph.matching import Match, find
from qjax.graph.pattern import Pattern, check_root
from qjax.lower import ConversionError
from qjax.ops.backend import Kernel, compose, register_kernels
from qjax.ops.formulas import check_target

Prepare = Callable[[Match], Mapping[str, Array]]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One pattern and the kernel that computes it.

    Args:
      name: how graphs refer to the kernel.
      pattern: see `qjax.graph.pattern`.
      kernel: (inputs, node) -> codes of the node's dtype and range. inputs: codes, in the order of the pattern's
        tensors. node: an `ops.backend.Fused`: `node["conv"].attributes`, `.constants["kernel"]`, and
        `node.constants`. Pure JAX without floats; `compose` runs the members' own kernels.
      prepare: match -> int arrays by role, which the kernel finds in `node.constants`. Only this function sees scales.
        It runs on the host and inside jit and must compute the same bits, so use `qjax.numerics`
        (`effective_scale`, `quantize_multiplier`) instead of floats. None: no constants.

    Examples:
      ```python
      from qjax.export import Fusion, compose, op, tensor

      fusion = Fusion("linear_relu", op("dot", tensor("x"), relu=True), compose)
      ```
    """

    name: str
    pattern: Pattern
    kernel: Kernel
    prepare: Prepare | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """A device of a vendor.

    Args:
      name: how graphs and recipes refer to it. Include a version, because a name stands for one arithmetic.
      target: the rounding of the nodes that no pattern matches; also how inputs are quantized.
      patterns: fusions, or pairs (pattern, kernel), which are named after the kernel. Earlier ones claim nodes first;
        `qjax.graph.matching` describes how overlapping matches are resolved.
      others: the operations that nodes outside all patterns may have; None is any. Others are refused, with the user's
        line.

    Examples:
      ```python
      from qjax.export import Backend, Fusion, compose, op

      device = Backend("my_device", "tflite_micro", [Fusion("linear", op("dot"), compose)])
      on_device = qjax.convert(qmodel, x, target=device)
      ```
    """

    name: str
    target: str | targets.Target
    patterns: Sequence[Fusion | tuple[Pattern, Kernel]] = ()
    others: Collection[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"Backend: expected a name, got {self.name!r}.")
        check_target(targets.get(self.target))
        object.__setattr__(self, "patterns", tuple(_fusion(self.name, entry) for entry in self.patterns))
        names = [fusion.name for fusion in self.fusions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"Backend {self.name!r}: two patterns are named {', '.join(twice)}. Name them: Fusion(name, ...)."
            )
        unknown = set(self.others or ()) - set(ops.names())
        if unknown:
            raise ValueError(
                f"Backend {self.name!r}: others may hold {', '.join(ops.names())}; got {', '.join(sorted(unknown))}."
            )

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """The patterns with their kernels, in order."""
        return tuple(entry for entry in self.patterns if isinstance(entry, Fusion))

    def matches(self, graph: Any) -> list[tuple[Fusion, Match]]:
        """The matches of the device's patterns in a graph."""
        ir: Graph = getattr(graph, "ir", graph)
        return [(self.fusions[i], m) for i, m in find(ir, [fusion.pattern for fusion in self.fusions])]

    def partition(self, graph: Graph) -> Graph:
        """Replace every match by one node of this backend; registers the backend.

        Raises:
          ConversionError: a node is neither matched nor allowed by `others`.
          TypeError, ValueError: a kernel does not return codes of the stated dtype, shape and range, or computes in
            floats; a `prepare` does not return int arrays; another backend has this name.
        """
        register_backend(self)
        check_integer(graph)
        found = self.matches(graph)
        for fusion, one in found:
            graph = fuse_match(graph, one, self.name, fusion.name, _prepare_constants(self.name, fusion, one))
        own = {one.root.name for _, one in found}
        for node in graph.nodes:
            if node.name not in own and self.others is not None and node.op not in self.others:
                raise ConversionError(
                    f"backend {self.name!r} has no pattern for {node.name!r} ({node.op}), and its "
                    f"`others` allow {', '.join(self.others) or 'no operation'}. Patterns: "
                    f"{', '.join(fusion.name for fusion in self.fusions)}.",
                    where=node.location,
                )
        constants = prepare(check_integer(graph))
        for node in graph.nodes:
            if node.name in own:
                _check_kernel(graph, node, constants[node.name])
        return graph


def _fusion(backend: str, entry: Any) -> Fusion:
    if isinstance(entry, tuple) and len(entry) == 2:  # pyright: ignore[reportUnknownArgumentType]
        entry = Fusion(getattr(entry[1], "__name__", "kernel"), entry[0], entry[1])
    if not isinstance(entry, Fusion):
        raise TypeError(f"Backend {backend!r}: expected a Fusion or (pattern, kernel), got {type(entry).__name__}.")
    check_root(entry.pattern, f"Backend {backend!r}, {entry.name!r}")
    if not callable(entry.kernel):
        raise TypeError(f"Backend {backend!r}, {entry.name!r}: expected a function, got {entry.kernel!r}.")
    return entry


# ---------------------------------------------------------------------------- by name

_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> Backend:
    """Register a backend by its name, so that graphs with its nodes can be loaded and run.

    Args:
      backend: the backend.

    Raises:
      ValueError: another backend, or a target, has this name.

    Examples:
      ```python
      from qjax.export import Backend, Fusion, compose, op, register_backend

      register_backend(
          Backend("registered_device", "tflite_micro", [Fusion("linear", op("dot"), compose)])
      )
      ```
    """
    if backend.name in targets.names():
        raise ValueError(f"Backend {backend.name!r}: a target has this name; choose another.")
    known = _backends.get(backend.name, backend)
    if (known.fusions, known.target, known.others) != (backend.fusions, backend.target, backend.others):
        raise ValueError(
            f"Another backend is registered under the name {backend.name!r}. Graphs that were made with it refer to "
            "it by this name, so choose another name for the new one, for instance with a version in it."
        )
    target = targets.get(backend.target)
    targets.register(target)
    register_kernels(backend.name, {fusion.name: fusion.kernel for fusion in backend.fusions})
    return _backends.setdefault(backend.name, backend)


def backend_of(target: str | targets.Target | Backend) -> Backend | None:
    """The backend to which a target argument refers; None for a target."""
    return _backends.get(target) if isinstance(target, str) else target if isinstance(target, Backend) else None


def target_of(target: str | targets.Target | Backend) -> targets.Target:
    """The target to which a target argument refers; for a backend, its own target."""
    backend = backend_of(target)
    if backend is not None:
        return targets.get(backend.target)
    assert not isinstance(target, Backend)
    try:
        return targets.get(target)
    except ValueError as error:
        known = ", ".join(sorted(_backends))
        raise ValueError(f"{error} Registered backends: {known}." if known else str(error)) from None


# ---------------------------------------------------------------------------- checks at partition time


def _prepare_constants(backend: str, fusion: Fusion, found: Match) -> dict[str, Array]:
    if fusion.prepare is None:
        return {}
    where = f"Backend {backend!r}, {fusion.name!r}: prepare"
    made = fusion.prepare(found)
    if not isinstance(made, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{where}: expected int arrays by role, got {type(made).__name__}.")
    constants: dict[str, Array] = {}
    for role, value in made.items():
        if "/" in role or role.startswith(("zero_point", "y_zero_point")):
            raise ValueError(f"{where}: expected a role without '/' that is not a zero point's, got {role!r}.")
        array = host(value)
        if str(array.dtype) not in ("int8", "uint8", "int16", "uint16", "int32"):
            raise TypeError(
                f"{where}: expected integers of at most 32 bits in {role!r}, got {array.dtype}. Floats end here: see "
                "qjax.numerics.effective_scale and quantize_multiplier."
            )
        constants[role] = array
    return constants


@functools.lru_cache(maxsize=256)
def _trace_kernel(known: str, constants: tuple[tuple[str, Any], ...], inputs: tuple[Any, ...]) -> Any:
    """The jaxpr of a node's kernel: shapes, dtypes and primitives, without values."""
    facts = json.loads(known)
    return jax.make_jaxpr(lambda c, i: ops.get("backend").kernel(facts, c, i))(dict(constants), list(inputs))


@functools.lru_cache(maxsize=256)
def _jit_kernel(known: str) -> Any:
    facts = json.loads(known)
    return jax.jit(lambda c, i: ops.get("backend").kernel(facts, c, i))


def _check_kernel(graph: Graph, node: Node, constants: Mapping[str, Any]) -> None:
    """Check dtype, shape at two batch sizes and the absence of floats abstractly, and the range on extreme codes."""
    where = f"Backend {node.attributes['backend']!r}, pattern {node.attributes['pattern']!r} at {node.name!r}"
    known = json.dumps(attributes(graph, node), sort_keys=True)
    shapes = tuple((role, jax.ShapeDtypeStruct(np.shape(v), v.dtype)) for role, v in sorted(constants.items()))
    inputs = [graph.tensors[name] for name in node.inputs]
    output = graph.tensors[node.output]
    for batch in (1, 3):
        sizes = [tuple(batch if n is None else n for n in tensor.shape) for tensor in inputs]
        codes = tuple(jax.ShapeDtypeStruct(s, t.dtype) for s, t in zip(sizes, inputs, strict=True))
        closed = _trace_kernel(known, shapes, codes)
        wanted = tuple(batch if n is None else n for n in output.shape)
        if tuple(closed.out_avals[0].shape) != wanted:
            raise ValueError(
                f"{where}: for a batch of {batch} expected codes of shape {wanted}, got {closed.out_avals[0].shape}."
            )
        floats = next((eqn.primitive.name for eqn in _equations(closed.jaxpr) if _is_float(eqn)), None)
        if floats is not None:
            raise TypeError(
                f"{where}: expected integers only, got floats in {floats!r}. XLA may fuse and reorder them, so their "
                "bits may not be the device's: compute in integers, or emulate with qjax.numerics.float32."
            )
    q = output.quantization
    if q is None or any(isinstance(value, Tracer) for value in constants.values()):
        return
    for codes in _extremes(inputs):
        got = np.asarray(_jit_kernel(known)(dict(constants), codes))
        low, high = int(got.min(initial=q.qmax)), int(got.max(initial=q.qmin))
        if low < q.qmin or high > q.qmax:
            raise ValueError(
                f"{where}: expected codes within [{q.qmin}, {q.qmax}], got [{low}, {high}]. Clamp to node.qmin and "
                "node.qmax at the end of the kernel."
            )


def _extremes(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Codes that drive sums to their extremes, and random ones, in a batch of 3."""
    rng = np.random.default_rng(0)
    ends: list[list[Any]] = []
    for tensor in inputs:
        shape = tuple(3 if n is None else n for n in tensor.shape)
        if (q := tensor.quantization) is not None:
            low, high = q.qmin, q.qmax
        elif tensor.dtype == "bool":
            low, high = 0, 1
        else:
            low, high = int(np.iinfo(tensor.dtype).min), int(np.iinfo(tensor.dtype).max)
        if tensor.value is not None:
            ends.append([jnp.asarray(tensor.value)] * 3)
            continue
        full = [np.full(shape, low), np.full(shape, high), rng.integers(low, high, shape, endpoint=True)]
        ends.append([jnp.asarray(codes.astype(tensor.dtype)) for codes in full])
    if len(inputs) <= 2:
        yield from (list(codes) for codes in itertools.product(*ends))
    else:
        yield from (list(codes) for codes in zip(*ends, strict=True))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        inner = [
            sub for value in eqn.params.values() for sub in (value if isinstance(value, (list, tuple)) else [value])
        ]
        inner = [getattr(sub, "jaxpr", sub) for sub in inner]
        inner = [sub for sub in inner if hasattr(sub, "eqns")]
        if inner:
            for sub in inner:
                yield from _equations(sub)
        else:
            yield eqn


def _is_float(eqn: Any) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars if hasattr(v.aval, "dtype"))


__all__ = [
    "Backend",
    "Fusion",
    "backend_of",
    "compose",
    "expand",
    "register_backend",
    "target_of",
]
