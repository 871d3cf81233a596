"""The traced model as a flat list of equations: calls are inlined, and scopes and source lines are attached.

    jaxpr      pjit[f] x, with f = { a: mul x 2.0; b: tanh a }
    Program    mul x 2.0 (scope "mlp", "model.py:12"); tanh a (scope "mlp", "model.py:12")

A jaxpr nests `jit`, custom derivatives, `remat` and `scan`. They are opened here once, for the annotator, the
evaluation and the lowering. Calls like `jit` are inlined. `remat` and `scan` keep their body, because evaluation must
have the same memory behaviour as the model.
"""

import dataclasses
import enum
import functools
import importlib.util
import os
import re
import sysconfig
import traceback as traceback_lines
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh, use_abstract_mesh

from qjax.numerics.meshes import automatic_view, mesh_of, spec_of, typed, untyped, varying_alike, varying_as
from qjax.tracing import example_loops, guards, single_device_shard_map
from qjax.tracing.fixed_trip_loops import scanned
from qjax.tracing.loop_params import with_counts

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
# jax and flax may be installed elsewhere: on PYTHONPATH, or with --target
_FLAX = [os.path.dirname(spec.origin) for spec in [importlib.util.find_spec("flax")] if spec and spec.origin]
_LIBRARIES = (*(os.path.abspath(path) + os.sep for path in (*_FOLDERS, _HERE, *_FLAX)), _JAX)

SCOPE = "@"
"""Marks a module's path among the names of `jax.named_scope`: "@blocks.0.conv1"."""

NAMED = "+"
"""Follows a marked path to which the names of `jax.named_scope` within it belong as well: "@net+"."""

_NAME = re.compile(r"[\w.~#-]+")
"""Names that a user may choose; JAX's own, such as the subscripts of einsum, contain other characters."""

ATOMIC = frozenset(
    """celu elu erf gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax logsumexp
    mish selu sigmoid silu soft_sign softmax softplus sparse_plus squareplus standardize swish tanh""".split()  # noqa: SIM905
)
"""Functions of `jax.nn` that are treated as one function of real numbers and never quantized inside."""

_SEARCHES = frozenset({"digitize", "interp", "searchsorted"})
"""Functions of `jax.numpy` that search a sorted array. They are not inlined, so that messages can name them."""

WRITTEN_ANEW = frozenset({"copysign", "hypot", "signbit"})
"""Functions of `jax.numpy` whose own equations do not work on codes, see `rewrites.open_calls`."""

_WHOLE = ATOMIC | _SEARCHES | WRITTEN_ANEW

IDENTITY = "identity"
"""The name of a call of a function that returns its argument."""

_CHECK = "run_time_check"
"""Represents a check among the equations until `_without_checks` knows what else was computed for it."""

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
CUSTOM = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Primitives of functions with a custom derivative, and the parameter that holds the function."""

CALLED = _CALLS | CUSTOM
"""Primitives that call a jaxpr, and the parameter that holds it."""

_MATMULS = frozenset({"dot_general", "conv_general_dilated", "qjax_layer"})


@dataclasses.dataclass(eq=False)
class Value:
    """One array of the program, compared by identity.

    constant: the data of a literal, else None. fixed: whether it is made of parameters and literals alone, as far as
    the program was told which of its inputs are parameters (see `rewrites.mark_parameters`). kind: its type in the
    user's model, if that is known.
    """

    shape: tuple[int, ...]
    dtype: Any
    constant: Any = None
    fixed: bool = False
    kind: Any = None

    @property
    def spec(self) -> PartitionSpec:
        """How explicit mesh axes split it in the user's model."""
        return spec_of(self.kind)

    @property
    def is_float(self) -> bool:
        return bool(jax.dtypes.issubdtype(self.dtype, np.floating))


