"""Wraps a Flax linen module as an `nnx.Module`, so that quantizing, training and converting deal with nnx only.

The variables of the linen module become nnx variables under the same paths, and a call applies the linen module to
them. While it runs, `flax.linen.intercept_methods` opens a scope with the path of every submodule that is called, and
binds markers for batch norm, dropout and embedding lookups, as `layers.scope` does for nnx modules. Lifted transforms
(`nn.scan`, `nn.remat`, `nn.vmap`) call their modules inside, where the same happens.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qjax.layers.arguments import with_keywords
from qjax.layers.nnx_layers import drop_elements, look_up_rows
from qjax.tracing import SCOPE, Layer, bind

_KINDS: dict[str, type[nnx.Variable[Any]]] = {
    "params": nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
}


@dataclasses.dataclass(eq=False)
class Linen:
    """The static side of a wrapped linen module, compared by identity.

    leaves: (collection, path in it, path of the nnx variable). absent: (collection, path in it) of variables that are
    None. types: path -> class of every submodule that a trace has met, "" for the module itself.
    """

    module: Any
    leaves: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    absent: tuple[tuple[str, tuple[str, ...]], ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    method: Any
    types: dict[str, type] = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """The function or method that a call runs, without its `self`."""
        method = "__call__" if self.method is None else self.method
        if isinstance(method, str):
            return getattr(self.module, method)
        return method if hasattr(method, "__self__") else functools.partial(method, self.module)


class LinenVariables(nnx.Module):
    """The variables of one linen submodule, and of the submodules below it."""


class LinenModule(LinenVariables):
    """The module that `from_linen` returns."""

    def __init__(self, linen: Linen, rngs: nnx.Rngs | None) -> None:
        self.qjax_linen = linen
        self.deterministic = False
        if rngs is not None:
            self.rngs = rngs

    @property
    def qjax_types(self) -> Mapping[str, type]:
        """Path -> class of the linen modules that a trace has met, "" for the module itself."""
        return {"": type(self.qjax_linen.module), **self.qjax_linen.types}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        linen, training = self.qjax_linen, not self.deterministic
        variables: dict[str, Any] = {}
        for collection, path, _ in linen.leaves:
            _insert(variables.setdefault(collection, {}), path, self._variable(collection, path)[...])
        for collection, path in linen.absent:
            _insert(variables.setdefault(collection, {}), path, None)
        mutable = [name for name in variables if name != "params" and (training or name != "batch_stats")]
        streams = getattr(self, "rngs", None)
        # In evaluation every call draws the same numbers, so no stream advances.
        rngs = {n: streams[n]() if training else streams[n].key[...] for n in streams} if streams is not None else None
        options = {**(linen.training if training else linen.evaluation), **kwargs}
        args, options = _bind_arguments(linen, args, options)
        with _open_scopes(str(getattr(self, "qjax_path", "")), linen.types), _explain_missing_stream(training):
            found = linen.module.apply(
                variables, *args, rngs=rngs, method=linen.method, mutable=mutable or False, **options
            )
        if not mutable:
            return found
        result, changed = found
        for collection, path, _ in linen.leaves:
            if collection in changed:
                self._variable(collection, path)[...] = _lookup(changed[collection], path)
        for collection, path in linen.absent:
            if collection in changed and _lookup(changed[collection], path) is not None:
                raise ValueError(
                    f"from_linen: the variable {'/'.join((collection, *path))!r} was None, and a call gave it a value. "
                    "Pass from_linen the variables as they are after such a call, where it has a value."
                )
        return result

    def _variable(self, collection: str, path: tuple[str, ...]) -> Any:
        place = next(place for c, p, place in self.qjax_linen.leaves if (c, p) == (collection, path))
        node: Any = self
        for name in place:
            node = getattr(node, name)
        return node


def from_linen(
    module: Any,
    variables: Any,
    *,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    method: str | Callable[..., Any] | None = None,
    rngs: nnx.Rngs | Mapping[str, jax.Array] | None = None,
) -> nnx.Module:
    """Wrap a Flax linen module with its variables as an `nnx.Module`, which `qjax.quantize` takes.

    The parameters (`nnx.Param`), batch statistics (`nnx.BatchStat`) and other collections keep their linen paths:
    "encoder/Dense_0/kernel". Calling it calls `module.apply`; batch statistics are updated in training mode. Like any
    nnx module it starts in training mode; `train()` and `eval()` switch the mode.

    Args:
      module: the linen module, as for `module.apply`.
      variables: the result of `module.init`, collection -> tree; or the tree of the parameters alone.
      training, evaluation: the keyword arguments of the call that set the mode, such as `{"train": True}` and
        `{"train": False}`.
      method: what to call instead of `__call__`.
      rngs: streams such as `nnx.Rngs(dropout=0)`, or a key for each. In evaluation mode, which should draw nothing,
        every call draws the same numbers.

    Raises:
      TypeError: `module` is not a linen module, or `variables` do not belong to it.

        model = qjax.from_linen(net, net.init(key, x, train=False), training={"train": True},
                                evaluation={"train": False}, rngs=nnx.Rngs(dropout=0))
        qmodel = qjax.quantize(model, qjax.Recipe(), x)

    Examples:
      ```python
      from flax import linen

      module = linen.Dense(4)
      variables = module.init(jax.random.key(0), x)
      qmodel = qjax.quantize(qjax.from_linen(module, variables), qjax.Recipe(), x)
      ```
    """
    from flax import linen as nn  # imported here, so that users of nnx do not wait for the import

    if not isinstance(module, nn.Module):
        raise TypeError(f"from_linen: expected a flax.linen.Module, got {type(module).__name__}.")
    collections = nn.unbox(variables)
    if not isinstance(collections, Mapping):
        raise TypeError(
            'from_linen: expected the variables that module.init returned, {"params": ...}, or the parameters alone, '
            f"got a {type(variables).__name__}."
        )
    if not (collections.keys() <= _KINDS.keys() or "params" in collections):
        collections = {"params": collections}
    leaves: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    taken: set[tuple[str, ...]] = {("rngs",), ("deterministic",), ("qjax_linen",), ("qjax_path",)}
    absent: list[tuple[str, tuple[str, ...]]] = []
    arrays: list[Any] = []
    for collection, tree in collections.items():
        for path, array in _leaves(tree, ()):
            if array is None:
                absent.append((collection, path))
                continue
            place = path if path not in taken else (*path[:-1], f"{path[-1]}_{collection}")
            taken.add(place)
            leaves.append((collection, path, place))
            arrays.append(array)
    linen = Linen(module, tuple(leaves), tuple(absent), dict(training or {}), dict(evaluation or {}), method)
    streams = rngs if rngs is None or isinstance(rngs, nnx.Rngs) else nnx.Rngs(**rngs)
    model = LinenModule(linen, streams)
    for (collection, _, place), array in zip(leaves, arrays, strict=True):
        node: Any = model
        for name in place[:-1]:
            if not isinstance(getattr(node, name, None), LinenVariables):
                setattr(node, name, LinenVariables())
            node = getattr(node, name)
        setattr(node, place[-1], _KINDS.get(collection, nnx.Variable)(jnp.asarray(array)))
    return model


# ---------------------------------------------------------------------- while the module runs


class _Bare(threading.local):
    """Whether the layers that are being called now are the inside of a marker."""

    inside = False


_bare = _Bare()


def _bind_arguments(
    linen: Linen, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the form that the module takes; the TypeError for a missing one tells where to pass it."""
    args, kwargs = with_keywords(linen.function, args, kwargs)
    try:
        inspect.signature(linen.function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(linen.module).__name__}: {error}. Pass a flag such as `train` or `deterministic` for each mode: "
            "from_linen(..., training={'train': True}, evaluation={'train': False}). Or pass it as the last of the "
            "call's arguments: (x, False)."
        ) from None
    return args, kwargs


