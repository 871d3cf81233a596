"""Wraps any JAX function of parameters as an `nnx.Module`: models of Haiku, Equinox and plain JAX.

The leaves of the parameters become nnx variables under their paths in the pytree. A call reassembles the pytree and
calls the function. While it runs, the names of `jax.named_scope` tell which part of the model an operation belongs to.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.layers.arguments import with_keywords
from qjax.support import extensions
from qjax.support.batches import brief
from qjax.tracing import NAMED, SCOPE


@dataclasses.dataclass(eq=False)
class Function:
    """The static side of a wrapped function, compared by identity.

    params, state: the pytree, and for each leaf the path of its nnx variable; state is None if the function has none.
    types: path -> class, for the nodes of the parameters that are objects, such as Equinox modules.
    """

    apply: Callable[..., Any]
    params: "Leaves"
    state: "Leaves | None"
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    types: Mapping[str, type]


@dataclasses.dataclass(eq=False)
class Leaves:
    """A pytree without its leaves: the structure, and the path at which each leaf is stored."""

    tree: Any
    places: tuple[tuple[str, ...], ...]


class FunctionVariables(nnx.Module):
    """The variables of one node of the parameters, and of the nodes below it."""


class FunctionModule(FunctionVariables):
    """The module that `from_function` returns."""

    def __init__(self, function: Function, rngs: nnx.Rngs | None) -> None:
        self.qjax_function = function
        self.deterministic = False
        if rngs is not None:
            self.rngs = rngs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, training = self.qjax_function, not self.deterministic
        streams = getattr(self, "rngs", None)
        # In evaluation every call draws the same numbers, so no stream advances.
        keys = {n: streams[n]() if training else streams[n].key[...] for n in streams} if streams is not None else {}
        options = {**keys, **(function.training if training else function.evaluation), **kwargs}
        params, state = self.pytrees()
        bound = functools.partial(function.apply, *((params,) if function.state is None else (params, state)))
        args, options = _bind_arguments(bound, args, options)
        with jax.named_scope(f"{SCOPE}{getattr(self, 'qjax_path', '')}{NAMED}"), extensions.around_functions():
            found = bound(*args, **options)
        if function.state is None:
            return found
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"from_function: with state=..., apply must return (output, new state), got {brief(found)}."
            )
        output, new = cast("tuple[Any, Any]", found)
        leaves, tree = jax.tree.flatten(new)
        if tree != function.state.tree:
            raise ValueError(
                f"from_function: expected apply to return a state of the structure that it takes, "
                f"{function.state.tree}, got "
                f"{tree}."
            )
        for place, leaf in zip(function.state.places, leaves, strict=True):
            self._variable(place)[...] = leaf
        return output

    def pytrees(self) -> tuple[Any, Any]:
        """The parameters and the state in the form that the function takes; the state is None if there is none."""
        own = self.qjax_function
        params, state = (
            leaves and leaves.tree.unflatten([self._variable(place)[...] for place in leaves.places])
            for leaves in (own.params, own.state)
        )
        return params, state

    def _variable(self, place: tuple[str, ...]) -> Any:
        return functools.reduce(getattr, place, self)


def from_function(
    apply: Callable[..., Any],
    params: Any,
    *,
    state: Any = None,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    rngs: nnx.Rngs | Mapping[str, jax.Array] | None = None,
) -> nnx.Module:
    """Wrap a JAX function of parameters as an `nnx.Module`, which `qjax.quantize` takes.

    For models of Haiku, Equinox and plain JAX. The parameters (`nnx.Param`) keep their paths in the pytree:
    `{"encoder": [{"w": ...}]}` has "encoder/0/w". Overrides and quantizers use these paths, and for operations without
    parameters the names of `jax.named_scope`. Like any nnx module it starts in training mode; `train()` and `eval()`
    switch the mode.

    Args:
      apply: `apply(params, *inputs)` returns the output. With `state`, `apply(params, state, *inputs)` returns
        `(output, new state)`.
      params: a pytree of arrays. For an Equinox model, the first result of `eqx.partition(model, eqx.is_array)`.
      state: a pytree of arrays (`nnx.BatchStat`), such as the moving averages of Haiku. Each call stores the new state;
        `qjax.stateful(model, nnx.BatchStat)` makes it an argument and a result of the call.
      training, evaluation: keyword arguments of `apply` that set the mode, such as `{"is_training": True}`.
      rngs: streams such as `nnx.Rngs(key=0)`, or a key for each. `apply` gets a key from every stream as the keyword
        argument of that name. In evaluation mode every call gets the same keys.

    Returns:
      A module. `model.pytrees()` returns `(params, state)` with the trained values.

    Raises:
      TypeError: `apply` cannot be called, or a leaf is not an array.

        net = hk.without_apply_rng(hk.transform(forward))
        params = net.init(jax.random.key(0), x)
        qmodel = qjax.quantize(qjax.from_function(net.apply, params), qjax.Recipe(), x)

    Examples:
      ```python
      def apply(params, x):
          return jax.nn.relu(x @ params["w"]) @ params["out"]


      params = {"w": np.ones((8, 4), np.float32), "out": np.ones((4, 2), np.float32)}
      qmodel = qjax.quantize(qjax.from_function(apply, params), qjax.Recipe(), x)
      ```
    """
    if not callable(apply):
        raise TypeError(
            f"from_function: expected a function apply(params, *inputs), got {brief(apply)}. The order is "
            "from_function(apply, params)."
        )
    arrays: dict[tuple[str, ...], nnx.Variable[Any]] = {}
    types: dict[str, type] = {}
    held = [
        None if tree is None else _name_leaves(tree, kind, name, arrays, types)
        for tree, kind, name in ((params, nnx.Param, "params"), (state, nnx.BatchStat, "state"))
    ]
    if held[0] is None or not held[0].places:
        raise TypeError(f"from_function: expected params as a pytree of arrays, got {brief(params)} without any.")
    function = Function(apply, held[0], held[1], dict(training or {}), dict(evaluation or {}), types)
    streams = rngs if rngs is None or isinstance(rngs, nnx.Rngs) else nnx.Rngs(**rngs)
    model = FunctionModule(function, streams)
    for place, variable in arrays.items():
        put(model, place, variable, FunctionVariables)
    return model


def function_types(model: nnx.Module) -> dict[str, type]:
    """Path -> class, for the nodes of the parameters that are instances of a class."""
    return types_within(model, lambda node: node.qjax_function.types if isinstance(node, FunctionModule) else None)


def _name_leaves(
    tree: Any,
    kind: type[nnx.Variable[Any]],
    name: str,
    arrays: dict[tuple[str, ...], nnx.Variable[Any]],
    types: dict[str, type],
) -> Leaves:
    """Give every leaf of a pytree a variable under a unique path."""
    places: list[tuple[str, ...]] = []
    for keys, leaf in _nodes(tree, (), types):
        if isinstance(leaf, (bool, int, str)) or not isinstance(leaf, (jax.Array, np.ndarray, float, np.generic)):
            where = f" at {'/'.join(keys)!r}" if keys else ""
            raise TypeError(
                f"from_function: {name}: expected a pytree of arrays, got {brief(leaf)}{where}. Put everything else "
                "into the function: params, static = eqx.partition(model, eqx.is_array), "
                "and eqx.combine(params, static) in apply."
            )
        place = _free_path(tuple(keys) or (name,), arrays)
        array = jnp.asarray(leaf)
        moves = kind is not nnx.Param or jnp.issubdtype(array.dtype, jnp.inexact)
        arrays[place] = (kind if moves else nnx.Variable)(array)
        places.append(place)
    return Leaves(jax.tree.structure(tree), tuple(places))


_RESERVED = frozenset(dir(FunctionModule)) | {"rngs", "deterministic", "qjax_function", "qjax_path"}
"""Attributes of the module itself, which the parameters may not overwrite."""


def _free_path(place: tuple[str, ...], taken: Mapping[tuple[str, ...], Any]) -> tuple[str, ...]:
    """The path, with "_" appended to the parts that a method, another leaf, or a node uses already."""
    found: list[str] = []
    for position, name in enumerate(place):
        last = position == len(place) - 1
        while name in _RESERVED or _meets((*found, name), taken, last):
            name += "_"
        found.append(name)
    return tuple(found)


def _meets(path: tuple[str, ...], taken: Mapping[tuple[str, ...], Any], leaf: bool) -> bool:
    return path in taken or (leaf and any(other[: len(path)] == path for other in taken))


def _nodes(tree: Any, path: tuple[str, ...], types: dict[str, type]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) for every leaf, in JAX's order; `types` is filled with the classes of the nodes above them."""
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if len(children) == 1 and not children[0][0]:
        yield path, tree
        return
    if type(tree) not in (dict, list, tuple) and path:
        types["/".join(path)] = type(tree)
    for (key,), child in children:
        word = str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
        # Haiku marks modules that a constructor makes with "~", which the names of its scopes leave out.
        parts = [part for part in word.split("/") if part not in ("", "~")] or [word]
        yield from _nodes(child, (*path, *parts), types)