@dataclasses.dataclass(eq=False)
class Equation:
    """One operation on values.

    primitive: the jaxpr primitive's name, or a name that the tracer read from a call ("relu", "softmax", a layer).
    scope: path of the module whose `__call__` ran it. location: "file:line" in the user's code, if known. body: the
    inner program of "scan" and "remat". function: the name of the function in `ATOMIC` that it is a part of.
    """

    primitive: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any]
    scope: str
    location: str | None
    source: Any
    body: "Program | None" = None
    function: str | None = None

    @property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(value.shape for value in self.inputs)

    @property
    def in_dtypes(self) -> tuple[Any, ...]:
        return tuple(value.dtype for value in self.inputs)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(value.shape for value in self.outputs)

    @property
    def out_dtypes(self) -> tuple[Any, ...]:
        return tuple(value.dtype for value in self.outputs)

    @property
    def literals(self) -> tuple[Any, ...]:
        return tuple(value.constant for value in self.inputs)

    @property
    def is_scan(self) -> bool:
        """Whether it runs its body once for each row of its inputs; the only other equation with a body is "remat"."""
        return self.primitive == "scan"

    @property
    def where(self) -> str:
        """The user's line and module, for error messages."""
        module = f" in module {self.scope!r}" if self.scope else ""
        return f"{self.location or 'unknown line'}{module}"

    @property
    def fixed(self) -> tuple[bool, ...]:
        """Per input: whether it is made of parameters and literals alone."""
        return tuple(value.fixed or value.constant is not None for value in self.inputs)

    def bind(self, *args: Any) -> list[Any]:
        """Run the equation as JAX would, on arrays (other float dtypes of the same shapes are allowed)."""
        if isinstance(self.source, Composite):
            return self.source.bind(args)
        return bind_equation(self.source, args)


@dataclasses.dataclass(eq=False)
class Program:
    """Equations in execution order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    equations: tuple[Equation, ...]

    @functools.cached_property
    def forks(self) -> frozenset[Value]:
        """The values that several equations read, for example where a residual branch leaves the stream."""
        readers = Counter(value for eqn in self.equations for value in set(eqn.inputs))
        readers.update(set(self.outputs))
        return frozenset(value for value, count in readers.items() if count > 1)

    def walk(self) -> Iterator[Equation]:
        """Every equation in order, including those of bodies."""
        for eqn in self.equations:
            yield eqn
            if eqn.body is not None:
                yield from eqn.body.walk()


@dataclasses.dataclass(frozen=True, eq=False)
class Composite:
    """The source of an equation that replaces a group: the group's equations, inputs and outputs."""

    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def bind(self, args: Sequence[Any]) -> list[Any]:
        """Run the group's equations one after the other."""
        env: dict[Value, Any] = dict(zip(self.inputs, args, strict=True))
        for eqn in self.equations:
            # a literal input of the group may be replaced by its codes
            given = [env.get(v, v.constant) for v in eqn.inputs]
            env.update(zip(eqn.outputs, eqn.bind(*given), strict=True))
        return [env[value] for value in self.outputs]


