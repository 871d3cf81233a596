"""Traces an instrumented module with its arguments, and returns the program that the other stages read."""

import dataclasses
import inspect
import os
import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.layers.arguments import by_position, with_keywords
from qjax.layers.frozen import frozen_parameters, put_back, replace_all
from qjax.layers.static_key import MayChangeError, key
from qjax.numerics.meshes import automatic, explicit_mesh, with_batch
from qjax.support.batches import as_array, brief
from qjax.support.errors import Unsupported
from qjax.tracing import Program, Value, example_loops, from_jaxpr, rewrite, user_line


class TraceError(Unsupported):
    """The model cannot be traced, because it fails on these arguments or its structure depends on numbers.

    Examples:
      ```python
      try:
          qjax.explain(model, x[:, :3])  # the first layer takes 8 features
      except qjax.TraceError as error:
          print(error)
      ```
    """


_DEPENDS_ON_DATA = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of JAX for a branch, a shape or a conversion that needs a number which is only known at run time."""


_USERS = (TypeError, ValueError, AttributeError, KeyError, IndexError)
"""Errors that a model raises for arguments that it was not written for."""

_OF_KERAS = "Exception encountered when calling"
"""How Keras begins an error of a layer; Keras removes its own frames from the traceback of such an error."""

_MANY = 32
_calls: dict[Hashable, Callable[..., Any]] = {}
"""The most recent calls by key, oldest first; JAX keeps the traces of a function for as long as the function lives."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclasses.dataclass(eq=False)
class Traced:
    """A module's call as a program, with what is needed to run it and to interpret its results.

    read: the program before any rewriting. names: per program input, the path of the state or the name of the model's
    input. constant: per program input, whether it is state. args: the concrete inputs in the program's order.
    aliases: per input of the model, the name of the argument that holds it. adapters: the inputs that are adapters
    (`nnx.LoRAParam`).
    """

    program: Program
    read: Program
    names: tuple[str, ...]
    constant: tuple[bool, ...]
    args: list[Any]
    _out_tree: Any
    _state_tree: Any
    _n_state: int
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    adapters: frozenset[Value] = frozenset()

    def spellings(self, name: str) -> tuple[str, ...]:
        """The names by which a user may refer to an input, or to integers that the model computes."""
        return (name, name.removeprefix("input/"), self.aliases.get(name, name))

    def outputs(self, values: Sequence[Any]) -> Any:
        """The output in the structure that the model returns."""
        return jax.tree.unflatten(self._out_tree, values[: len(values) - self._n_state])

    @property
    def returned(self) -> Any:
        """The pytree of the model's output."""
        return self._out_tree

    @property
    def results(self) -> Program:
        """The program with the model's outputs only, without its state."""
        return dataclasses.replace(self.program, outputs=tuple(self.program.outputs[: -self._n_state or None]))

    def written(self) -> list[tuple[str, Value]]:
        """The state that the call changes: paths and new values."""
        first = len(self.program.outputs) - self._n_state
        pairs = zip(self.names, self.program.inputs, self.program.outputs[first:], strict=False)
        return [(name, new) for name, old, new in pairs if new is not old]

    def new_state(self, values: Sequence[Any]) -> Any:
        """The state after the call, reduced to what changed; None if nothing did."""
        first = len(values) - self._n_state
        leaves: list[Any] = []
        for outer, value in zip(self.program.outputs[first:], values[first:], strict=True):
            leaves.append(None if outer in self.program.inputs else value)
        if all(leaf is None for leaf in leaves):
            return None
        paths = jax.tree_util.tree_flatten_with_path(self._state_tree.unflatten(range(self._n_state)))[0]
        flat = {_keys(path): leaf for (path, _), leaf in zip(paths, leaves, strict=True) if leaf is not None}
        return flat