def _bind_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the form that the function takes; the TypeError for a missing one tells where to pass it."""
    args, kwargs = with_keywords(function, args, kwargs)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # a callable without a known signature
        return args, kwargs
    except TypeError as error:
        raise TypeError(
            f"from_function: apply: {error}. Pass a flag such as `is_training` for each mode: from_function(..., "
            "training={'is_training': True}, evaluation={'is_training': False}). Pass a key through rngs, under the "
            "stream's name. For any other order of arguments, wrap apply in a function."
        ) from None
    return args, kwargs


def put(root: nnx.Module, place: Sequence[str], variable: Any, container: Callable[[], nnx.Module]) -> None:
    """Set a variable at a path; `container` makes the modules that are missing on the way."""
    node: Any = root
    for name in place[:-1]:
        if name not in vars(node):
            setattr(node, name, container())
        node = getattr(node, name)
    setattr(node, place[-1], variable)


def types_within(model: nnx.Module, types: Callable[[Any], Mapping[str, type] | None]) -> dict[str, type]:
    """Path in `model` -> class. types: returns the paths and classes within a module, or None to look inside it."""
    found: dict[str, type] = {}
    for path, node in nnx.iter_graph(model):
        outer = "/".join(str(part) for part in path)
        for inner, cls in (types(node) or {}).items():
            found["/".join(part for part in (outer, inner) if part)] = cls
    return found
