"""Brings the arguments of a call into one form, however the caller has written them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_keywords(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split the arguments: those behind the positional parameters get the names of keyword-only ones.

    A batch is a tuple, so its values have no names. Those left over go, in order, to the keyword-only parameters that
    have neither a default nor a value in `kwargs`; any values still left stay positional.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a callable without a known signature
        return tuple(args), dict(kwargs)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(args), dict(kwargs)
    positional = sum(p.kind in _POSITIONAL for p in parameters)
    free = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in kwargs]
    if len(args) - positional > len(free):
        return tuple(args), dict(kwargs)
    return tuple(args[:positional]), {**kwargs, **dict(zip(free, args[positional:], strict=False))}


def by_position(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every argument by position that can be, so that equal calls have equal names for their inputs.

    A parameter that the call leaves out gets its default where a later one is given.

    Examples:
      ```python
      def f(x, cache=None, mask=None, *, train=False): ...


      by_position(f, (x,), {"mask": m, "train": True})  # ((x, None, m), {"train": True})
      ```
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a callable without a known signature
        return tuple(args), dict(kwargs)
    placed, named = list(args), dict(kwargs)
    for parameter in parameters[len(placed) :]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or not named:
            break
        if parameter.name in named:
            placed.append(named.pop(parameter.name))
        elif parameter.default is not parameter.empty and any(
            p.name in named and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters
        ):
            placed.append(parameter.default)
        else:
            break
    return tuple(placed), named