def trace(
    model: nnx.Module, args: Sequence[Any], kwargs: dict[str, Any], expected: str = "", *, known: bool = True
) -> Traced:
    """Trace `model(*args, **kwargs)`; arrays become inputs of the program, everything else is static.

    Args:
      expected: describes the inputs that the model is known to take, for messages.
      known: whether an earlier trace of an equal model and call may be reused. Anything that a call reads outside of
        the module, such as a global variable of a notebook, then has the value that it had before.

    Raises:
      TraceError: the model raises one of Python's common errors; or a shape or a branch depends on data.
    """
    _check_arguments(model, args, kwargs)
    args, kwargs = by_position(model.__call__, args, kwargs)
    leaves = jax.tree.leaves((tuple(args), kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    arrays = [as_array(leaves[i]) for i in dynamic]
    labels = _labels(model, args, kwargs, dynamic)
    state = nnx.state(model)
    state_leaves, state_tree = jax.tree.flatten(state)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    adapters = {_keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.LoRAParam))[0]}
    read, shapes = _read(model, args, kwargs, dynamic, arrays, expected, known)
    out_tree = jax.tree.structure(shapes[0])
    constant = (*(True,) * len(flat), *(False,) * len(arrays))
    with automatic(explicit_mesh((state_leaves, arrays))):
        program = rewrite(read, constant)
    for before, after in zip(read.outputs, program.outputs, strict=True):
        after.kind = before.kind
    inputs = zip(program.inputs, flat, strict=False)
    return Traced(
        program=program,
        read=read,
        names=(*("/".join(_variable(path)) for path, _ in flat), *labels),
        constant=constant,
        args=[*state_leaves, *arrays],
        _out_tree=out_tree,
        _state_tree=state_tree,
        _n_state=len(state_leaves),
        aliases=labels,
        adapters=frozenset(value for value, (path, _) in inputs if _keys(path) in adapters),
    )


def program_of_shapes(model: nnx.Module, args: Sequence[Any], size: int) -> Program:
    """The program of a call with another batch size, as JAX records it; no array is created."""
    leaves = jax.tree.leaves((tuple(args), {}))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    arrays = [as_array(leaves[i]) for i in dynamic]
    shapes = [with_batch(x, size) for x in arrays]
    return _read(model, args, {}, dynamic, shapes, "")[0]


def _read(
    model: nnx.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic: Sequence[int],
    arrays: Sequence[Any],
    expected: str,
    known: bool = True,
) -> tuple[Program, Any]:
    """The program of a call whose arguments' leaves at `dynamic` are `arrays`, and the shapes of its results."""
    graphdef, state = nnx.split(model)
    state_leaves, state_tree = jax.tree.flatten(state)
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    static = [None if i in dynamic else leaf for i, leaf in enumerate(leaves)]
    call = _call(graphdef, state_tree, static, tree, tuple(dynamic), known)
    try:
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(state_leaves, arrays)
        loops = _loops_over_examples(call, closed, state_leaves, arrays)
    except _DEPENDS_ON_DATA as error:
        raise TraceError(_explain_jax_error(error)) from error
    except _USERS as error:
        if _raised_by_qjax(error):
            raise
        raise TraceError(_describe_failure(model, error, args, kwargs, expected)) from error
    with example_loops.opened(loops):
        return from_jaxpr(closed), shapes


def _call(
    graphdef: Any, state_tree: Any, static: list[Any], tree: Any, dynamic: tuple[int, ...], known: bool
) -> Callable[..., Any]:
    """The call as a function of the leaves of the state and of the arguments' leaves at `dynamic`.

    If `known`, equal calls share one function, so that JAX traces it once per shape: quantizing, calibrating,
    converting and verifying a model then read the same program.
    """
    try:
        own = key((graphdef, state_tree, tuple(static), tree, dynamic))
    except MayChangeError:
        own = None
    if own in _calls:
        before = _calls.pop(own)
        if known:
            _calls[own] = before  # reinsert, because the newest comes last
            return before
    state = state_tree.unflatten(range(state_tree.num_leaves))
    paths = [_keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]

    def call(state_leaves: list[Any], arrays: Sequence[Any]) -> Any:
        filled = list(static)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        copy = nnx.merge(graphdef, state_tree.unflatten(state_leaves))
        inner_args, inner_kwargs = with_keywords(copy.__call__, *tree.unflatten(filled))
        frozen = list(frozen_parameters(copy))
        replace_all(frozen)
        out = copy(*inner_args, **inner_kwargs)
        _check_result(out)
        put_back(frozen)
        return out, _state_after_call(copy, paths)

    if own is not None:
        _calls[own] = call
        while len(_calls) > _MANY:
            _calls.pop(next(iter(_calls)))
    return call