def bind_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Run an equation of a jaxpr; a call stays a call.

    On a mesh with explicit axes, parameters that contain types (a function, a sharding) are those of the trace.
    """
    if single_device_shard_map.is_typed(eqn):
        return single_device_shard_map.bind_untyped(eqn, args, _bind)
    mesh = None if is_plain(tuple(eqn.params.values())) else mesh_of(var.aval for var in eqn.outvars)
    if mesh is None or get_abstract_mesh() != automatic_view(mesh):
        return _bind(eqn, args)
    kinds = [var.aval for var in eqn.invars]
    own = [typed(x, spec_of(kind), mesh) if mesh_of([kind]) else x for x, kind in zip(args, kinds, strict=True)]
    with use_abstract_mesh(mesh):
        result = _bind(eqn, own)
    return untyped(result)


def _bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    kinds = [var.aval for var in eqn.invars] if hasattr(eqn, "invars") else [None] * len(args)
    args = varying_as(varying_alike(args), kinds)
    bound = eqn.primitive.get_bind_params(eqn.params)
    # up to jax 0.9 a pair (functions, parameters), later one dict
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    result = eqn.primitive.bind(*functions, *args, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, np.dtype, type)


def is_plain(value: Any) -> bool:
    """Whether equal contents mean equal values; others (a jaxpr, a function) may differ all the same."""
    return all(map(is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def from_jaxpr(closed: Any) -> Program:
    """Read a `ClosedJaxpr`."""
    return _program(closed.jaxpr, closed.consts, "")


def _program(jaxpr: Any, consts: Sequence[Any], scope: str) -> Program:
    env: dict[object, Value] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(tuple(var.aval.shape), var.aval.dtype, const)
    inputs = tuple(_new(var, env) for var in jaxpr.invars)
    equations: list[Equation] = []
    _read(jaxpr, env, scope, None, equations)
    outputs = tuple(_lookup(var, env) for var in jaxpr.outvars)
    return Program(inputs, outputs, _without_checks(equations, outputs))


def _without_checks(equations: Sequence[Equation], outputs: Sequence[Value]) -> tuple[Equation, ...]:
    """The equations without run-time checks, and without those whose results only such checks read."""
    read, checked = set(outputs), set[Value]()
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if eqn.primitive == _CHECK or (checked.intersection(eqn.outputs) and not read.intersection(eqn.outputs)):
            checked.update(eqn.inputs)
        else:
            kept.append(eqn)
            read.update(eqn.inputs)
    return tuple(reversed(kept))


def _new(var: Any, env: dict[object, Value]) -> Value:
    value = Value(tuple(var.aval.shape), var.aval.dtype, kind=var.aval)
    env[var] = value
    return value


def _lookup(var: Any, env: dict[object, Value]) -> Value:
    if hasattr(var, "val"):
        return Value(tuple(np.shape(var.val)), var.aval.dtype, np.asarray(var.val, dtype=var.aval.dtype))
    return env[var]


def _read(jaxpr: Any, env: dict[object, Value], scope: str, location: str | None, out: list[Equation]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if single_device_shard_map.hands_on(eqn):
            env.update(zip(eqn.outvars, (_lookup(var, env) for var in eqn.invars), strict=True))
            continue
        here = _scope(eqn, scope)
        line = _location(eqn) or location
        if not eqn.outvars:
            warnings.warn(
                f"{line or 'The model'}: {name} is left out of the quantized model, which calls no Python. The float "
                "model still runs it.",
                stacklevel=2,
            )
            continue
        inputs = tuple(_lookup(var, env) for var in eqn.invars)
        if (returned := guards.returned_operands(eqn)) is not None:
            warnings.warn(
                f"{line or 'The model'}: a run-time check is left out of the quantized model, which cannot raise "
                "errors. The float model still makes it.",
                stacklevel=2,
            )
            env.update(zip(eqn.outvars, (inputs[index] for index in returned), strict=True))
            out.append(Equation(_CHECK, inputs, (), eqn.params, here.lstrip(NAMED), line, eqn))
            continue
        inner = eqn.params.get(CALLED.get(name, ""))
        if inner is not None:
            called = str(eqn.params.get("name", name))
            if _is_relu(inner) and name == "custom_jvp_call":
                name = "relu"
            elif name == "custom_jvp_call" and _only_call(inner) == "relu6":
                name = "relu6"
            elif called.lstrip("_") in _WHOLE and not _contains_matmul(inner.jaxpr):
                name = called.lstrip("_")
            elif name in CUSTOM and _is_identity(inner):
                name = IDENTITY
            elif name in _CALLS or _contains_matmul(inner.jaxpr):
                _inline(inner, inputs, eqn, env, here, line, out)
                continue
        if name == "reshape" and eqn.params["dimensions"] is not None:
            _inline(_transposed_first(eqn), inputs, eqn, env, here, line, out)
            continue
        if (alone := single_device_shard_map.body_of(eqn)) is not None:
            with single_device_shard_map.inside(eqn):
                _inline(alone, inputs, eqn, env, here, line, out)
            continue
        if single_device_shard_map.is_first(eqn):
            env[eqn.outvars[0]] = Value((), np.dtype(np.int32), np.zeros((), np.int32))
            continue
        if (rows := example_loops.body_of(eqn)) is not None:
            _inline(rows, inputs, eqn, env, here, line, out)
            continue
        if name == "while" and (loop := scanned(eqn, [value.constant for value in inputs], bind_equation)) is not None:
            _inline(loop, inputs, eqn, env, here, line, out)
            continue
        if name == "convert_element_type" and inputs[0].shape == () and isinstance(inputs[0].constant, np.ndarray):
            # the cast of a literal (`jnp.pad`, `jnp.clip` make them) is a literal
            (var,) = eqn.outvars
            env[var] = Value((), var.aval.dtype, inputs[0].constant.astype(var.aval.dtype))
            continue
        body, params = None, eqn.params
        if name == "scan":
            params = with_counts(params)
            body = _program(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, here)
        elif name in ("checkpoint", "remat", "remat2"):
            name, body = "remat", _program(eqn.params["jaxpr"], (), here)
        elif name == "qjax_layer":
            name = eqn.params["layer"].op
        outputs = tuple(_new(var, env) for var in eqn.outvars)
        out.append(Equation(name, inputs, outputs, params, here.lstrip(NAMED), line, eqn, body, _function(eqn)))


def _inline(
    inner: Any,
    inputs: Sequence[Value],
    eqn: Any,
    env: dict[object, Value],
    scope: str,
    line: str | None,
    out: list[Equation],
) -> None:
    local: dict[object, Value] = dict(zip(inner.jaxpr.invars, inputs, strict=True))
    for var, const in zip(inner.jaxpr.constvars, inner.consts, strict=True):
        local[var] = Value(tuple(var.aval.shape), var.aval.dtype, const)
    _read(inner.jaxpr, local, scope, line, out)
    for outer, var in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
        env[outer] = _lookup(var, local)


def _transposed_first(eqn: Any) -> Any:
    """`lax.reshape(x, sizes, dimensions)`, which reads the axes in another order, as a transposition and a reshape."""
    order, sizes, (x,) = eqn.params["dimensions"], eqn.params["new_sizes"], eqn.invars
    return jax.make_jaxpr(lambda x: lax.reshape(lax.transpose(x, order), sizes))(x.aval)


def _is_relu(closed: Any) -> bool:
    if not closed.jaxpr.eqns:
        return False
    *marks, eqn = closed.jaxpr.eqns
    if any(one.primitive.name not in ("pvary", "convert_element_type") for one in marks):
        return False
    if eqn.primitive.name in _CALLS:
        return not marks and _is_relu(eqn.params[_CALLS[eqn.primitive.name]])
    second = eqn.invars[-1]
    for one in reversed(marks):  # within `jax.shard_map` the zero is marked as varying
        second = one.invars[0] if one.outvars[0] is second else second
    return eqn.primitive.name == "max" and hasattr(second, "val") and np.ndim(second.val) == 0 and second.val == 0


def _is_identity(closed: Any) -> bool:
    """Whether a function returns its one argument, so that only its derivative matters (a reversed gradient)."""
    return not closed.jaxpr.eqns and closed.jaxpr.outvars == closed.jaxpr.invars


def _only_call(closed: Any) -> str | None:
    """The name of the function that a wrapper calls, if it does nothing else."""
    eqns = closed.jaxpr.eqns
    return eqns[0].params.get("name") if len(eqns) == 1 else None


def _contains_matmul(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a matrix product or communicates between devices; both are read one by one."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MATMULS or single_device_shard_map.speaks(eqn):
            return True
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns") and _contains_matmul(inner):
                return True
    return False


def has_own_backward(source: Any) -> bool:
    """Whether the source of an equation calls a `jax.custom_vjp`, which has no forward-mode derivative."""
    if isinstance(source, Composite):
        return any(has_own_backward(eqn.source) for eqn in source.equations)
    if source.primitive.name in CUSTOM and source.primitive.name != "custom_jvp_call":
        return True
    inner = [getattr(param, "jaxpr", param) for param in source.params.values()]
    return any(has_own_backward(eqn) for jaxpr in inner if hasattr(jaxpr, "eqns") for eqn in jaxpr.eqns)


def _scope(eqn: Any, outer: str) -> str:
    """The path of the module around an equation, with `NAMED` in front if names within it belong to the path."""
    names = str(eqn.source_info.name_stack)
    marks = list(re.finditer(re.escape(SCOPE) + r"([^/()]*)", names))
    if marks:
        path = marks[-1][1].replace(".", "/")
        outer, names = (NAMED + path[: -len(NAMED)] if path.endswith(NAMED) else path), names[marks[-1].end() :]
    if not outer.startswith(NAMED) or not names:
        return outer
    # Transformations enclose names: "vmap(mlp)/linear".
    parts = [part for part in re.sub(r"\w+\(|\)", "", names).split("/") if _NAME.fullmatch(part)]
    return NAMED + "/".join(part for part in (outer.removeprefix(NAMED), *parts) if part)


def _function(eqn: Any) -> str | None:
    """The function of `jax.nn` that an equation belongs to: softmax and gelu are no calls, so the line decides."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    for frame in traceback.frames:
        if frame.function_name in ATOMIC and frame.file_name.startswith(_JAX):
            return frame.function_name
    return None


def _location(eqn: Any) -> str | None:
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    return next((f"{f.file_name}:{f.line_num}" for f in traceback.frames if _is_users(f.file_name)), None)


def user_line(traceback: Any) -> str | None:
    """The innermost line of a Python traceback that is in the user's own code, as "file:line"."""
    frames = traceback_lines.extract_tb(traceback)
    return next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if _is_users(f.filename)), None)


def _is_users(file_name: str) -> bool:
    return not os.path.abspath(file_name).startswith(_LIBRARIES) and not file_name.startswith("<")