@contextlib.contextmanager
def _explain_missing_stream(training: bool) -> Iterator[None]:
    """Adds the cure to the error of a module that draws random numbers and has no stream for them."""
    from flax import errors

    try:
        yield
    except errors.InvalidRngError as error:
        mode = "training" if training else "evaluation"
        raise ValueError(
            f"In {mode} mode the module draws random numbers: {error}. Give from_linen(..., rngs=...) a key for the "
            "stream; or pass the argument that switches this off, such as training={'deterministic': True} or "
            "evaluation={'train': False}."
        ) from error


@contextlib.contextmanager
def _open_scopes(prefix: str, types: dict[str, type]) -> Iterator[None]:
    from flax import linen as nn

    marked = {nn.BatchNorm: _batch_norm, nn.Dropout: _dropout, nn.Embed: _embed}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if _bare.inside or context.method_name == "setup":
            return call(*args, **kwargs)
        path = "/".join(module.path)
        types.setdefault(path, type(module))
        scope = ".".join(part for part in (prefix, *module.path) if part)
        with jax.named_scope(SCOPE + scope):
            handler = marked.get(type(module)) if context.method_name == "__call__" else None
            return call(*args, **kwargs) if handler is None else handler(module, call, *args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def _batch_norm(
    module: Any, call: Any, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
) -> Any:
    running = module.use_running_average if use_running_average is None else use_running_average
    variables = {name: dict(tree) for name, tree in module.variables.items() if name in ("params", "batch_stats")}
    mapped = module.axis_name is not None and not running
    if running is None or not isinstance(module.axis, int) or mapped or not variables:
        return call(x, use_running_average, mask=mask)
    paths, tree = jax.tree_util.tree_flatten_with_path(variables)
    bare = module.clone(parent=None, name=None, use_running_average=None)
    # Evaluation does not read the mask.
    masks = {} if running or mask is None else {"mask": mask}

    def function(x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        leaves, given = operands[: len(paths)], dict(zip(masks, operands[len(paths) :], strict=True))
        _bare.inside = True
        try:
            y, changed = bare.apply(
                tree.unflatten(leaves), x, use_running_average=running, **given, mutable=["batch_stats"]
            )
        finally:
            _bare.inside = False
        return [y] if running else [y, *(changed["batch_stats"][name] for name in ("mean", "var"))]

    attributes = {
        "epsilon": float(module.epsilon),
        "trailing": x.ndim - 1 - module.axis % x.ndim,
        "use_running_average": bool(running),
        **({} if running else {"updated": ("mean", "var")}),
    }
    operands = ("x", *(str(path[-1].key) for path, _ in paths), *masks)
    layer = Layer("batch_norm", operands, tuple(sorted(attributes.items())), function)
    y, *statistics = bind(layer, x, *(leaf for _, leaf in paths), *masks.values())
    for name, value in zip(("mean", "var"), statistics, strict=False):
        module.put_variable("batch_stats", name, value)
    return y


def _dropout(
    module: Any, call: Any, inputs: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None
) -> Any:
    off = module.deterministic if deterministic is None else deterministic
    # Test the rate first, as Flax does, because the flag may be traced where there is no dropout.
    if not 0.0 < module.rate < 1.0 or off is None or off:
        return call(inputs, deterministic, rng)
    key = module.make_rng(module.rng_collection) if rng is None else rng
    return drop_elements(inputs, key, module.rate, module.broadcast_dims)


def _embed(module: Any, call: Any, inputs: jax.Array) -> Any:
    if module.num_embeddings == 1 or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return call(inputs)
    (table,) = module.promote_dtype(module.embedding, dtype=module.dtype, inexact=False)
    return look_up_rows(inputs, table)


# ---------------------------------------------------------------------- trees


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _insert(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _lookup(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree
