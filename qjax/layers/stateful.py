"""Makes the variables of some type, such as a cache, an argument and a result of a module's call.

A graph keeps no state between calls, so the variables that a module updates have to go in and come out:

    model = qjax.stateful(net, nnx.Cache)
    output, state = model(state, *inputs)
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Stateful(nnx.Module):
    """The module that `stateful` returns; `module` is the module that was given."""

    def __init__(self, module: nnx.Module, kinds: tuple[type[nnx.Variable[Any]], ...]) -> None:
        self.module = module
        self.kinds = kinds

    def state(self) -> dict[str, Any]:
        """The present values of the variables as a nested dict of arrays: the first state."""
        return nnx.to_pure_dict(nnx.state(self.module, nnx.Any(*self.kinds)))

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The module's result, and the state after the call; the variables themselves do not change."""
        held = dict(nnx.to_flat_state(nnx.state(self.module, nnx.Any(*self.kinds))))
        before = {path: variable[...] for path, variable in held.items()}
        given = _flat(state)
        _check(before, given)
        try:
            for path, variable in held.items():
                variable.set_value(jnp.asarray(given[path]))
            output = self.module(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            after = {path: variable[...] for path, variable in held.items()}
        finally:
            for path, variable in held.items():
                variable.set_value(before[path])
        return output, _nest(after)


def stateful(module: nnx.Module, *kinds: type[nnx.Variable[Any]]) -> Stateful:
    """Wrap a module so that it takes its variables of some types first, and returns them after its result.

    Args:
      module: an `nnx.Module` with a `__call__`. It is not copied.
      kinds: types of variables, such as `nnx.Cache`. Every variable of these types becomes a part of the state.

    Returns:
      A module: `model(state, *args)` returns `(output, state after the call)`. `model.state()` is the first state, a
      nested dict of arrays by attribute; the first axis of an array is the batch, and a number (an index) has none.
      State and result share quantizers wherever the call only moves values, so codes of a cache are never rounded
      again.

    Raises:
      TypeError: no module, or no types. ValueError: the module has no variable of these types.

    Examples:
      ```python
      class Counter(nnx.Module):
          def __init__(self):
              self.total = nnx.Cache(jnp.zeros((32, 8)))

          def __call__(self, x):
              self.total[...] = self.total[...] + x
              return 0.5 * self.total[...]


      model = qjax.stateful(Counter(), nnx.Cache)
      output, state = model(model.state(), x)
      ```
    """
    if not isinstance(cast("Any", module), nnx.Module):
        raise TypeError(f"stateful: expected a flax nnx.Module, got {type(module).__name__}.")
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nnx.Variable) for kind in cast("Any", kinds)):
        raise TypeError(f"stateful: expected types of variables, such as nnx.Cache, got {kinds!r}.")
    made = Stateful(module, kinds)
    if not jax.tree.leaves(made.state()):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"stateful: expected variables of type {names}, found none in {type(module).__name__}. Create a cache "
            "first: nnx.MultiHeadAttention(...).init_cache(shape of the input)."
        )
    return made


def _flat(state: Any) -> dict[tuple[Any, ...], Any]:
    if not isinstance(state, dict):
        raise TypeError(
            f"Expected the state as a nested dict of arrays, as model.state() is, got {type(state).__name__}."
        )
    found: dict[tuple[Any, ...], Any] = {}
    for key, value in cast("dict[object, Any]", state).items():
        if isinstance(value, dict):
            found |= {(key, *path): leaf for path, leaf in _flat(value).items()}
        else:
            found[(key,)] = value
    return found


def _nest(flat: dict[tuple[Any, ...], Any]) -> dict[object, Any]:
    found: dict[object, Any] = {}
    for path, value in flat.items():
        place = found
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return found


def _check(before: dict[tuple[Any, ...], Any], given: dict[tuple[Any, ...], Any]) -> None:
    """Raise a ValueError if the state has other parts, ranks or dtypes; only the batch size is free."""
    for path in before.keys() ^ given.keys():
        word = "is missing" if path in before else "is unknown"
        raise ValueError(f"The state's part {'/'.join(map(str, path))!r} {word}. Expected the parts of model.state().")
    for path, value in before.items():
        shape, other = np.shape(value), np.shape(given[path])
        if len(shape) != len(other) or shape[1:] != other[1:] or jnp.result_type(given[path]) != value.dtype:
            raise ValueError(
                f"The state's part {'/'.join(map(str, path))!r}: expected {value.dtype} of shape (batch, "
                f"{', '.join(map(str, shape[1:]))}), got {jnp.result_type(given[path])} of shape {other}."
            )