def _check_result(out: Any) -> None:
    """Raise where a model returns anything but arrays."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]:
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float)) or hasattr(leaf, "__jax_array__"):
            continue
        cure = "Leave it out, or return an array"
        if dataclasses.is_dataclass(leaf):
            cure = (
                "Return a dict of its arrays, or register the class with jax.tree_util.register_dataclass or "
                "flax.struct.dataclass"
            )
        place = f" at {jax.tree_util.keystr(path)}" if path else ""
        raise TraceError(
            f"The model returns an object of the class {type(leaf).__name__}{place}: expected arrays, or dicts, lists, "
            f"tuples and registered classes of them. {cure}."
        )


def _loops_over_examples(call: Any, closed: Any, state: list[Any], arrays: Sequence[Any]) -> list[Any]:
    """The equations of a call's jaxpr that loop over the examples, found by tracing a batch of twice the size."""
    found = example_loops.loops_of(closed)
    sizes = {x.shape[0] for x in arrays if x.ndim}
    if not found or len(sizes) != 1:
        return []
    twice = [with_batch(x, 2 * x.shape[0] if x.ndim else 1) for x in arrays]
    try:
        other = jax.make_jaxpr(call)(state, twice)
    except Exception:
        # On any exception the model accepts no other batch size, so nothing in it can follow the batch.
        return []
    return example_loops.followers(found, example_loops.loops_of(other))


def _state_after_call(model: nnx.Module, paths: Sequence[tuple[str, ...]]) -> list[Any]:
    """The state at `paths` after a call; an intermediate value that the call has added is dropped."""
    after = {_keys(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]}
    sown = {_keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Intermediate))[0]}
    if new := [path for path in after if path not in {*paths, *sown}]:
        raise TraceError(
            f"The call creates the variable {'/'.join(new[0])!r}, which the module did not have before it. Create it "
            "in __init__, and give it a value in the call; or return the value."
        )
    return [after[path] for path in paths]


def write_state(model: nnx.Module, flat: dict[tuple[str, ...], Any]) -> None:
    """Set the named variables of a module."""
    state = nnx.state(model)
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    nnx.update(model, tree.unflatten([flat.get(_keys(path), leaf) for path, leaf in paths]))


def _keys(path: Any) -> tuple[str, ...]:
    keys = list(path)
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys.pop()  # the path ends at the array inside its nnx.Variable, and a module may be called "value" too
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _variable(path: Any) -> tuple[str, ...]:
    """The path of the variable to which an array belongs."""
    keys = list(path)
    ends = [i for i, key in enumerate(keys) if isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value"]
    return _keys(keys[: ends[-1] + 1] if ends else keys)


def _labels(model: nnx.Module, args: Sequence[Any], kwargs: dict[str, Any], dynamic: Sequence[int]) -> dict[str, str]:
    """The names of the arrays of a call, each with the name of its argument in the model's `__call__`.

    Flags, None and random keys beside them change no name.
    """
    paths = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))[0]
    keys = [_keys(paths[i][0]) for i in dynamic]
    data = [own[:2] for own in keys if not _is_random(args[int(own[1])] if own[0] == "0" else kwargs[own[1]])]
    alone = all(whole == ("0", "0") for whole in data)
    named = positional(model)
    labels: dict[str, str] = {}
    for kind, argument, *rest in keys:
        whole = kind, argument
        # Parts of a single argument need no leading number.
        parts = rest if alone and whole == ("0", "0") else [argument, *rest]
        label = "input" if data == [whole] else "/".join(("input", *parts))
        name = named[int(argument)] if kind == "0" and int(argument) < len(named) else argument
        labels[label] = "/".join((name, *rest))
    return labels


def _is_random(argument: Any) -> bool:
    """Whether an argument is a key of random numbers or their source."""
    if isinstance(argument, (nnx.Rngs, nnx.RngStream)):
        return True
    return isinstance(argument, jax.Array) and jnp.issubdtype(argument.dtype, jax.dtypes.prng_key)


def _check_arguments(model: nnx.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise where the call's arguments do not fit the signature, most often because a batch holds labels too."""
    try:
        signature = inspect.signature(type(model).__call__)
    except ValueError:  # a callable without a known signature
        return
    try:
        positional, named = with_keywords(model.__call__, args, kwargs)
        signature.bind(model, *positional, **named)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise TypeError(
            f"The model's __call__ takes ({names}), got {len(args) + len(kwargs)} arguments: "
            f"{brief((*args, *kwargs.values()))}: {error}. A tuple holds the arguments of one call, including flags "
            "and None. If a batch also holds labels, pass inputs=lambda batch: batch[0]; a sample is the inputs "
            "alone."
        ) from None


def _raised_by_qjax(error: Exception) -> bool:
    """Whether the error comes from qjax itself, whose message is complete already."""
    frames = traceback.extract_tb(error.__traceback__)
    if str(error).startswith(_OF_KERAS):
        return False
    return isinstance(error, TraceError) or os.path.abspath(frames[-1].filename).startswith(_PACKAGE)


def _describe_failure(model: nnx.Module, error: Exception, args: Sequence[Any], kwargs: Any, expected: str) -> str:
    """Describe the call and the error that the model raised in it."""
    line = user_line(error.__traceback__)
    said = [part for part in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if part.strip()]
    # Keras prints the layer in the first line, and the reason in the second one in bold.
    count = 2 if said and said[0].startswith(_OF_KERAS) else 1
    return (
        f"{line or 'unknown line'}: {type(model).__name__} raises {type(error).__name__} on a call with "
        f"{brief((*args, *kwargs.values()))}: {(' '.join(said[:count]) or 'no message').rstrip('.')}. "
        f"{expected or 'Expected arguments that the model accepts.'} {_cure_of(args)}Check the shapes, dtypes and "
        "structure of the batch or the sample; their first axis is the batch."
    )


def _cure_of(args: Sequence[Any]) -> str:
    """How to pick the model's own arguments from a batch that holds more, as batches of data loaders do."""
    part = next((next(iter(arg)) for arg in args if isinstance(arg, Mapping) and arg), None)
    if part is None and len(args) < 2:
        return ""
    part = 0 if part is None else part
    return (
        f"If the model takes only a part of the batch, pass inputs=lambda batch: batch[{part!r}]; the sample is then "
        "that part alone. "
    )


def positional(model: nnx.Module) -> list[str]:
    """The names of the arguments that the model's `__call__` takes by position, without those in `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.__call__).parameters.values() if callable(model) else ()
    return [p.name for p in parameters if p.kind in kinds]


def _explain_jax_error(error: Exception) -> str:
    """The place, the reason, and two cures; JAX's own message is kept as the cause."""
    line = user_line(error.__traceback__)
    kinds = {
        jax.errors.TracerBoolConversionError: "a Python branch (if, while, and, or) on a value of an array",
        jax.errors.NonConcreteBooleanIndexError: "an index by a boolean mask, whose result has no fixed shape",
        jax.errors.TracerArrayConversionError: "a call of numpy on an array that is being traced",
        jax.errors.TracerIntegerConversionError: "a shape or an index of Python that comes from an array",
    }
    other = "a shape or a Python number (float(x), x.item()) taken from an array that is being traced"
    what = next((text for kind, text in kinds.items() if isinstance(error, kind)), other)
    return (
        f"{line or 'unknown line'}: {what}. A model is traced once for all inputs, so its structure must not depend on "
        "their numbers. Use jnp.where (or size=... of jnp.nonzero, jnp.unique) so that every shape is fixed, and jnp "
        "instead of np for data. Constants that jnp makes in the call are traced, too: make them with np "
        "(np.linspace for jnp.linspace), or in __init__. Or compute this outside of the model and pass the result in."
    )
